"""Runs whose ranks are killed at a chosen event, and what may be left of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from support.forked_cli import Launcher
from support.quick_runs import JOB, TEXT, at_work

SHORT = ("train.steps=8", "train.save_every=2", "train.eval_every=0", "train.warmup=0", "train.timeout_s=10")


Stroke = tuple[str, int, str, int]


def folder_of_runs(folder: Path) -> Path:
    """With a job, its text and a place for all that runs put aside."""
    (folder / "job.toml").write_text(JOB)
    (folder / "text.txt").write_text(TEXT)
    (folder / "tmp").mkdir()
    return folder


def begin(here: Path, *words: str, strokes: tuple[Stroke, ...] = (), **how: Any) -> Launcher:
    """`phalanx words`, whose ranks are struck."""
    environment = {
        "POISON": json.dumps(strokes),
        "STRUCK": str(here / "struck"),
        "TMPDIR": str(here / "tmp"),  # all that is put aside for the run, status pages too
    }
    return Launcher(
        here, *words, environment=environment, instead={"phalanx.train.worker": "support.killed_rank"}, **how
    )


def words(name: str, *more: str) -> list[str]:
    """Of a short run."""
    return [
        "train",
        "job.toml",
        *(word for item in (f"train.name={name}", *SHORT) for word in ("--set", item)),
        *more,
    ]


def train(here: Path, name: str, strokes: tuple[Stroke, ...], *more: str, **how: Any) -> tuple[int, str]:
    """Exit code, and what it said on stderr, of a short run. It has ended within 30 s of the last stroke."""
    code, _, err = begin(here, *words(name, *more), strokes=strokes, **how).finish()
    if strokes and code:
        assert time.monotonic() - float((here / "struck").read_text()) < 30
    assert nothing_is_left(here)
    return code, err


def nothing_is_left(here: Path) -> bool:
    """No process of a run, hence no port and no shared memory, which has no name; and no file but torch's cache."""
    files = [path for path in (here / "tmp").iterdir() if not path.name.startswith("torchinductor")]
    return not at_work(here) and not files
