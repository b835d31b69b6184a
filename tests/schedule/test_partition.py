"""Which blocks lie in which chunk: the best of all that there are."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.schedule.partition import balance, search
from phalanx.schedule.partition.balance import MemoryLimits, Units, explain, partition
from phalanx.schedule.partition.bound import ROOM, packed_bound
from phalanx.schedule.pipeline.actions import round_robin, v_shape
from phalanx.spec.errors import InputError

MAPS = [
    *(round_robin(ranks) for ranks in range(1, 6)),
    *(v_shape(ranks) for ranks in range(1, 5)),
    *(round_robin(ranks, 2) for ranks in range(1, 4)),
    *(round_robin(2, virtual) for virtual in (3, 4)),
    round_robin(1, 3),
    (0, 1, 1, 0, 2),  # no schedule's
]


def ways(blocks: int, chunks: int):
    """Every partition there is."""
    for inner in combinations_with_replacement(range(blocks + 1), chunks - 1):
        counts = tuple(b - a for a, b in pairwise((0, *inner, blocks)))
        if all(counts[1:-1]):
            yield counts


def sums(units: list[Units], rank_of: tuple[int, ...], counts: tuple[int, ...]) -> list[float]:
    """Of each rank, by its own units."""
    found, at = [0.0] * len(set(rank_of)), 0
    for chunk, (rank, count) in enumerate(zip(rank_of, counts, strict=True)):
        own = units[rank]
        found[rank] += sum(own.blocks[at : at + count])
        found[rank] += own.embed * (chunk == 0) + own.head * (chunk == len(counts) - 1)
        at += count
    return found


@st.composite
def asked(draw: st.DrawFn) -> tuple[Units, tuple[int, ...], MemoryLimits | None]:
    rank_of = draw(st.sampled_from(MAPS))
    ranks, length = len(set(rank_of)), draw(st.integers(max(len(rank_of) - 2, 0), 8))
    high = draw(st.sampled_from([1, 3, 30]))

    first = draw(st.sampled_from([None, 0, 1, 2, 3]))  # blocks of another kind than all after them; None: any

    def units() -> Units:
        cost = st.integers(0, high)
        if first is None:
            blocks = draw(st.lists(cost, min_size=length, max_size=length))
        else:
            blocks = ([draw(cost)] * first + [draw(cost)] * length)[:length]
        return Units(draw(st.integers(0, 3 * high)), tuple(blocks), draw(st.integers(0, 3 * high)))

    seconds = units()
    if draw(st.booleans()):
        return seconds, rank_of, None
    own = [units()] * ranks if draw(st.booleans()) else [units() for _ in range(ranks)]
    share = max(u.embed + sum(u.blocks) + u.head for u in own) / ranks
    most = [int(share * draw(st.sampled_from([0.8, 1.0, 1.3, 2.0, 3.0]))) for _ in range(ranks)]
    return seconds, rank_of, MemoryLimits(tuple(own), tuple(most))


@settings(max_examples=100, deadline=None)
@given(asked())
def test_the_best_of_all(drawn: tuple[Units, tuple[int, ...], MemoryLimits | None]) -> None:
    best_of_all(*drawn)


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("rank_of", MAPS)
def test_the_best_of_all_unlike(rank_of: tuple[int, ...], moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without moves that better the beginning, the search alone has to find it, but for limits, which moves meet."""
    if not moves:
        monkeypatch.setattr(search, "_improved", lambda asked, cuts: cuts)
    draw, ranks = np.random.default_rng(0), len(set(rank_of))
    for turn in range(4):
        length = int(draw.integers(max(len(rank_of) - 2, 2), 9))

        def units(length: int = length) -> Units:
            embed, *blocks, head = draw.integers(1, 40, length + 2).tolist()
            return Units(embed, tuple(blocks), head)

        own = tuple(units() for _ in range(ranks))
        share = sum(sum(u.blocks) + u.embed + u.head for u in own) / ranks**2
        most = tuple(int(m) for m in draw.uniform(1, 2, ranks) * share)
        best_of_all(units(), rank_of, MemoryLimits(own, most) if moves and turn % 2 else None)


