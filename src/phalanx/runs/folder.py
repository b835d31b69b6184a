"""The folders of runs, runs/<name>; a run locks its folder while it trains."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.spec.documents import read_text, require_shallow
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.plan import Plan

RUNS = Path("runs")


@contextmanager
def open_run(decided: Plan, tokenizer: Path, resume: bool, companions: Sequence[Path] = ()) -> Iterator[Path]:
    """Lock and yield the run's folder, with its plan.json, tokenizer (if there is one) and `companions`, small files.
    An old run of that name is moved aside unless it is resumed. Raises InputError."""
    folder = RUNS / decided.train.name
    with ExitStack() as stack:
        # Only errors of this preparation are about the folder, not errors of the run inside `yield`.
        try:
            claim(folder, stack, "train.name")
            if not resume:
                move_aside(folder)
            folder.mkdir(exist_ok=True)
            for file in () if resume else companions:
                _copy(file, folder / file.name)
            if tokenizer.exists():
                _copy(tokenizer, folder / "tokenizer.json")
            plan.write(decided, folder / "plan.json")
        except OSError as error:
            raise InputError("train.name", folder.name, f"{folder} cannot be used ({error})") from None
        yield folder.absolute()


def _copy(source: Path, target: Path) -> None:
    """Copy a file atomically; a link at the target is replaced, not followed. Raises OSError."""
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    shutil.copyfile(source, part)
    os.replace(part, target)


def claim(folder: Path, stack: ExitStack, field: str) -> None:
    """Lock a run's folder, which need not exist, until `stack` ends. `field`: the setting that names it. Raises
    InputError, OSError."""
    folder.parent.mkdir(exist_ok=True)
    # A link is not followed, and nothing is written: it may name another user's file.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder.with_name(f".{folder.name}.lock"), flags, 0o644)
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(field, folder.name, "is in use by another process", "choose another") from None


def move_aside(folder: Path) -> None:
    """Rename an old run's folder, if there is one, to carry a time stamp. Raises OSError."""
    if folder.exists():
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        os.replace(folder, folder.with_name(f"{folder.name}.{stamp}"))


def metrics(folder: Path, sample: int | None = None) -> list[dict[str, Any]]:
    """Read a run's metrics.jsonl, a dictionary for each line; a half-written last line is left out. Of a file larger
    than `_WHOLE` bytes, about `sample` lines at equal distances are read, and all at its end. Raises InputError."""
    path = folder / "metrics.jsonl"
    try:
        if sample and path.is_file() and path.stat().st_size > _WHOLE:
            lines = _sampled(path, sample)
        else:
            lines = read_text(path, "run").removesuffix("\n").split("\n")
    except InputError as error:
        raise InputError(
            "run", str(folder), f"has no metrics: {error.reason}", "name a folder as runs/NAME"
        ) from None
    rows = []
    for i, line in enumerate(lines, 1):
        try:
            row = require_shallow(json.loads(line))
        except (ValueError, RecursionError):
            if i < len(lines):
                raise InputError("run", str(folder), f"line {i} of metrics.jsonl is not JSON") from None
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise InputError("run", str(folder), f"line {i} of metrics.jsonl is not a step of a run")
        rows.append(row)
    return rows


_WHOLE, _TAIL = 2**23, 2**16
"""Largest file of metrics that is read whole, in bytes (about 20,000 steps); bytes read at the end of a larger
one."""


def _sampled(path: Path, count: int) -> list[str]:
    """Return about `count` lines at equal distances in a file, and all lines in its last `_TAIL` bytes, in order. The
    time that it takes depends on their number, not on the file's size."""
    at: dict[int, bytes] = {}
    tail = path.stat().st_size - _TAIL
    with path.open("rb") as file:
        for place in range(0, tail, tail // count):
            file.seek(place)
            if place:
                file.readline(_TAIL)  # the rest of a line
            at[file.tell()] = file.readline(_TAIL)
        file.seek(tail)
        file.readline(_TAIL)
        while line := file.readline(_TAIL):
            at[file.tell() - len(line)] = line
    return [at[place].decode(errors="replace") for place in sorted(at)]


def latest_run() -> Path:
    """Return the folder of the run with the newest checkpoint. Raises InputError if there is none, or none intact."""
    from phalanx.runtime.checkpoint.store import all_steps, newest_intact, why_none_intact

    saved_at, damaged = {}, []
    for path in RUNS.glob("*/plan.json"):
        saved = path.parent / "checkpoint"
        checkpoint = newest_intact(saved)
        # The folder of a run that was moved aside is not named as in its plan.
        if checkpoint is not None and plan.read(path).train.name == path.parent.name:
            saved_at[path.parent] = checkpoint.stat().st_mtime
        elif checkpoint is None and all_steps(saved):
            damaged.append(path.parent)
    if not saved_at and damaged:
        raise InputError("resume", str(damaged[0]), why_none_intact(damaged[0] / "checkpoint"))
    if not saved_at:
        raise InputError("resume", None, f"no run with a checkpoint in {RUNS}/", "name the job file to start one")
    return max(saved_at, key=lambda p: saved_at[p])
