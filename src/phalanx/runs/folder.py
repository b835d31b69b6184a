"""The folders of runs: runs/<name>, each of them one process's while it trains there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.plan import Plan

RUNS = Path("runs")


@contextmanager
def open_run(decided: Plan, tokenizer: Path, resume: bool, beside: Sequence[Path] = ()) -> Iterator[Path]:
    """The run's folder with its plan.json, tokenizer (where there is one) and small files from `beside`, ours alone
    while the run lasts; an old run of that name is moved aside unless it is resumed. Raises InputError."""
    folder = RUNS / decided.train.name
    with ExitStack() as stack:
        # What goes wrong here is the folder's fault; what goes wrong while the run lasts is not.
        try:
            claim(folder, stack, "train.name")
            if not resume:
                move_aside(folder)
            folder.mkdir(exist_ok=True)
            for file in () if resume else beside:
                shutil.copyfile(file, folder / file.name)
            if tokenizer.exists():
                shutil.copyfile(tokenizer, folder / "tokenizer.json")
            plan.write(decided, folder / "plan.json")
        except OSError as error:
            raise InputError("train.name", folder.name, f"{folder} cannot be used ({error})") from None
        yield folder.absolute()


def claim(folder: Path, stack: ExitStack, field: str) -> None:
    """Make a run's folder, there or not yet, ours alone until `stack` ends. `field`: what names it.

    Raises InputError, OSError."""
    folder.parent.mkdir(exist_ok=True)
    lock = stack.enter_context(folder.with_name(f".{folder.name}.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(field, folder.name, "is in use by another process", "choose another") from None


def move_aside(folder: Path) -> None:
    """Give an old run of that name another one. Raises OSError."""
    if folder.exists():
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        os.replace(folder, folder.with_name(f"{folder.name}.{stamp}"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; the last one of a killed run may be half written. Raises InputError."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError as error:
        raise InputError("run", str(folder), f"has no metrics ({error})", "name a folder as runs/NAME") from None
    found = []
    for i, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if i + 1 < len(lines):
                raise InputError("run", str(folder), f"line {i + 1} of metrics.jsonl is not JSON") from None
    return found


def latest_run() -> Path:
    """The run with the newest checkpoint."""
    from phalanx.runtime.checkpoint.store import newest

    found = {}
    for path in RUNS.glob("*/plan.json"):
        checkpoint = newest(path.parent / "checkpoint")
        # A run that was moved aside carries another name than its plan.
        if checkpoint is not None and plan.read(path).train.name == path.parent.name:
            found[path.parent] = checkpoint.stat().st_mtime
    if not found:
        raise InputError("--resume", None, f"no run with a checkpoint in {RUNS}/", "name the job file to start one")
    return max(found, key=lambda p: found[p])
