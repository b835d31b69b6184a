"""What a proof says of its ranks, its micro-batches, its bytes and its verdict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.planning.tables.table import Sheet
from phalanx.report.measured import verify
from phalanx.schedule.event import Event
from phalanx.spec.strategy.spec import Strategy

EVENTS = (
    Event("collective", "all_reduce", "B", "bucket.0", "dp", 2, None, "float32", bytes=100),
    Event("collective", "all_reduce", "B", "bucket.1", "dp", 2, None, "float32", bytes=20),
    Event("compute", "forward", "F", "blocks.0", flops=10**6),
    Event("compute", "optimizer", "opt", "", flops=7),
)


def _proof(ran: int, count: int, s: Strategy, **more: Any) -> tuple[Any, Any]:
    """A proof of one class of all ranks whose program has `count` micro-batches, of which `ran` ran."""
    job = SimpleNamespace(seq=8, global_batch=count * s.dp)
    state = SimpleNamespace(total=1000, scratch=0)
    program = SimpleNamespace(events=EVENTS, state=state, peak_bytes=5000)
    recorded = SimpleNamespace(ran=ran, memory=SimpleNamespace(state=1001, peak=5002), waits={"a.py:1": 2 * count})
    values = {
        "ranks": SimpleNamespace(rank=0, count=s.world, description="these"),
        "failed": "",
        "recorded": recorded,
    }
    values |= {"program": program, "differences": (), "proved": True, "seconds": 1.0, "deviation": 3} | more
    target = SimpleNamespace(strategy=s, job=job, measured=None)
    return SimpleNamespace(target=target, on_gpu=False), SimpleNamespace(**values)


def _said(v: Any, verified: Any) -> str:
    return "\n".join(part for part in verify._class(v, verified) if isinstance(part, str))


@pytest.mark.parametrize("pp", [1, 2])
def test_it_is_said_which_micro_batches_stand_for_others(pp: int) -> None:
    """Of nine, from 0 to 8, the first four and the last one ran: 3 did what 2 did, and stands for those up to 7."""
    said = "micro-batch 3 did what 2 did, and represents all up to 7 of 9"
    assert said in _said(*_proof(5, 9, Strategy(dp=2, pp=pp)))
    assert "represents all up to" not in _said(*_proof(9, 9, Strategy(dp=2, pp=pp)))


def test_a_proof_shows_totals_and_bytes_and_its_verdict() -> None:
    v, verified = _proof(1, 1, Strategy(dp=2))
    sheets = [part for part in verify._class(v, verified) if isinstance(part, Sheet)]
    assert [tuple(row) for row in sheets[0].rows] == [("all_reduce over dp", 2, 120)]
    assert [tuple(row) for row in sheets[1].rows] == [
        ("before the step", "1000 B (1,000 B)", "1001 B (1,001 B)"),
        ("peak", "4.9 KiB (5,000 B)", "4.9 KiB (5,002 B)"),
    ]
    said = _said(v, verified)
    assert "\nrank 0 represents all 2 ranks" in said
    assert "proved in 1.0 s: 2 collectives and 2 passes in order, 1,000,000 FLOP by unit, live bytes" in said
    assert "(off by 3; " in said
    v.target.measured = 4999
    (_, peak) = next(p for p in list(verify._class(v, verified))[::-1] if isinstance(p, Sheet)).rows
    assert tuple(peak)[-1] == "4.9 KiB (4,999 B)"
    v.on_gpu = True
    said = _said(v, verified)
    assert "waits of the host for the GPU in a step: 2; by line:\n  2 (2 a micro-batch) at a.py:1" in said
    assert "one device, no other waits" in said


def test_what_is_not_proved_says_why() -> None:
    assert _said(*_proof(1, 1, Strategy(dp=2), failed="it failed")).endswith("NOT proved: it failed")
    around = [(3, "a", "b"), (4, "c", "d")]
    difference = SimpleNamespace(number=4, around=around)
    parts = list(verify._class(*_proof(1, 1, Strategy(), differences=(difference,), proved=False)))
    sheet = parts[-1]
    assert isinstance(sheet, Sheet)
    assert (sheet.marked, list(sheet.rows)) == (1, around)
    assert not any("proved in" in part for part in parts if isinstance(part, str))


def test_all_ranks_are_proved_by_the_steps_of_several_classes() -> None:
    classes = [SimpleNamespace(seconds=1.25, proved=True, ranks=SimpleNamespace(rank=r)) for r in (0, 5, 9)]
    v: Any = SimpleNamespace(classes=classes, proved=True, target=SimpleNamespace(strategy=Strategy(dp=1024)))
    assert list(verify._joint_verdict(v)) == ["\nall 1,024 ranks proved by the steps of 3, in 3.8 s"]
    classes[1].proved = v.proved = False
    assert list(verify._joint_verdict(v)) == ["\nNOT proved: 1 of 3 steps (rank 5)"]
    classes[2].proved = False
    assert list(verify._joint_verdict(v)) == ["\nNOT proved: 2 of 3 steps (ranks 5, 9)"]
