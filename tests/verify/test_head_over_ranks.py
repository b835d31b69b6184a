"""The head in slices over tp ranks: the step is one process's, its events and live bytes are the program's, and the
logits of all tokens exist nowhere."""

from __future__ import annotations

import pytest
from support import rank_cases
from support.rank_pool import Pool

from phalanx.cost.step.expand import expand
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.verify.diff import SLACK_BYTES
from phalanx.verify.parity import BOUNDS

_SIZES = {"family": "llama", "vocab": 1023, "hidden": 32, "layers": 1, "heads": 4, "ffn": 48, "max_seq": 256}


def _case(precision: str, sp: bool, tied: bool) -> tuple[ModelSpec, Job, Strategy]:
    model = build(ModelSpec, complete(_SIZES | {"tied": tied}), "model")
    return model, Job(4, 256, Precision(precision)), Strategy(tp=2, sp=sp, micro_batch=2)  # type: ignore[arg-type]


def _loss_events(case: tuple[ModelSpec, Job, Strategy]) -> list[Event]:
    events = expand(Layout(*case).rank_view(0)).events
    return [e for e in events if e.unit == "head" and e.op == "all_reduce" and e.phase == "F" and not e.micro_batch]


@pytest.mark.parametrize("sp", [False, True])
def test_parity(pool: Pool, sp: bool) -> None:
    case = _case("float64", sp, tied=sp)
    assert [e.bytes for e in _loss_events(case)] == [128 * 8, 2 * 128 * 8] * 4  # a pair for each of four slices
    for found in pool.run(2, rank_cases.examine, *case, "float64", 2)[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


@pytest.mark.parametrize(
    ("precision", "sp", "tied"),
    [("float32", False, True), ("float32", True, False), ("bfloat16", False, False), ("bfloat16", True, True)],
)
def test_the_step_is_the_program(pool: Pool, precision: str, sp: bool, tied: bool) -> None:
    for found in pool.run(2, rank_cases.instrumented_step, *_case(precision, sp, tied)):
        assert found["differences"] == []
        assert found["measured_peak"] == pytest.approx(found["predicted_peak"], abs=SLACK_BYTES), found
