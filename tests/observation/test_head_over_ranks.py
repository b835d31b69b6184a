"""The head in slices over tp ranks and at the end of a pipeline: the step is one process's, its events and live bytes
are the program's, and the logits of all tokens exist nowhere."""

from __future__ import annotations

import pytest
from support import rank_cases
from support.rank_pool import Pool
from support.sizes import combined, sampled

from phalanx.cost.step.expand import expand
from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.parity.parity import BOUNDS
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

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
    sampled(
        [("float32", False, True), ("float32", True, False), ("bfloat16", False, False), ("bfloat16", True, True)],
        (1, 2),
    ),
)
def test_the_step_is_the_program(pool: Pool, precision: str, sp: bool, tied: bool) -> None:
    for found in pool.run(2, rank_cases.instrumented_step, *_case(precision, sp, tied)):
        assert found["differences"] == []
        assert found["measured_peak"] == pytest.approx(found["predicted_peak"], abs=SLACK_BYTES), found


PIPELINES = [
    Strategy(pp=2, micro_batch=2),
    Strategy(pp=2, micro_batch=2, schedule="gpipe", zero=1),
    Strategy(pp=2, tp=2, sp=True, micro_batch=2, virtual=2, schedule="interleaved"),
]


def _head_flops(model: ModelSpec, job: Job, s: Strategy) -> dict[str, int]:
    """FLOPs of the head by phase, of one micro-batch on the last pipeline rank."""
    events = expand(Layout(model, job, s).rank_view(s.world - 1)).events
    return {e.phase: e.flops for e in events if e.kind == "compute" and e.unit == "head" and not e.micro_batch}


@pytest.mark.parametrize(("s", "precision"), combined(PIPELINES, ["float64", "bfloat16"]), ids=str)
def test_at_the_end_of_a_pipeline(pool: Pool, s: Strategy, precision: str) -> None:
    model = build(ModelSpec, complete(_SIZES | {"tied": s.tp > 1, "layers": 4}), "model")
    job = Job(4, 256, Precision(precision))  # type: ignore[arg-type]
    assert _head_flops(model, job, s)["B"] == 0
    for found in pool.run(s.world, rank_cases.instrumented_step, model, job, s):
        assert found["differences"] == []
        assert found["measured_peak"] == pytest.approx(found["predicted_peak"], rel=1e-3), found
    if precision == "float64":
        for other in pool.run(s.world, rank_cases.examine, model, job, s, "float64", 2, "shm", ("adamw",))[0]:
            assert other.loss_rel_max <= BOUNDS["float64"], other
            assert other.grad_rel_max <= BOUNDS["float64"], other


def test_a_split_backward_pass_keeps_the_logits() -> None:
    """Their weight's gradient is what fills a bubble."""
    model = build(ModelSpec, complete(_SIZES | {"tied": False, "layers": 4}), "model")
    flops = _head_flops(model, Job(8, 256), Strategy(pp=2, micro_batch=2, schedule="zb-h1"))
    assert flops["F"] == flops["I"] == flops["W"] > 0
