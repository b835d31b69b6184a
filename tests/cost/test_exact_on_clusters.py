"""The exact engine on clusters of GPUs: links of rings between nodes, and what hides gradients and parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.collectives.link import link, ring_link
from phalanx.cost.collectives.measured import seconds
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.ledger.flops import model_flops
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout
from phalanx.cost.step.predict import model_flops as step_model_flops
from phalanx.cost.step.predict import predict
from phalanx.cost.step.terms import terms
from phalanx.schedule.layout import Layout as StepLayout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse

DGX = preset("dgx-h100", 8)
LLAMA, _ = make_model({"preset": "llama3-8b"}, Path())


def test_a_ring_between_nodes_leaves_through_the_port_of_every_rank() -> None:
    port, nvlink = 50e9, 450e9
    whole, pairs = mesh(Strategy(dp=16, zero=1)), mesh(Strategy(dp=16, zero=3, shard=8))
    assert ring_link(DGX, whole, "dp_shard").beta_s_per_byte == pytest.approx(1 / min(8 * port, nvlink))
    assert ring_link(DGX, pairs, "dp_replicate").beta_s_per_byte == pytest.approx(1 / port)
    assert ring_link(DGX, pairs, "dp_shard") == link(DGX, pairs, "dp_shard")
    # A message has one port, and so has a ring of CPUs.
    assert link(DGX, whole, "dp_shard").beta_s_per_byte == pytest.approx(1 / port)
    cpus = replace(DGX, device=replace(DGX.device, kind="cpu"))
    assert ring_link(cpus, whole, "dp_shard") == link(cpus, whole, "dp_shard")


def test_a_ring_takes_the_latency_of_the_network_once_for_each_node() -> None:
    inside, between = (tier.latency_s for tier in DGX.tiers)
    hop = ring_link(DGX, mesh(Strategy(dp=64, zero=1)), "dp_shard").alpha_s
    assert hop * 63 == pytest.approx(55 * inside + 8 * between)


@pytest.mark.parametrize("ranks", [16, 32, 64])
@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather", "all_reduce"])
def test_both_engines_price_large_collectives_alike(op: str, ranks: int) -> None:
    """They know different things: one the links' full rate, the other what NCCL reaches of it (80 to 90 %)."""
    exact = float(seconds(DGX, mesh(Strategy(dp=ranks)), op, "dp_replicate", 1, 1e9))
    analytic = float(collective_s(op, 1e9, ranks, 1, system_of(DGX)))
    assert 0.6 < exact / analytic < 1.3


def _llama(strategy: Strategy, batch: int = 512) -> float:
    bf16 = Precision(compute="bfloat16", reduce="float32", accumulate="float32", master="float32")
    job = Job(global_batch=batch, seq=8192, precision=bf16)
    return float(predict(LLAMA, DGX, job, strategy).step_time_s)


def test_reductions_of_every_micro_batch_hide_behind_their_own_backward_pass() -> None:
    once = _llama(Strategy(dp=64, zero=1, recompute="full"))
    often = _llama(Strategy(dp=64, zero=2, recompute="full"))
    gathered = _llama(Strategy(dp=64, zero=3, recompute="full"))
    assert once < often < 1.1 * once
    assert gathered < 1.2 * once


def test_more_reductions_than_backward_passes_hide_are_exposed() -> None:
    """On one hundredth of the network nothing is hidden but by compute, and ZeRO-2 pays for every micro-batch."""
    slow = tuple(
        replace(
            tier, bandwidth_bytes_per_s_per_gpu_per_direction=tier.bandwidth_bytes_per_s_per_gpu_per_direction / 100
        )
        for tier in DGX.tiers
    )
    cluster = replace(DGX, tiers=slow)
    job = Job(global_batch=512, seq=8192, precision=Precision(compute="bfloat16", reduce="float32"))
    one, two = (predict(LLAMA, cluster, job, Strategy(dp=64, zero=zero, recompute="full")) for zero in (1, 2))
    m = 512 // 64
    assert two.exposed_communication_s > 0.5 * m * one.exposed_communication_s
    assert two.exposed_communication_s == pytest.approx(
        two.communication_s - two.backward_s - two.forward_s / m, rel=0.15
    )


@pytest.mark.parametrize("line", ["dp=8", "tp=8", "pp=8,micro_batch=1", "cp=4"])
def test_model_flops_count_nothing_that_is_padded_or_computed_twice(line: str) -> None:
    """Latent attention pads its values to the width of its keys, and every tp rank projects to the latents."""
    deepseek, _ = make_model({"preset": "deepseek-v3"}, Path())
    job, s = Job(8, 4096, Precision("bfloat16")), Strategy(**parse(line))
    whole = float(model_flops(shape(deepseek), layout(s, job, deepseek.layers)))
    view = StepLayout(deepseek, job, s).stage_view()
    executed = sum(term.work.flops for term in terms(view)) if s.pp == 1 else 0
    counted = step_model_flops(StepLayout(deepseek, job, s)) * s.world
    assert counted == pytest.approx(whole, rel=1e-9)
    if s.tp > 1:
        assert executed * s.world > 1.1 * whole
