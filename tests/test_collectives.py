"""Collective schedules: proved for every algorithm and world, and refused when broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.cost.critical_path import Costs, closed_form, lower_bound, seconds
from phalanx.plan.collectives import compare
from phalanx.schedule.collectives import ALGORITHMS, build
from phalanx.schedule.prove import Unproved, prove
from phalanx.schedule.transfers import Round, Schedule, compose, intervals
from phalanx.spec import cluster as clusters
from phalanx.spec.errors import InputError

NAMES = [(op, algorithm) for op, names in ALGORITHMS.items() for algorithm in names]


def sizes(op: str, p: int) -> list[int]:
    return [p, 3 * p] if op == "all_to_all" else [p, 3 * p + 1, max(1, p // 2)]


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
def test_every_algorithm_at_every_world(op: str, algorithm: str) -> None:
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17):
        for size in sizes(op, p):
            prove(build(op, algorithm, p, size, root=(p - 1) // 2))


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3), st.integers(1, 50))
def test_hierarchies_of_any_depth(tiers: list[int], size: int) -> None:
    p = int(np.prod(tiers))
    prove(build("all_reduce", "hierarchical", p, size, tiers=tuple(tiers)))


@pytest.mark.parametrize(
    ("op", "algorithm", "rounds", "sent"),
    [
        ("all_reduce", "ring", 14, 2 * 7 * 8),
        ("all_reduce", "rabenseifner", 6, 2 * 7 * 8),
        ("all_reduce", "doubling", 3, 3 * 64),
        ("all_reduce", "naive", 14, 7 * 64),
        ("reduce_scatter", "halving", 3, 7 * 8),
        ("all_gather", "bruck", 3, 7 * 8),
        ("all_gather", "doubling", 3, 7 * 8),
        ("broadcast", "binomial", 3, 3 * 64),
        ("broadcast", "chain", 14, 64),
        ("all_to_all", "pairwise", 7, 7 * 8),
        ("all_to_all", "bruck", 3, 3 * 4 * 8),
    ],
)
def test_rounds_and_bytes_are_those_of_the_literature(op: str, algorithm: str, rounds: int, sent: int) -> None:
    """8 ranks, 64 elements; the table of formulas that everyone quotes."""
    proof = prove(build(op, algorithm, 8, 64))
    assert (proof.rounds, proof.sent) == (rounds, sent)


def test_uneven_worlds_cost_two_more_messages() -> None:
    proof = prove(build("all_reduce", "rabenseifner", 6, 24))
    assert proof.rounds == 2 * 2 + 2


def comes_out_right(s: Schedule) -> bool:
    """An oracle that shares nothing with the proof: run the transfers on random numbers."""
    values = np.random.default_rng(0).integers(1, 2**40, size=(s.ranks, s.size))
    there = np.zeros((s.ranks, s.size), dtype=bool)
    for rank, offset, length in zip(s.start.rank, s.start.offset, s.start.length, strict=True):
        there[rank, offset : offset + length] = True
    state = np.where(there, values, 0)
    wanted = state.sum(axis=0)
    for number in range(s.rounds):
        before = state.copy()
        for i in np.nonzero(s.round == number)[0]:
            span = slice(s.offset[i], s.offset[i] + s.length[i])
            sent = before[s.source[i], span]
            state[s.destination[i], span] = state[s.destination[i], span] + sent if s.reduces[i] else sent
    return all(
        np.array_equal(state[rank, offset : offset + length], wanted[offset : offset + length])
        for rank, offset, length in zip(s.end.rank, s.end.offset, s.end.length, strict=True)
    )


COLUMNS = ("round", "source", "destination", "offset", "length", "reduces")


@settings(max_examples=300)
@given(
    st.sampled_from(NAMES),
    st.sampled_from([3, 4, 7, 8]),
    st.sampled_from(["lost", "doubled", "misrouted"]),
    st.data(),
)
def test_a_broken_schedule_is_refused(name: tuple[str, str], p: int, how: str, data: st.DataObject) -> None:
    """A lost, doubled or misrouted transfer; the refusal names rank, chunk and round."""
    good = build(*name, p, 2 * p)
    assert comes_out_right(good)
    i = data.draw(st.integers(0, len(good.round) - 1))
    if how == "lost":
        broken = replace(good, **{c: np.delete(getattr(good, c), i) for c in COLUMNS})
    elif how == "doubled":
        twice = {c: np.append(getattr(good, c), getattr(good, c)[i]) for c in COLUMNS}
        twice["round"][-1] = good.rounds
        broken = replace(good, **twice)
    else:
        destination = good.destination.copy()
        others = [r for r in range(p) if r not in (good.source[i], good.destination[i])]
        destination[i] = data.draw(st.sampled_from(others))
        broken = replace(good, destination=destination)
    # Some changes do no harm: a copy made twice, a detour in a reduction.
    assume(not comes_out_right(broken))
    with pytest.raises(Unproved, match=r"rank \d+, .*round \d+"):
        prove(broken)


def test_a_reordered_ring_is_refused() -> None:
    good = build("all_gather", "ring", 4, 8)
    order = np.where(good.round == 0, 1, np.where(good.round == 1, 0, good.round))
    rows = np.argsort(order, kind="stable")
    columns = {c: getattr(good, c)[rows] for c in ("source", "destination", "offset", "length", "reduces")}
    with pytest.raises(Unproved, match=r"round 0: sends to rank \d what it does not have"):
        prove(replace(good, round=order[rows], **columns))


def test_the_textbook_ring_that_adds_column_3_into_column_1_is_refused() -> None:
    """A well-known walk-through mixes columns from step 2 on (worked numbers, no. 45): rank 0 receives D3 for A1."""
    good = build("all_reduce", "ring", 4, 4)
    offset = good.offset.copy()
    row = int(np.nonzero((good.round == 1) & (good.destination == 0))[0][0])
    offset[row] = (offset[row] + 2) % 4
    with pytest.raises(Unproved, match="rank"):
        prove(replace(good, offset=offset))


def test_two_partners_at_once_are_refused() -> None:
    r = Round(np.array([0, 0]), np.array([1, 2]), np.zeros(2, int), np.full(2, 4), False)
    schedule = compose("broadcast", "eager", 3, 4, [r], intervals(0, 0, 4), intervals([0, 1, 2], 0, 4))
    with pytest.raises(Unproved, match=r"rank 0, .*round 0: sends to ranks \[1, 2\] at once"):
        prove(schedule)


@given(
    st.sampled_from([n for n in NAMES if n[1] != "hierarchical"]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1e-6, 5e-5]),
    st.sampled_from([1e-11, 1e-9]),
    st.sampled_from([0.0, 1e-10]),
)
def test_the_critical_path_is_the_published_formula(
    name: tuple[str, str], p: int, alpha: float, beta: float, gamma: float
) -> None:
    """p a power of two, and p (and the chain's 8 segments) divide n."""
    n = 16 * 8 * p
    schedule = build(*name, p, n)
    if name == ("broadcast", "chain") and p == 1:
        return  # the formula's p - 2 has no meaning there
    formula = closed_form(*name, p, n * 4, alpha, beta, gamma)
    assert formula is not None
    assert seconds(schedule, 4, Costs(((p, alpha, beta),), gamma)) == pytest.approx(formula, rel=1e-9, abs=1e-15)


@given(st.sampled_from(NAMES), st.sampled_from([2, 3, 6, 8, 16, 24]), st.sampled_from([1e3, 1e9]))
def test_nothing_beats_the_bound(name: tuple[str, str], p: int, size: float) -> None:
    links = Costs(((8, 5e-6, 1 / 300e9), (64, 15e-6, 1 / 25e9)))
    inner = 8 if p % 8 == 0 else p
    schedule = build(*name, p, p, tiers=(inner, p // inner))
    assert seconds(schedule, size / p, links) >= lower_bound(name[0], p, size, links) * (1 - 1e-9)


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


def test_the_golden_times_of_the_textbooks() -> None:
    """70B in bf16 over 8 ranks (worked numbers, C5): 0.817 s at 300 GB/s per direction, 9.8 s at 25 GB/s."""
    ring = build("all_reduce", "ring", 8, 8)
    for rate, golden in ((300e9, 0.8167), (25e9, 9.8)):
        assert seconds(ring, 140e9 / 8, Costs(((8, 0.0, 1 / rate),))) == pytest.approx(golden, rel=1e-3)


def test_the_winner_depends_on_the_size() -> None:
    found = compare("all_reduce", 1e8, 64, clusters.dgx_h100(8))
    assert found.rows[0].algorithm == "hierarchical"
    assert [name for _, _, name in found.winners] == ["doubling", "rabenseifner", "hierarchical"]
    assert all(row.seconds >= row.bound and row.formula_seconds is None for row in found.rows)
    for row in compare("all_reduce", 1e8, 8, clusters.dgx_h100(1)).rows:
        assert row.algorithm == "hierarchical" or row.formula_seconds == pytest.approx(row.seconds)


def test_unknown_names_are_said() -> None:
    for words in (("all_reduse", "ring"), ("all_reduce", "rign")):
        with pytest.raises(InputError, match="did you mean"):
            build(*words, 4, 4)
    with pytest.raises(InputError, match="product"):
        build("all_reduce", "hierarchical", 8, 8, tiers=(3, 2))
