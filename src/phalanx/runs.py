"""The folders of runs: runs/<name>, each of them one process's while it trains there."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from phalanx.spec import plan
from phalanx.spec.errors import InputError
from phalanx.spec.plan import Plan

RUNS = Path("runs")


@contextmanager
def open_run(decided: Plan, tokenizer: Path, resume: bool) -> Iterator[Path]:
    """The run's folder with its plan.json and tokenizer (where there is one), ours alone while the run lasts; an old
    run of that name is moved aside unless it is resumed. Raises InputError."""
    folder = RUNS / decided.train.name
    with ExitStack() as stack:
        # What goes wrong here is the folder's fault; what goes wrong while the run lasts is not.
        try:
            claim(folder, stack, anew=not resume)
            if tokenizer.exists():
                shutil.copyfile(tokenizer, folder / "tokenizer.json")
            plan.write(decided, folder / "plan.json")
        except OSError as error:
            raise InputError("train.name", folder.name, f"{folder} cannot be used ({error})") from None
        yield folder.absolute()


def claim(folder: Path, stack: ExitStack, anew: bool) -> None:
    """Make a run's folder ours alone until `stack` ends; `anew`: empty, an old one is moved aside. Raises InputError,
    OSError."""
    folder.parent.mkdir(exist_ok=True)
    lock = stack.enter_context(folder.with_name(f".{folder.name}.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError("train.name", folder.name, "is being trained by another process", "choose another") from None
    if folder.exists() and anew:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        os.replace(folder, folder.with_name(f"{folder.name}.{stamp}"))
    folder.mkdir(exist_ok=True)


def latest_run() -> Path:
    """The run with the newest checkpoint."""
    from phalanx.runtime.checkpoint import newest

    found = {}
    for path in RUNS.glob("*/plan.json"):
        checkpoint = newest(path.parent / "checkpoint")
        # A run that was moved aside carries another name than its plan.
        if checkpoint is not None and plan.read(path).train.name == path.parent.name:
            found[path.parent] = checkpoint.stat().st_mtime
    if not found:
        raise InputError("--resume", None, f"no run with a checkpoint in {RUNS}/", "name the job file to start one")
    return max(found, key=lambda p: found[p])
