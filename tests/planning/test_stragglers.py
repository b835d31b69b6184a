"""Steps with slow ranks: equal to the predicted step without, parts that add up, pipelines run action by action."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx

from phalanx.cost.pipeline_time import Costs, price
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import chunk_costs, refine
from phalanx.planning.stragglers.lockstep import lockstep
from phalanx.planning.stragglers.priced import priced_pipelines
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.pipeline.schedules import build
from phalanx.spec.strategy.spec import Strategy

LINES = (
    Strategy(dp=8),
    Strategy(dp=4, tp=2, zero=1),
    Strategy(dp=2, tp=2, pp=4, zero=1),
    Strategy(dp=2, pp=4, virtual=2, schedule="interleaved"),
    Strategy(dp=4, cp=2, pp=2),
)
WORDS = (
    "simulate --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 2048 --strategy dp=2,tp=2,pp=4,zero=1"
)


def _pricing(s: Strategy, batch: int = 64, stack: str = "megatron-core") -> Pricing:
    model = model_named("llama3-8b")[0]
    return pricing_by_gpus(model, cluster_named("dgx-h100"), batch, 2048, stack)(s.world)


@given(st.sampled_from(LINES), st.data())
@settings(max_examples=12)
def test_lost_time_is_the_sum_of_its_parts(s: Strategy, data: st.DataObject) -> None:
    pricing = _pricing(s)
    x = priced_pipelines(pricing, s)
    factor = np.ones(s.world)
    same = x.delayed(factor)
    assert same.step_s == same.undisturbed_s == pytest.approx(refine(pricing, [s])[0][0].seconds, rel=1e-12)
    for rank in data.draw(st.lists(st.integers(0, s.world - 1), min_size=1, max_size=4)):
        factor[rank] = data.draw(st.floats(1.01, 3.0))
    d = x.delayed(factor)
    parts = d.own_s + d.inside_s + d.stages_s + d.replicas_s + d.update_s
    assert parts == pytest.approx(s.world * (d.step_s - d.undisturbed_s), rel=1e-9, abs=1e-9)
    assert min(d.own_s, d.inside_s, d.replicas_s, d.update_s) >= 0
    assert d.undisturbed_s <= d.step_s <= d.undisturbed_s * factor.max() * (1 + 1e-12)
    slower = x.delayed(factor * 1.1)
    assert slower.step_s > d.step_s


def _makespan(pricing: Pricing, s: Strategy, stages: np.ndarray) -> float:
    """The schedule of a pipeline with these factors of its stages, run one action at a time."""
    c = chunk_costs(pricing, s, refine(pricing, [s])[0][1].blocks)
    of_chunk = stages[np.arange(s.pp * s.virtual) % s.pp]
    costs = Costs(*(np.array(p) * of_chunk for p in (c.forward, c.input_grad, c.weight_grad)))
    m = s.accumulation(pricing.job)
    return price(build(s.schedule, s.pp, m, s.virtual if s.virtual > 1 else None), costs).makespan


@given(st.sampled_from([s for s in LINES if s.pp > 1]), st.data())
@settings(max_examples=10)
def test_a_pipeline_ends_when_its_actions_do(s: Strategy, data: st.DataObject) -> None:
    """The schedule run one action at a time: equal, however many micro-batches a rank has."""
    batch = data.draw(st.sampled_from([16, 64]))
    pricing = _pricing(s, batch)
    x = priced_pipelines(pricing, s)
    stages = np.array([data.draw(st.floats(1, 2)) for _ in range(s.pp)])
    rows = np.broadcast_to(stages, (x.lockstep.pipelines, s.pp))
    assert x.run(rows) == pytest.approx(_makespan(pricing, s, stages), rel=1e-9)
    assert x.schedule(0, stages).makespan == pytest.approx(_makespan(pricing, s, stages), rel=1e-9)


def test_a_slow_stage_sets_the_pace_late() -> None:
    """Of stages that hardly differ the slowest is felt after many micro-batches: more than the price runs."""
    s = next(s for s in LINES if s.virtual > 1)
    pricing = _pricing(s, 64)
    x = priced_pipelines(pricing, s)
    for stages in 1 + np.random.default_rng(0).random((30, s.pp)):
        rows = np.broadcast_to(stages, (x.lockstep.pipelines, s.pp))
        assert x.run(rows) == pytest.approx(_makespan(pricing, s, stages), rel=1e-9)


def test_ranks_that_meet_inside_layers_are_one_pipeline() -> None:
    def pipelines(**fields: int) -> int:
        s = Strategy(**fields)  # type: ignore[arg-type]
        return lockstep(s, sharding_of(s)).pipelines

    assert pipelines(dp=8, tp=2) == 8
    assert pipelines(dp=8, tp=2, ep=4) == 4  # two replicas hold the experts
    assert pipelines(dp=8, zero=3) == 1
    assert pipelines(dp=8, zero=3, shard=4) == pipelines(dp=8, zero=2, shard=4) == 2
    assert pipelines(dp=8, zero=1) == 8
    s = Strategy(dp=2, cp=2, pp=2)
    at = lockstep(s, sharding_of(s))
    assert sorted(np.bincount(at.pipeline * 2 + at.stage)) == [2, 2, 2, 2]


@pytest.mark.parametrize(("stack", "zero", "pipelines"), [("fsdp2", 3, 1), ("deepspeed", 3, 1), ("deepspeed", 1, 8)])
def test_where_replicas_meet_is_the_stacks(stack: str, zero: int, pipelines: int) -> None:
    s = Strategy(dp=8, zero=zero)  # type: ignore[arg-type]
    assert priced_pipelines(_pricing(s, stack=stack), s).lockstep.pipelines == pipelines


def test_if_all_are_slow_passes_and_update_are(tmp_path: Path) -> None:
    s = LINES[1]
    x = priced_pipelines(_pricing(s), s)
    d = x.delayed(np.full(s.world, 1.5))
    assert x.update_s > 0
    assert d.step_s == pytest.approx(d.undisturbed_s + 0.5 * (x.alone_s + x.update_s), rel=1e-12)
    assert (d.inside_s, d.replicas_s) == (0, 0)


def test_a_delay_reaches_whom_it_must(tmp_path: Path) -> None:
    found = json.loads(phalanx(tmp_path, *WORDS.split(), "--slow", "rank=5:1.5", "--json")[1])
    predicted = json.loads(phalanx(tmp_path, "predict", *WORDS.split()[1:], "--json")[1])["step_time_s"]
    assert found["undisturbed_s"] == pytest.approx(predicted, rel=1e-9)
    assert found["slowdown"] > 1.02
    (slow,) = found["slow"]
    assert (slow["rank"], slow["factor"], slow["lockstep_ranks"]) == (5, 1.5, 2)
    assert (found["pipelines"], found["delayed_pipelines"]) == (2, 1)
    assert sum(w["gpu_s"] for w in found["waits"]) == pytest.approx(found["lost_gpu_s"])
    everyone = json.loads(phalanx(tmp_path, *WORDS.split(), "--slow", "node=0:1.5,node=1:1.5", "--json")[1])
    assert [w["gpu_s"] for w in everyone["waits"] if "pipelines" in w["where"]] == [0.0]


def _with_jitter(tmp_path: Path, gpus: int, seed: int = 0) -> float:
    words = f"simulate --model llama3-8b --cluster dgx-h100 --gpus {gpus} --batch {4 * gpus} --seq 2048"
    words += f" --strategy dp={gpus} --jitter 3% --seed {seed} --json"
    return float(json.loads(phalanx(tmp_path, words)[1])["slowdown"])


def test_jitter_costs_the_slowest_of_many(tmp_path: Path) -> None:
    """More ranks, more wait: the expected maximum grows with their number. A rank alone is as often faster."""
    assert 1.02 < _with_jitter(tmp_path, 8) < _with_jitter(tmp_path, 512) < 1.15
    assert all(1 < _with_jitter(tmp_path, 1, seed) < 1.002 for seed in range(8))  # exp(0.03^2 / 2) of many


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slow", "37"), "is no rank and factor; use rank=37:1.3"),
        (("--slow", "rank=16:2"), "is outside of the 16 ranks of the strategy; use 0 to 15"),
        (("--slow", "node=2:2"), "is outside of the 16 ranks of the strategy; use 0 to 1"),
        (("--slow", "rank=1:0"), "is no rank and factor"),
        (("--jitter", "much"), "is no share of a rank's time"),
        (("--jitter", "nan"), "is no share of a rank's time"),
        (("--slow-link", "nic=3"), "is no link and share of its rate between 0 and 1; use nic=37:0.5"),
        (("--slow-link", "nic=3:1.5"), "is no link and share of its rate between 0 and 1"),
        (("--slow-link", "nic=16:0.5"), "is outside of the 16 ranks of the strategy; use 0 to 15"),
        (("--slow-link", "tier=rope:0.5"), "names no tier of dgx-h100; one of "),
        (("--kill", "rank=3"), "is no rank or node and moment of a step; use rank=37@40%"),
        (("--kill", "rank=3@120%"), "is after the end of the step"),
        (("--kill", "rank=3@90s"), "is after the end of the step"),
        (("--kill", "node=2@1%"), "is outside of the 16 ranks of the strategy; use 0 to 1"),
        (("--ranks", "3"), "belong to a trace; name its file: --trace step.json"),
        (("--trace", "step.json", "--ranks", "3-99"), "is outside of the 16 ranks"),
        (("--trace", "step.json", "--ranks", "5-3"), "goes backwards; use 3-5"),
        (("--trace", "no/step.json"), "no"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert said in error_of(tmp_path, *WORDS.split(), *words)
