"""Compute that overlaps a collective is slowed by what the collective moves at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.cost.analytic import update
from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.profile import profile
from phalanx.planning.lookup import model_named
from phalanx.spec.cluster.presets import preset

BY = profile("torchtitan-eager")


def slowdown(ranks: int, stride: int, cluster: str = "dgx-h100") -> float:
    return float(update._contention(ranks, stride, system_of(preset(cluster, 128)), BY))


def test_a_group_with_a_rank_in_each_node_slows_less_than_one_that_fills_nodes() -> None:
    inside, across, few = slowdown(8, 1), slowdown(128, 1), slowdown(16, 8)
    assert inside == pytest.approx(BY.contention)
    # Eight ports of 45 GB/s against links of 360 GB/s, and one of them.
    assert 1.13 < few < across <= inside
    on = system_of(preset("dgx-h100", 128))
    pace = on.tiers[1].bytes_per_s_per_gpu_per_direction / on.tiers[0].bytes_per_s_per_gpu_per_direction
    assert few == pytest.approx(1.13 + (float(BY.contention) - 1.13) * float(pace))


def test_a_stack_whose_overlap_costs_less_than_processors_keeps_its_own() -> None:
    mild = replace(BY, contention=1.05)
    on = system_of(preset("dgx-h100", 128))
    assert np.allclose(update._contention(16, 8, on, mild), 1.05)


def test_the_405_billion_of_torchtitan_on_128_h100() -> None:
    """pytorch/torchtitan#481: 109 tokens/s and GPU, on no list that constants are fitted on."""
    from phalanx import predict

    model, _ = model_named("llama3-405b")
    found = predict(
        model=model,
        cluster="dgx-h100",
        gpus=128,
        batch=32,
        seq=8192,
        strategy="dp=16,zero=3,tp=8,sp=1,micro_batch=2,recompute=full",
        stack="torchtitan-eager",
    )
    assert found.tokens_per_s_per_gpu == pytest.approx(109, rel=0.12)
