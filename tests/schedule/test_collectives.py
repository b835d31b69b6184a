"""Collective schedules: proved for every algorithm and world, and refused when broken. How they are composed stands
in test_collectives_composed.py, their price in test_collective_prices.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.sizes import drawn

from phalanx.schedule.collectives.algorithms import two_trees
from phalanx.schedule.collectives.ir import Round, Schedule, compose, intervals
from phalanx.schedule.collectives.proof import prove
from phalanx.schedule.collectives.registry import ALGORITHMS, build, sweep, variants
from phalanx.spec.errors import InputError, Unproved

NAMES = [(op, algorithm) for op, names in ALGORITHMS.items() for algorithm in names]


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
def test_every_algorithm_at_every_world(op: str, algorithm: str) -> None:
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17):
        for variant in variants(op, algorithm, p):
            prove(build(op, algorithm, p, **variant))


def test_the_sweep_counts_what_it_proves() -> None:
    found = list(sweep(3))
    assert found.count(None) == len(found) == sum(len(variants(*name, p)) for name in NAMES for p in (1, 2, 3))


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
        ("all_reduce", "double_tree", 38, 2 * 64),  # 8 segments in each half: 4 k + 4 lg p - 4 - 2 (lg p odd)
        ("reduce_scatter", "halving", 3, 7 * 8),
        ("all_gather", "bruck", 3, 7 * 8),
        ("all_gather", "doubling", 3, 7 * 8),
        ("broadcast", "binomial", 3, 3 * 64),
        ("broadcast", "chain", 14, 64),
        ("all_to_all", "pairwise", 7, 7 * 8),
        ("all_to_all", "bruck", 3, 3 * 4 * 8),
        ("barrier", "dissemination", 3, 7),
    ],
)
def test_rounds_and_bytes_are_those_of_the_literature(op: str, algorithm: str, rounds: int, sent: int) -> None:
    """8 ranks, 64 elements; the table of formulas that everyone quotes."""
    proof = prove(build(op, algorithm, 8, 64))
    assert (proof.rounds, proof.sent) == (rounds, sent)


@given(
    st.sampled_from(ALGORITHMS["all_to_all"]),
    st.integers(1, 9).flatmap(
        lambda p: st.lists(st.lists(st.integers(0, 4), min_size=p, max_size=p), min_size=p, max_size=p)
    ),
)
def test_uneven_all_to_all(algorithm: str, splits: list[list[int]]) -> None:
    """What the executor relies on: a rank starts with one interval, its row, and ends with (0, i), (1, i), ..."""
    table, p = np.array(splits), len(splits)
    s = build("all_to_all", algorithm, p, 0, splits=table)
    prove(s)
    first = np.concatenate([[0], np.cumsum(table)[:-1]]).reshape(p, p)  # where block (i, j) begins
    assert s.size == table.sum()
    assert (s.start.rank.tolist(), s.start.offset.tolist()) == (list(range(p)), first[:, 0].tolist())
    assert s.start.length.tolist() == table.sum(axis=1).tolist()
    for i in range(p):
        mine = s.end.rank == i
        assert s.end.offset[mine].tolist() == first[:, i].tolist()
        assert s.end.length[mine].tolist() == table[:, i].tolist()
    if algorithm == "pairwise":
        assert s.sent.tolist() == (table.sum(axis=1) - table.diagonal()).tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_to_all"])
def test_even_blocks_are_equal_splits(algorithm: str) -> None:
    even, split = (
        build("all_to_all", algorithm, 6, 12),
        build("all_to_all", algorithm, 6, 0, splits=np.full((6, 6), 2)),
    )
    assert (even.source.tolist(), even.offset.tolist()) == (split.source.tolist(), split.offset.tolist())
    assert even.start.offset.tolist() == [i * 12 for i in range(6)]


@pytest.mark.parametrize("p", [*range(1, 34), 100, 128])
def test_two_trees_share_the_work(p: int) -> None:
    """Each reaches everyone once; a member that has two children in one tree is a leaf of the other; and the edges
    of a turn meet nobody twice."""
    trees = two_trees(p)
    children = np.zeros((2, p), dtype=int)
    np.add.at(children, (trees.tree, trees.parent), 1)
    assert children.max(initial=0) <= 2
    assert (children.sum(axis=0) <= 2).all()
    for tree in (0, 1):
        assert len(set(trees.child[trees.tree == tree])) == p - 1
    for turn in (0, 1):
        for ends in (trees.parent, trees.child):
            meets = ends[trees.step % 2 == turn]
            assert len(set(meets)) == len(meets)
    # at most every other round an edge further down, in trees of ceil(lg p) levels
    assert trees.step.max(initial=0) < 2 * max(1, (p - 1).bit_length())


def test_large_worlds_are_built_in_no_time() -> None:
    """1,024 ranks; the numbers of transfers stand for the time, which is a benchmark's matter."""
    assert len(build("all_reduce", "double_tree", 1024, 1024).round) == 4 * 1023 * 8
    assert build("barrier", "dissemination", 1024, 0).rounds == 10


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 13, 16, 33])
def test_the_barrier_hears_from_everyone_in_lg_p_rounds(p: int) -> None:
    s = build("barrier", "dissemination", p, 0)
    assert prove(s).rounds == (p - 1).bit_length()
    assert s.size == p


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


@drawn(
    100,
    300,
    st.sampled_from(NAMES),
    st.sampled_from([3, 4, 7, 8]),
    st.sampled_from(["lost", "doubled", "misrouted"]),
    st.data(),
)
def test_a_broken_schedule_is_refused(name: tuple[str, str], p: int, how: str, data: st.DataObject) -> None:
    """A lost, doubled or misrouted transfer; the refusal names rank, chunk and round."""
    good = data.draw(st.sampled_from([build(*name, p, **variant) for variant in variants(*name, p)]))
    assume(len(good.round))
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
    with pytest.raises(Unproved, match=r"round 1: sends to rank \d what it does not have"):
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
    with pytest.raises(Unproved, match=r"rank 0, .*round 1: sends to ranks \[1, 2\] at once"):
        prove(schedule)


def test_unknown_names_are_said() -> None:
    for words in (("all_reduse", "ring"), ("all_reduce", "rign")):
        with pytest.raises(InputError, match="did you mean"):
            build(*words, 4, 4)
    with pytest.raises(InputError, match="product"):
        build("all_reduce", "hierarchical", 8, 8, tiers=(3, 2))
    with pytest.raises(InputError, match="equal blocks; use a multiple of 4, or give splits"):
        build("all_to_all", "bruck", 4, 6)
    for splits in (np.zeros((3, 4), int), np.full((4, 4), -1), np.full((4, 4), 0.5)):
        with pytest.raises(InputError, match=r"splits: must be a \(4, 4\) table"):
            build("all_to_all", "bruck", 4, 0, splits=splits)
    with pytest.raises(InputError, match="splits: all_reduce takes none"):
        build("all_reduce", "ring", 4, 4, splits=np.ones((4, 4), int))
    with pytest.raises(InputError, match="segments"):
        build("broadcast", "chain", 4, 4, segments=0)
