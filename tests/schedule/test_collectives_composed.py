"""Compositions and dualities hold as schedules: one after another, backwards, under other names."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.relabelled import relabel

from phalanx.schedule.collectives.ir import Holdings, Schedule, chain, dual, stagger
from phalanx.schedule.collectives.proof import prove, run
from phalanx.schedule.collectives.registry import ALGORITHMS, build

WORLDS = [(1, 1), (2, 5), (3, 3), (4, 13), (5, 2), (8, 24), (9, 31), (16, 16)]  # ranks, elements: uneven ones too


def outcome(s: Schedule) -> np.ndarray:
    """What every rank ends with, proved: (ranks, elements, contributors), zeros where it has nothing."""
    prove(s)
    symbolic = run(s)
    *_, (_, counts) = symbolic.states()
    held = counts * symbolic.positions(s.end)[:, :, None]
    return np.repeat(held, np.diff(symbolic.edges), axis=1)


@pytest.mark.parametrize(("p", "size"), WORLDS)
@pytest.mark.parametrize(
    ("whole", "first", "second"),
    [
        ("all_reduce", "reduce_scatter", "all_gather"),
        ("all_reduce", "reduce", "broadcast"),
        ("all_gather", "gather", "broadcast"),
        ("broadcast", "scatter", "all_gather"),
    ],
)
def test_one_after_the_other(whole: str, first: str, second: str, p: int, size: int) -> None:
    """Any algorithm of the first and any of the second give what any of the whole gives."""
    root = p // 2
    wanted, *others = (outcome(build(whole, algorithm, p, size, root)) for algorithm in ALGORITHMS[whole])
    composed = (
        outcome(chain(build(first, a, p, size, root), build(second, b, p, size, root), whole, f"{a} + {b}"))
        for a in ALGORITHMS[first]
        for b in ALGORITHMS[second]
    )
    for got in (*others, *composed):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize(("p", "size"), WORLDS)
@pytest.mark.parametrize(
    ("op", "reversed_op", "reduces"),
    [("broadcast", "reduce", True), ("scatter", "gather", False), ("reduce_scatter", "all_gather", False)],
)
def test_backwards(op: str, reversed_op: str, reduces: bool, p: int, size: int) -> None:
    """Every broadcast is a reduce, and so on; what is backwards twice is what it was."""
    wanted = outcome(build(reversed_op, ALGORITHMS[reversed_op][0], p, size, root=p - 1))
    for algorithm in ALGORITHMS[op]:
        if algorithm == "scatter_all_gather":
            continue  # sends a rank what it has already; reversed, that is added twice
        forth = build(op, algorithm, p, size, root=p - 1)
        back = dual(forth, reversed_op, algorithm, reduces)
        assert np.array_equal(outcome(back), wanted)
        again = dual(back, op, algorithm, reduces=op == "reduce_scatter")
        for column in ("round", "source", "destination", "offset", "length"):
            assert np.array_equal(getattr(again, column), getattr(forth, column)), column


def test_what_does_not_fit_is_not_put_together() -> None:
    scatter, gather = build("reduce_scatter", "ring", 4, 8), build("gather", "flat", 4, 8)
    assert chain(scatter, gather, "reduce", "ring + flat").rounds == 6
    for second in (build("broadcast", "flat", 4, 8), build("all_gather", "ring", 4, 9)):
        with pytest.raises(ValueError, match="does not start with what reduce_scatter ends with"):
            chain(scatter, second, "all_reduce", "ring")


def test_intervals_may_be_cut_anyhow() -> None:
    """A rank that holds [0, 4) and [4, 8) holds [0, 8)."""
    reduce, broadcast = build("reduce", "flat", 2, 8), build("broadcast", "flat", 2, 8)
    halves = Holdings(np.array([0, 0, 1]), np.array([4, 0, 3]), np.array([4, 4, 0]))
    assert chain(reduce, replace(broadcast, start=halves), "all_reduce", "flat").rounds == 2


@given(st.sampled_from([(op, a) for op, names in ALGORITHMS.items() for a in names]), st.permutations(list(range(6))))
def test_other_names_for_the_ranks(name: tuple[str, str], order: list[int]) -> None:
    s = build(*name, 6, 12, root=2)
    named = relabel(s, order)
    prove(named)
    assert named.sent[order].tolist() == s.sent.tolist()
    with pytest.raises(ValueError, match="each of 6 ranks once"):
        relabel(s, [0] * 6)


@given(st.sampled_from([(2, 2), (2, 3), (4, 2), (2, 2, 2)]), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_buffer_in_parts_behind_each_other(tiers: tuple[int, ...], sizes: list[int]) -> None:
    """What one schedule of the whole does, with as many bytes; a rank has one message at a time; a part begins before
    the one ahead of it has ended."""
    p = math.prod(tiers)
    parts = [build("all_reduce", "hierarchical", p, size, tiers=tiers) for size in sizes]
    s = stagger(parts)
    assert s.size == sum(sizes)
    assert np.array_equal(outcome(s), outcome(build("all_reduce", "ring", p, s.size)))
    assert np.array_equal(s.sent, sum(part.sent for part in parts))
    for ports in (s.source, s.destination):
        pairs = np.unique(np.stack([s.round, ports, s.source + s.destination]), axis=1)[:2]
        assert len(np.unique(pairs, axis=1).T) == len(pairs.T)
    begins = np.cumsum([0, *sizes])
    spans = [s.round[(s.offset >= low) & (s.offset < high)] for low, high in pairwise(begins)]
    assert all(after.min() < before.max() for before, after in pairwise(spans))
