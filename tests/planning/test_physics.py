"""No answer of `predict` breaks what must hold of any machine: drawn questions to all stacks, pipelines timed action
by action (tests/cost/test_every_stack.py has the formulas alone, and state on more GPUs).

    bounds     0 < MFU <= 1; no rank holds less than its weights
    machine    no slower with faster links, sooner messages, faster memory or faster products, if blocks stay put
    batch      no fewer tokens/s with more micro-batches
    cut        a cut of the blocks takes as long listed as found
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples

from phalanx.frameworks.registry import STACKS
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.planning.search import space, strategy_columns
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import RefinedPrices
from phalanx.schedule.pipeline.given_layout import write_layers
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy

GPUS, BATCH, SEQ = 32, 64, 4096
NEAR = 1 + 1e-9


@cache
def _chosen(stack: str, model: str, cluster: str) -> tuple[Pricing, strategy_columns.Strategies]:
    """The question, and the strategies that the stack's search may choose."""
    p = Pricing(model_named(model)[0], cluster_named(cluster)(GPUS), Job(BATCH, SEQ, Precision("bfloat16")), stack)
    rows = space.pipelines(
        space.experts(space.cores(p.model, p.job, GPUS, p.options), p.model, p.job, p.options),
        p.model,
        p.job,
        p.options,
    )
    return p, rows


@st.composite
def questions(draw: st.DrawFn) -> tuple[Pricing, Strategy]:
    stack = draw(st.sampled_from(sorted(STACKS)))
    model = draw(st.sampled_from(["llama3-8b", "llama3-70b", "mixtral-8x7b"]))
    p, rows = _chosen(stack, model, draw(st.sampled_from(["dgx-h100", "dgx-a100"])))
    if not len(rows):
        p, rows = _chosen(stack, "llama3-8b", p.cluster.name)
    return p, rows.strategy(draw(st.integers(0, len(rows) - 1)))


def _seconds(p: Pricing, s: Strategy) -> float:
    return float(RefinedPrices(p).price([s])[0].priced.seconds)


def _tier(cluster: ClusterSpec, i: int, **changes: float) -> ClusterSpec:
    tiers = list(cluster.tiers)
    tiers[i] = replace(tiers[i], **changes)  # type: ignore[arg-type]
    return replace(cluster, tiers=tuple(tiers))


def _better(cluster: ClusterSpec) -> dict[str, ClusterSpec]:
    """Clusters that are better in one respect."""
    device, better = cluster.device, {}
    for i, tier in enumerate(cluster.tiers):
        rate = "bandwidth_bytes_per_s_per_gpu_per_direction"
        better[f"bandwidth of {tier.name}"] = _tier(cluster, i, **{rate: 2 * getattr(tier, rate)})
        better[f"latency of {tier.name}"] = _tier(cluster, i, latency_s=tier.latency_s / 2)
    flops = {kind: 2 * rate for kind, rate in device.dense_flops_per_s.items()}
    better["products"] = replace(cluster, device=replace(device, dense_flops_per_s=flops))
    memory_rate = 2 * device.memory_bandwidth_bytes_per_s
    better["memory"] = replace(cluster, device=replace(device, memory_bandwidth_bytes_per_s=memory_rate))
    return better


@examples(12, 600)
def test_physics(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(questions())
    def holds(question: tuple[Pricing, Strategy]) -> None:
        p, s = question
        found = RefinedPrices(p).price([s])[0]
        if s.pp > 1:  # blocks are cut for the slowest rank, which on another machine is another one
            s = replace(s, layers=write_layers(found.run.blocks))
            cut, found = found, RefinedPrices(p).price([s])[0]
            assert found.seconds == pytest.approx(cut.seconds, rel=1e-9), (p.stack, s)
            assert found.priced.terms == pytest.approx(cut.priced.terms, rel=1e-9), (p.stack, s)
        assert 0 < found.mfu <= 1
        shards = s.dp * s.cp if s.zero == 3 else 1
        assert p.model.experts or found.priced.bytes_ >= 2 * p.model.parameter_count / (s.tp * s.pp * shards)
        for what, cluster in _better(p.cluster).items():
            assert _seconds(replace(p, cluster=cluster), s) <= found.seconds * NEAR, (p.stack, what, s)
        twice = replace(p, job=replace(p.job, global_batch=2 * BATCH))
        assert _seconds(twice, s) <= 2 * found.seconds * NEAR, (p.stack, s)

    holds()
