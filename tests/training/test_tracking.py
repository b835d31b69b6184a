"""What is shown of a run: lines of a log file, and TensorBoard's scalars."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.training.metrics import Progress
from phalanx.training.tensorboard import scalars


def _row(step: int, loss: float, seconds: float = 0.5) -> dict[str, Any]:
    shown = {"step": step, "loss": loss, "lr": 1e-3 / step, "grad_norm": 123.4 / step**3, "mfu": 0.4 / step}
    return shown | {"step_time_s": seconds, "tokens_per_s": 100 / seconds, "mem_bytes": 2**30}


def test_a_log_file_reads_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 4))  # every step takes four seconds
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    progress = Progress(steps=1000, start=0, tokens_per_step=1000, stream=stream)
    for step in range(1, 13):
        progress.step(_row(step, 10 / step, seconds=9.0 if step == 1 else 0.5))
    progress.step(_row(1000, 0.001) | {"eval_loss": 1.25})
    progress.close()
    lines = stream.getvalue().splitlines()
    assert 4 <= len(lines) <= 6  # the first, then not every step
    marks = ("loss", "lr", "grad norm", "tokens/s", "MFU", "left")
    assert len({tuple(line.index(mark) for mark in marks) for line in lines}) == 1, lines
    assert [int(x) for x in re.findall(r"step +(\d+)/1000", lines[0] + lines[-1])] == [1, 1000]
    assert "2,000 tokens/s" in lines[1]  # the slow first step does not count
    assert re.search(r"8:1\d left$", lines[1])  # some 990 steps of half a second
    assert lines[-1].endswith("0:00 left  held-out 1.250")


@pytest.mark.parametrize("mfu", [0.99, 1.5])
def test_more_flops_than_the_machine_has_are_doubted_once(mfu: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.training.metrics._LINE_EVERY_S", 0.0)
    stream = io.StringIO()
    progress = Progress(steps=10, start=0, tokens_per_step=1000, stream=stream)
    for step in range(1, 11):
        progress.step(_row(step, 1.0) | {"mfu": mfu})
    assert stream.getvalue().count("phalanx measure measures it again") == int(mfu > 1)


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    """Steps that were run again after the last checkpoint too, or from the beginning."""
    pytest.importorskip("tensorboard", reason="an extra: pip install 'phalanx[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, stop in ((0, 2), (0, 5), (3, 8)):
        with scalars(tmp_path, start) as write:
            for step in range(start + 1, stop + 1):
                write(_row(step, loss=step + start / 10) | ({"eval_loss": None} if step == 2 else {}))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert "eval_loss" not in found.Tags()["scalars"]
    losses = {e.step: round(e.value, 4) for e in found.Scalars("loss")}
    assert len(found.Scalars("loss")) == 8
    assert losses == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.3, 5: 5.3, 6: 6.3, 7: 7.3, 8: 8.3}
    assert {"lr", "grad_norm", "mfu", "tokens_per_s"} <= set(found.Tags()["scalars"])