def best_of_all(seconds: Units, rank_of: tuple[int, ...], limits: MemoryLimits | None) -> None:
    """Whole costs are exact: the slowest rank is the least of all partitions that fit, and of these the squares."""
    ranks = len(set(rank_of))
    every = list(ways(len(seconds.blocks), len(rank_of)))
    fit = [
        counts
        for counts in every
        if limits is None
        or all(b <= most for b, most in zip(sums(list(limits.bytes), rank_of, counts), limits.most, strict=True))
    ]
    if not fit:
        with pytest.raises(InputError, match="rank"):
            partition(seconds, rank_of, limits)
        return
    found = partition(seconds, rank_of, limits)
    assert found.blocks in fit

    def value(counts: tuple[int, ...]) -> tuple[float, float]:
        taken = sums([seconds] * ranks, rank_of, counts)
        return max(taken), sum(t * t for t in taken)

    assert value(found.blocks) == min(map(value, fit))
    assert found.optimal
    assert found.slowest == value(found.blocks)[0] == found.bound


@pytest.mark.parametrize("rank_of", [round_robin(4, 2), round_robin(3), v_shape(4)])
@pytest.mark.parametrize("first", [1, 3])
def test_a_few_blocks_before_equal_ones(
    rank_of: tuple[int, ...], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in models with experts but for their first layers: dealt out, as good as the search finds, and proved."""
    seconds = Units(0.0, (30.0,) * first + (70.0,) * (20 - first), 110.0)
    dealt = partition(seconds, rank_of)
    monkeypatch.setattr(balance, "leading_blocks", lambda question: 0)
    searched = partition(seconds, rank_of)
    assert dealt.optimal
    assert dealt.slowest == searched.slowest
    squares = [sum(r.seconds**2 for r in explain(seconds, rank_of, p.blocks).ranks) for p in (dealt, searched)]
    assert squares[0] <= squares[1]


@pytest.mark.parametrize(
    ("rank_of", "first", "cost", "length", "others", "head"),
    [
        (round_robin(3, 2), 2, 26, 6, 18, 28),
        (round_robin(3, 2), 3, 23, 8, 6, 6),
        (v_shape(3), 2, 18, 8, 10, 45),
        (v_shape(3), 2, 23, 8, 6, 28),
        (round_robin(2, 3), 2, 25, 7, 16, 22),
    ],
)
def test_what_the_first_blocks_cost_a_rank_counts_where_it_has_more(
    rank_of: tuple[int, ...], first: int, cost: int, length: int, others: int, head: int
) -> None:
    """A rank whose earlier chunk holds some of the first blocks takes fewer of the others."""
    units = Units(0, (cost,) * first + (others,) * (length - first), head)
    best_of_all(units, rank_of, None)
    best_of_all(
        units, rank_of, MemoryLimits((units,) * len(set(rank_of)), (2.0 * sum(units.blocks),) * len(set(rank_of)))
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([round_robin(4), v_shape(4), round_robin(4, 2), round_robin(2, 4)]),
    st.lists(st.floats(0.1, 2.0), min_size=8, max_size=16),
    st.floats(0, 5),
)
def test_of_any_size(rank_of: tuple[int, ...], blocks: list[float], head: float) -> None:
    """Every block once; not below the bound; no dearer block makes it faster; what is explained is what there is."""
    seconds = Units(0.1, tuple(blocks), head)
    found = partition(seconds, rank_of)
    shown = explain(seconds, rank_of, found.blocks)
    held = [b for c in shown.chunks if c.first is not None and c.last is not None for b in range(c.first, c.last + 1)]
    assert held == list(range(len(blocks)))
    assert [c.rank for c in shown.chunks] == list(rank_of)
    assert found.slowest == max(r.seconds for r in shown.ranks) >= found.bound * (1 - 1e-12)
    assert max(r.share for r in shown.ranks) == 1
    total, ranks = 0.1 + sum(blocks) + head, len(set(rank_of))
    assert sum(r.seconds for r in shown.ranks) == pytest.approx(total)
    assert shown.imbalance == pytest.approx(found.slowest * ranks / total - 1)
    dearer = partition(Units(0.1, (*blocks[:-1], blocks[-1] + 1), head), rank_of)
    assert dearer.slowest >= found.bound * (1 - 1e-12)


def test_as_llama_405b_was_trained() -> None:
    """126 blocks on 16 ranks: the first and the last one get a block fewer, as its authors gave them (Llama 3
    herd, section 3.3.2), and so it is dealt out in turns too."""
    seconds = Units(0.05, (1.0,) * 126, 0.66)
    assert partition(seconds, round_robin(16)).blocks == (7, *[8] * 14, 7)
    shown = explain(seconds, round_robin(16, 7), partition(seconds, round_robin(16, 7)).blocks)
    of_rank = [0] * 16
    for chunk in shown.chunks:
        if chunk.first is not None and chunk.last is not None:
            of_rank[chunk.rank] += chunk.last - chunk.first + 1
    assert of_rank == [7, *[8] * 14, 7]
    assert explain(seconds, v_shape(16), partition(seconds, v_shape(16)).blocks).ranks[0].seconds < 8


def test_blocks_alike_whatever_their_rounding() -> None:
    """Sums of 0.1 differ by where they begin; blocks that cost alike are spread alike nevertheless."""
    for rank_of in (round_robin(4), v_shape(4), round_robin(4, 3)):
        assert len(set(partition(Units(0, (0.1,) * 48, 0), rank_of).blocks)) == 1
    unlike = Units(0, (0.1, 0.2) * 24, 0)
    assert set(partition(unlike, round_robin(4)).blocks) == {12}


@pytest.mark.parametrize(("rank_of", "blocks"), [(round_robin(16), 126), (v_shape(16), 126), (round_robin(8, 2), 62)])
def test_unlike_blocks_of_a_large_model(rank_of: tuple[int, ...], blocks: int) -> None:
    """Local and global attention in turns, six to one: optimal, and seen to be."""
    seconds = Units(0.1, tuple(1.7 if i % 6 == 5 else 1.0 for i in range(blocks)), 3.0)
    assert partition(seconds, rank_of).optimal


def test_optimal_of_few_kinds_however_many_chunks() -> None:
    """Three dense layers before 58 of experts, three chunks on each of 16 ranks: the bound of kinds proves it."""
    found = partition(Units(0.1, (1.0,) * 3 + (1.3,) * 58, 1.5), round_robin(16, 3))
    assert found.optimal
    assert found.slowest == pytest.approx(5.2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([2, 3, 7]), min_size=1, max_size=7), st.lists(st.integers(0, 9), min_size=1, max_size=3)
)
def test_bound_of_kinds_is_the_best_packing(blocks: list[int], taken: list[int]) -> None:
    loads = {tuple(taken)}
    for block in blocks:
        loads = {
            tuple(t + block * (i == at) for i, t in enumerate(load)) for load in loads for at in range(len(load))
        }
    best = min(map(max, loads))
    assert packed_bound(np.array(blocks), taken, 0, 100) == best
    assert packed_bound(np.array(blocks), taken, 0, best - 1) == best - 1


def test_too_many_kinds_have_no_bound() -> None:
    """Of three kinds, 17 x 17 counts of all but the most frequent; 18 x 18 with a block more of each."""
    assert 17 * 17 <= ROOM < 18 * 18
    for each, bounded in ((16, True), (17, False)):
        blocks = np.array([2] * 20 + [3] * each + [7] * each)
        assert (packed_bound(blocks, [0, 0], 1, 1000) > 1) is bounded


def test_memory_moves_blocks_off_the_first_ranks() -> None:
    """A rank early in 1F1B holds activations of more micro-batches: with little memory it gets fewer blocks."""
    seconds = Units(0, (1.0,) * 16, 0)
    each = tuple(Units(0, (10.0 + 5 * (4 - rank),) * 16, 0) for rank in range(4))
    assert partition(seconds, round_robin(4), MemoryLimits(each, (120.0,) * 4)).blocks == (4, 4, 4, 4)
    found = partition(seconds, round_robin(4), MemoryLimits(each, (100.0,) * 4))
    assert found.blocks == (3, 4, 4, 5)
    shown = explain(seconds, round_robin(4), found.blocks, MemoryLimits(each, (100.0,) * 4))
    assert [r.bytes for r in shown.ranks] == [90, 100, 80, 75]


def test_refusals_say_how_much_is_lacking() -> None:
    seconds = Units(0, (1.0,) * 8, 0)
    gib = 2.0**30
    limits = MemoryLimits((Units(0, (gib,) * 8, gib),) * 2, (4 * gib,) * 2)
    with pytest.raises(InputError, match=r"rank \d.*5 GiB.*4 GiB.*1 GiB"):
        partition(seconds, round_robin(2), limits)
    with pytest.raises(InputError, match="10 chunks need at least 8"):
        partition(Units(0, (1.0,) * 7, 0), round_robin(10))
    with pytest.raises(InputError, match="every rank"):
        partition(seconds, (0, 2))
    with pytest.raises(InputError, match="cost of a unit"):
        Units(0, (-1.0,), 0)
    with pytest.raises(InputError, match="counts that make 8"):
        explain(seconds, round_robin(4), (4, 0, 3, 1))
