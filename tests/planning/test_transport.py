"""Which way serves a collective: the cheapest that was measured, the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fitted_cluster import cluster, fit

from phalanx.cost.collectives import measured
from phalanx.planning.auto.transport import choose, cluster_for_transport, decide
from phalanx.spec.cluster.collective_choice import Choice, pick
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

LATE, EARLY = fit("p2p", 1e-3, 1e-10), fit("native", 1e-4, 1e-9)  # they cross at 1 MB


def test_the_cheapest_is_taken_at_every_size() -> None:
    chosen = choose([LATE, EARLY, fit("shm", 1e-6, 1e-12, ranks=4)])
    for size in (100, 2**14, 2**19, 2**22, 2**28):
        best = min((LATE, EARLY), key=lambda f: float(f.seconds(size)))
        assert pick(chosen, "all_reduce", 2, size).transport == best.transport
    assert pick(chosen, "all_reduce", 4, 5).transport == "shm"
    assert "next native" in pick(chosen, "all_reduce", 2, 2**28).reason


def test_what_was_not_measured() -> None:
    chosen = choose([LATE, EARLY, fit("shm", 1e-6, 1e-12, ranks=4)])
    assert pick(chosen, "all_reduce", 3, 5).transport == "shm"  # the next larger group
    assert pick(chosen, "all_reduce", 8, 5) == Choice("all_reduce", 8, 0, "native")
    assert pick(chosen, "all_gather", 2, 5).transport == "native"
    assert choose([]) == ()


def test_a_transport_that_was_asked_for() -> None:
    here = cluster(LATE, EARLY)
    assert {c.transport for c in decide(here, "auto")} == {"native", "p2p"}
    assert {c.transport for c in decide(here, "p2p")} == {"p2p"}
    assert {c.transport for c in decide(here, "native")} == {"native"}
    forced = decide(here, "shm")
    assert {(c.op, c.transport) for c in forced} >= {("all_reduce", "shm"), ("all_to_all", "shm")}
    assert cluster_for_transport(here, "native").collectives == (EARLY,)


@given(st.floats(1, 1e12))
def test_times_between_and_beyond_the_points(size: float) -> None:
    found = float(LATE.seconds(size))
    low, high = float(LATE.seconds(size / 2)), float(LATE.seconds(size * 2))
    assert low <= found <= high
    assert float(LATE.seconds(np.array([size]))[0]) == found
    assert found == pytest.approx(LATE.alpha_s + LATE.beta_s_per_byte * max(size, 1024), rel=0.2)


def test_a_prediction_takes_the_chosen_way_on_one_host_and_the_ring_across_hosts() -> None:
    grid = mesh(Strategy(dp=2))
    assert measured.seconds(cluster(LATE, EARLY), grid, "all_reduce", "dp_replicate", 2, 2**20) == pytest.approx(
        2 * float(EARLY.seconds(2**19))
    )
    two_hosts = replace(cluster(LATE, EARLY), ranks_per_node=1, nodes=2)
    across = measured.seconds(two_hosts, grid, "all_reduce", "dp_replicate", 1, 2**20)
    link = two_hosts.tiers[0]
    assert across == pytest.approx(2 * link.latency_s + 2**20 / link.bandwidth_bytes_per_s_per_gpu_per_direction)
