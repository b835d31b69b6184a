"""Runs whose ranks are killed at a chosen event, and a check of what they leave behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from support.forked_cli import Launcher
from support.quick_runs import JOB, TEXT, at_work

SHORT = ("train.steps=8", "train.save_every=2", "train.eval_every=0", "train.warmup=0", "train.timeout_s=6")


Stroke = tuple[str, int, str, int]


def folder_of_runs(folder: Path) -> Path:
    """Make a folder with a job, its text and a place for temporary files."""
    (folder / "job.toml").write_text(JOB)
    (folder / "text.txt").write_text(TEXT)
    (folder / "tmp").mkdir()
    return folder


def begin(here: Path, *words: str, strokes: tuple[Stroke, ...] = (), **how: Any) -> Launcher:
    """Start `phalanx words`, whose ranks will be killed."""
    environment = {
        "POISON": json.dumps(strokes),
        "STRUCK": str(here / "struck"),
        "TMPDIR": str(here / "tmp"),  # all temporary files of the run, status pages too
    }
    return Launcher(
        here, *words, environment=environment, instead={"phalanx.training.worker": "support.killed_rank"}, **how
    )


def words(name: str, *more: str) -> list[str]:
    """Return the arguments of a short run."""
    return [
        "train",
        "job.toml",
        *(word for item in (f"train.name={name}", *SHORT) for word in ("--set", item)),
        *more,
    ]


def train(here: Path, name: str, strokes: tuple[Stroke, ...], *more: str, **how: Any) -> tuple[int, str]:
    """Return (exit code, stderr) of a short run; it must end within 30 s of the last kill."""
    code, _, err = begin(here, *words(name, *more), strokes=strokes, **how).finish()
    if strokes and code:
        assert time.monotonic() - float((here / "struck").read_text()) < 30
    assert nothing_is_left(here)
    return code, err


def nothing_is_left(here: Path) -> bool:
    """Require that no process of a run is left, nor any file but torch's cache.

    Ports and shared memory, which has no name, go with the processes.
    """
    return not at_work(here) and not files_left(here)


def files_left(here: Path) -> list[Path]:
    """Return the temporary files that runs have left, but for torch's cache."""
    return [path for path in (here / "tmp").iterdir() if not path.name.startswith("torchinductor")]
