"""A job that trains in a moment, and readers of what its run wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

JOB = """
[model]
family = "llama"
vocab = 300
hidden = 32
layers = 2
heads = 2
kv_heads = 1
ffn = 64
max_seq = 64
[cluster]
ranks = 2
[job]
global_batch = 8
seq = 32
[strategy]
dp = 2
micro_batch = 2
[train]
data = "text.txt"
lr = 3e-3
steps = 30
warmup = 3
eval_every = 15
eval_batches = 1
save_every = 10
check_sync = 5
sample_tokens = 5
"""


TEXT = "the quick brown fox jumps over the lazy dog; a truth universally acknowledged.\n\n" * 120


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def at_work(here: Path) -> list[int]:
    """Return the processes that run in a folder: launchers and ranks of its runs."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cwd") if _target(path) == here.resolve()]


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:  # it has ended meanwhile, or belongs to another user
        return None


def wait_for_step(run: Path, step: int) -> None:
    for _ in range(900):
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} in {run}")
