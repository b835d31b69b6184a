"""What schedules cost: the critical path against published formulas, bounds, and shared links."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.relabelled import relabel
from support.sizes import sampled

from phalanx.cost.collectives.closed_form import best_segments, closed_form
from phalanx.cost.collectives.critical_path import LinkCosts, costs, lower_bound, seconds
from phalanx.planning.tables.collectives import compare
from phalanx.schedule.collectives.ir import Round, Schedule, compose, intervals
from phalanx.schedule.collectives.registry import ALGORITHMS, build
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.errors import InputError

NAMES = [(op, algorithm) for op, names in ALGORITHMS.items() for algorithm in names]


@given(
    st.sampled_from([n for n in NAMES if n[1] != "hierarchical"]),
    st.integers(1, 20),
    st.sampled_from([1e-6, 5e-5]),
    st.sampled_from([1e-11, 1e-9]),
    st.sampled_from([0.0, 1e-10]),
)
def test_the_critical_path_is_the_published_formula(
    name: tuple[str, str], p: int, alpha: float, beta: float, gamma: float
) -> None:
    """p, its power of two and the 8 segments divide n; a barrier has no bytes. Where a formula wants p to be a power
    of two, another p has none."""
    n = 16 * 8 * p
    element = 0 if name[0] == "barrier" else 4
    formula = closed_form(*name, p, n * element, alpha, beta, gamma)
    if formula is None:
        assert p & (p - 1)
        return
    assert seconds(build(*name, p, n), element, LinkCosts(((p, alpha, beta),), gamma)) == pytest.approx(
        formula, rel=1e-9, abs=1e-15
    )


@given(
    st.sampled_from([n for n in NAMES if n[0] not in ("all_to_all", "barrier")]),
    st.integers(1, 20),
    st.integers(1, 99),
)
def test_uneven_chunks_cost_at_most_a_chunk(name: tuple[str, str], p: int, more: int) -> None:
    """Where p does not divide n, the path is within n / p bytes of the formula."""
    n, beta, gamma = 64 * p * p + more, 1e-9, 1e-10
    formula = closed_form(*name, p, n, 1e-6, beta, gamma)
    if formula is not None:
        found = seconds(build(*name, p, n), 1, LinkCosts(((p, 1e-6, beta),), gamma))
        assert abs(found - formula) <= n / p * (beta + gamma)


@given(st.sampled_from([2, 4, 8, 32]), st.sampled_from([2, 3, 5, 16]), st.sampled_from(["chain", "double_tree"]))
def test_pipelines_take_what_the_formula_says(p: int, segments: int, algorithm: str) -> None:
    op = "broadcast" if algorithm == "chain" else "all_reduce"
    n = 2 * segments * 1000
    found = seconds(build(op, algorithm, p, n, segments=segments), 1, LinkCosts(((p, 1e-6, 1e-9),), 3e-10))
    assert found == pytest.approx(closed_form(op, algorithm, p, n, 1e-6, 1e-9, 3e-10, segments), rel=1e-9)


@given(st.integers(2, 70), st.integers(1, 12))
def test_the_double_tree_never_takes_more_than_its_formula_of_the_next_power(p: int, segments: int) -> None:
    """4 k + 4 lg p - 4 hops, also where p is no power of two: within one piece of the formula."""
    n = 2 * segments
    hops = 4 * segments + 4 * math.ceil(math.log2(p)) - 4
    found = seconds(build("all_reduce", "double_tree", p, n, segments=segments), 1, LinkCosts(((p, 3.0, 2.0),)))
    assert found <= hops * (3.0 + 2.0)


@pytest.mark.parametrize("p", sampled([6, 64, 100, 512], (0, 2)))
def test_the_double_tree_has_full_bandwidth(p: int) -> None:
    """Sanders, Speck & Träff: 2 n β for large n, 4 lg p α and a root beyond it; binomial takes lg p times that."""
    alpha, beta, lg = 5e-6, 1 / 100e9, math.ceil(math.log2(p))
    links = LinkCosts(((p, alpha, beta),))
    for n, most in ((1e9, 1.25), (1e11, 1.03)):
        m = best_segments("all_reduce", "double_tree", p, n, alpha, beta)
        found = seconds(build("all_reduce", "double_tree", p, 2 * m, segments=m), n / (2 * m), links)
        binomial = seconds(build("all_reduce", "binomial", p, p), n / p, links)
        assert 2 * n * beta < found < 2 * n * beta * most
        assert found <= 2 * n * beta + 4 * lg * alpha + 2 * math.sqrt(8 * lg * alpha * n * beta)
        assert found < binomial * most / lg


@pytest.mark.parametrize(("op", "algorithm"), [("broadcast", "chain"), ("all_reduce", "double_tree")])
@pytest.mark.parametrize("n", sampled([1e3, 1e6, 1e9], (0, 2)))
def test_the_best_segments_are_the_best(op: str, algorithm: str, n: float) -> None:
    """Of the powers of two, or no worse than 6 % above the best: half a power off."""

    def time(m: int) -> float:
        return seconds(build(op, algorithm, 16, 2 * m, segments=m), n / (2 * m), LinkCosts(((16, 5e-6, 1e-11),)))

    found = best_segments(op, algorithm, 16, n, 5e-6, 1e-11)
    assert time(found) <= 1.06 * min(time(2**k) for k in range(11))
    assert best_segments(op, algorithm, 2, 1e9, 5e-6, 1e-11) == 1 or algorithm == "double_tree"
    assert best_segments(op, algorithm, 16, n, 0.0, 1e-11) == 1024


@given(
    st.sampled_from(NAMES),
    st.sampled_from([2, 3, 6, 8, 9, 16, 24]),
    st.sampled_from([1e3, 1e9]),
    st.sampled_from([(), ((8, 1 / 50e9),), ((2, 1 / 250e9), (8, 1 / 100e9))]),
    st.integers(0, 23),
)
def test_nothing_beats_the_bound(
    name: tuple[str, str], p: int, size: float, shared: tuple[tuple[int, float], ...], root: int
) -> None:
    links = LinkCosts(((8, 5e-6, 1 / 300e9), (64, 15e-6, 1 / 25e9)), 0.0, shared)
    inner = 8 if p % 8 == 0 else p
    n = 0 if name[0] == "barrier" else size
    schedule = build(*name, p, p, root % p, tiers=(inner, p // inner))
    assert seconds(schedule, n / p, links) >= lower_bound(name[0], p, n, links) * (1 - 1e-9)


def test_the_hierarchy_crosses_the_slow_link_with_the_fewest_bytes() -> None:
    """2 hosts x 2 ranks, as measured over shaped links: ring 1.5 S, interleaved hosts 3 S, hierarchical 1 S."""

    def crossing(schedule: Schedule, hosts: list[int]) -> float:
        host = np.array(hosts)
        out = (host[schedule.source] == 0) & (host[schedule.destination] == 1)
        return float(schedule.length[out].sum()) / 64

    ring = build("all_reduce", "ring", 4, 64)
    assert crossing(ring, [0, 0, 1, 1]) == 1.5
    assert crossing(ring, [0, 1, 0, 1]) == 3.0
    assert crossing(build("all_reduce", "hierarchical", 4, 64, tiers=(2, 2)), [0, 0, 1, 1]) == 1.0
    # recursive halving with the far partner first sends half of everything across
    assert crossing(build("all_reduce", "rabenseifner", 4, 64), [0, 0, 1, 1]) == 2.0


LAB = 16 * 2**20  # bytes
LAB_RATE = 125e6  # 1 Gbit/s, shared by the two ranks of a host
LAB_LINKS = LinkCosts(((2, 1e-12, 1e-15), (4, 1e-12, 1 / LAB_RATE)), 0.0, ((2, 1 / LAB_RATE),))


@pytest.mark.parametrize(
    ("algorithm", "order", "sizes", "milliseconds"),
    [
        ("ring", [0, 1, 2, 3], 1.5, 201),
        ("ring", [0, 2, 1, 3], 3.0, 403),  # every neighbour on the other host
        ("rabenseifner", [0, 1, 2, 3], 2.0, 268),  # far partner first
        ("rabenseifner", [0, 2, 1, 3], 1.0, 134),  # near partner first
        ("hierarchical", [0, 1, 2, 3], 1.0, 134),
        ("binomial", [0, 1, 2, 3], 2.0, 268),  # 1.0 S over the link, but the two crossings are serial
    ],
)
def test_shared_links_cost_what_the_lab_says(
    algorithm: str, order: list[int], sizes: float, milliseconds: float
) -> None:
    """2 hosts x 2 ranks over 1 Gbit/s, 16 MiB all-reduce (notes/collectives.md, checking a schedule without noise;
    Gloo's own is the ring)."""
    schedule = relabel(build("all_reduce", algorithm, 4, 64, tiers=(2, 2)), order)
    found = seconds(schedule, LAB / 64, LAB_LINKS)
    assert found == pytest.approx(sizes * LAB / LAB_RATE, rel=1e-6)
    assert round(found * 1e3) == milliseconds
    assert found >= lower_bound("all_reduce", 4, LAB, LAB_LINKS)


def test_equal_messages_share_a_link_as_one_large_one_would() -> None:
    """4 ranks of a host send n each to the other host at once: 4 n over the uplink, however fast their own ports."""
    crossing = build("all_to_all", "pairwise", 8, 0, splits=np.kron([[0, 1], [0, 0]], np.eye(4, dtype=int) * 100))
    assert crossing.rounds == 1
    for own in (1e-3, 1e-2):  # s per byte of a rank's port; the uplink's is 1e-2
        links = LinkCosts(((4, 0.0, 0.0), (8, 0.5, own)), 0.0, ((4, 1e-2),))
        assert seconds(crossing, 1, links) == pytest.approx(0.5 + 4 * 100 * 1e-2)
    slow_ports = LinkCosts(((4, 0.0, 0.0), (8, 0.5, 0.1)), 0.0, ((4, 1e-2),))  # which together do not fill the uplink
    assert seconds(crossing, 1, slow_ports) == pytest.approx(0.5 + 100 * 0.1)


def test_who_could_start_first_passes_first() -> None:
    """Rank 1 is held up by 3 s of work inside the host, so rank 0, though named later, is first on the uplink."""
    i = np.array
    rounds = [Round(i([3]), i([1]), i([0]), i([3]), False), Round(i([1, 0]), i([4, 5]), i([0, 3]), i([3, 10]), False)]
    schedule = compose("gather", "test", 6, 13, rounds, intervals([3, 0], [0, 3], [3, 10]), intervals(4, 0, 3))
    links = LinkCosts(((4, 0.0, 1.0), (8, 0.0, 0.0)), 0.0, ((4, 1.0),))
    assert seconds(schedule, 1, links) == pytest.approx(13.0)
    assert seconds(schedule, 1, replace(links, shared=())) == pytest.approx(3.0)


def test_an_uplink_needs_a_rate() -> None:
    with pytest.raises(
        InputError, match=r"infiniband.uplink_bandwidth_bytes_per_s_per_direction = 0: must be at least 1"
    ):
        replace(clusters.preset("dgx-h100", 2).tiers[1], uplink_bandwidth_bytes_per_s_per_direction=0)


def test_only_what_is_added_costs_gamma() -> None:
    """One message of 4 elements that are added and 8 that are taken over: 1 + 12 x 2 + 4 x 3."""
    i = np.array
    whole = build("all_reduce", "naive", 2, 12)
    message = replace(
        whole,
        round=i([0, 0]),
        source=i([0, 0]),
        destination=i([1, 1]),
        offset=i([0, 4]),
        length=i([4, 8]),
        reduces=i([True, False]),
    )
    assert seconds(message, 1, LinkCosts(((2, 1.0, 2.0),), 3.0)) == pytest.approx(1 + 24 + 12)


def lab() -> ClusterSpec:
    """Two hosts of 2 that share 1 Gbit/s."""
    rate = LAB_RATE
    return replace(
        clusters.preset("dgx-h100", 2),
        name="lab",
        ranks_per_node=2,
        tiers=(
            Tier("loopback", 2, 1e-5, 1e9, "measured", "test"),
            Tier("ethernet", 4, 5e-5, rate, "measured", "test", uplink_bandwidth_bytes_per_s_per_direction=rate),
        ),
    )


def test_a_clusters_uplinks_are_priced() -> None:
    assert costs(lab()).shared == ((2, 1 / LAB_RATE),)
    assert costs(clusters.preset("dgx-h100", 2)).shared == ()
    found = compare("all_reduce", LAB, 4, lab())
    assert {row.algorithm for row in found.rows[:1]} == {"hierarchical"}
    assert found.rows[0].bound == pytest.approx(LAB / LAB_RATE)
    assert [(c.tier, round(c.bytes)) for c in found.crossovers] == [("loopback", 10_000), ("ethernet", 6_250)]


def test_a_barrier_has_no_size() -> None:
    found = compare("barrier", 1e8, 16, clusters.preset("dgx-h100", 2))
    assert found.rows[0].seconds == pytest.approx(4 * 15e-6)
    assert (found.rows[0].sent_bytes, found.winners) == (0.0, ())
    assert compare("barrier", 1e8, 6, clusters.preset("dgx-h100", 1)).rows[0].formula_seconds == pytest.approx(
        3 * 5e-6
    )


def test_the_golden_times_of_the_textbooks() -> None:
    """70B in bf16 over 8 ranks (worked numbers, C5): 0.817 s at 300 GB/s per direction, 9.8 s at 25 GB/s."""
    ring = build("all_reduce", "ring", 8, 8)
    for rate, golden in ((300e9, 0.8167), (25e9, 9.8)):
        assert seconds(ring, 140e9 / 8, LinkCosts(((8, 0.0, 1 / rate),))) == pytest.approx(golden, rel=1e-3)


def test_the_winner_depends_on_the_size() -> None:
    found = compare("all_reduce", 1e8, 64, clusters.preset("dgx-h100", 8))
    assert found.rows[0].algorithm == "hierarchical"
    assert [name for _, _, name in found.winners] == ["doubling", "rabenseifner", "hierarchical"]
    assert all(row.seconds >= row.bound and row.formula_seconds is None for row in found.rows)
    for row in compare("all_reduce", 1e8, 8, clusters.preset("dgx-h100", 1)).rows:
        assert row.algorithm == "hierarchical" or row.formula_seconds == pytest.approx(row.seconds)
