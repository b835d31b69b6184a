"""Every transport gives what torch's own collectives give: any operation, type, size, group and order of waiting."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rank_cases import (
    broken_program,
    die_in_shm,
    loopback_bytes,
    many_at_once,
    run_schedule,
    transport_case,
    uneven_choice,
    used_again,
    without_arena,
)
from support.rank_pool import CaseFailed, Pool

from phalanx.runtime.comm import shm
from phalanx.runtime.comm.schedule_executor import Executor
from phalanx.runtime.comm.transport import DONE, Call, Done
from phalanx.schedule.collectives.ir import Schedule, intervals
from phalanx.schedule.collectives.rank_program import program
from phalanx.schedule.collectives.registry import ALGORITHMS, build

RUN = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
P2P = [(op, algorithm) for op in RUN for algorithm in ALGORITHMS[op]]
DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32"]


@settings(max_examples=25)
@given(
    st.sampled_from([("shm", op, "") for op in RUN] * 3 + [("p2p", *name) for name in P2P]),
    st.sampled_from(DTYPES),
    st.sampled_from(["sum", "avg", "min", "max", "product"]),
    st.sampled_from([(0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3)]),
    st.sampled_from([1, 3, 64, 1000, 70_001, 600_000]),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_transport_equals_the_sum_of_its_parts(
    pool: Pool,
    how: tuple[str, str, str],
    dtype: str,
    reduction: str,
    ranks: tuple[int, ...],
    n: int,
    own: bool,
    seed: int,
) -> None:
    if reduction == "avg" and dtype.startswith("int"):
        reduction = "sum"
    pool.run(4, transport_case, *how, dtype, reduction, ranks, n, own, seed)


@pytest.mark.parametrize("reduction", ["sum", "min", "max", "product"])
@pytest.mark.parametrize("inside", [0, 1])
def test_gloos_reduce_scatter_is_made_of_its_all_reduce(pool: Pool, reduction: str, inside: int) -> None:
    """Whether the target is a part of the source or lies elsewhere."""
    for dtype in ("float64", "bfloat16", "int64"):
        pool.run(4, transport_case, "native", "reduce_scatter", "", dtype, reduction, (0, 1, 3), 1000, False, inside)


@settings(max_examples=30)
@given(
    st.sampled_from(["shm", "p2p pairwise", "p2p bruck"]),
    st.lists(st.integers(0, 2000), min_size=16, max_size=16),
    st.booleans(),
)
def test_uneven_all_to_all(pool: Pool, how: str, counts: list[int], own: bool) -> None:
    transport, _, algorithm = how.partition(" ")
    splits = np.array(counts).reshape(4, 4).tolist()
    pool.run(4, transport_case, transport, "all_to_all", algorithm, "float32", "sum", (0, 1, 2, 3), 0, own, 1, splits)


@pytest.mark.parametrize("op", ["broadcast", "reduce", "scatter", "gather", "barrier", "all_reduce"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_executor_runs_every_schedule(pool: Pool, op: str, ranks: int, grouped: bool) -> None:
    """Posted one by one, and grouped by rounds as NCCL wants them."""
    for algorithm in ALGORITHMS[op]:
        size = ranks if op == "barrier" else 37
        schedule = build(op, algorithm, ranks, size, root=0 if op == "barrier" else ranks - 1)
        states = pool.run(ranks, run_schedule, schedule, grouped)
        values = [np.arange(size) + 100.0 * (r + 1) for r in range(ranks)]
        wanted = np.zeros(size)
        for rank, offset, length in zip(
            schedule.start.rank, schedule.start.offset, schedule.start.length, strict=True
        ):
            wanted[offset : offset + length] += values[rank][offset : offset + length]
        for rank, offset, length in zip(schedule.end.rank, schedule.end.offset, schedule.end.length, strict=True):
            np.testing.assert_array_equal(states[rank][offset : offset + length], wanted[offset : offset + length])


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.permutations([0, 1, 2]), *[st.integers(0, 9)] * 2, st.booleans()), max_size=4)),
    st.sampled_from([0, 100, 2**22]),
    st.booleans(),
)
@example([[([1, 0, 2], 0, 5, True)], [([2, 0, 1], 5, 7, False)], [([0, 1, 2], 7, 7, False)]], 2**22, False)
def test_what_is_received_ahead_waits_for_its_turn(
    pool: Pool, rounds: list[list[tuple[list[int], int, int, bool]]], ahead: int, grouped: bool
) -> None:
    """Any transfers, round by round, also such as overwrite what was added, or is still to be sent."""
    states = np.arange(10) + 100.0 * np.arange(1, 4)[:, None]
    columns: list[tuple[int, int, int, int, int, bool]] = []
    for number, transfers in enumerate(rounds):
        before, written = states.copy(), np.zeros_like(states, dtype=bool)
        for (source, destination, _), one, other, reduces in transfers:
            low, high = min(one, other), max(one, other) + 1
            if written[destination, low:high].any():
                continue  # a round writes an element once
            written[destination, low:high] = True
            kept = states[destination, low:high] if reduces else 0
            states[destination, low:high] = kept + before[source, low:high]
            columns.append((number, source, destination, low, high - low, reduces))
    table = np.array(columns, dtype=np.int64).reshape(-1, 6).T
    nothing = intervals([], 0, 0)
    schedule = Schedule("all_reduce", "any", 3, 10, *table[:5], table[5].astype(bool), nothing, nothing)
    np.testing.assert_array_equal(pool.run(3, run_schedule, schedule, grouped, ahead), states)


class Instant:
    """A group whose messages are over at once; `received`: where they were to arrive."""

    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []

    def send(self, data: list[torch.Tensor], peer: int, tag: int) -> Done:
        return DONE

    def recv(self, into: list[torch.Tensor], peer: int, tag: int) -> Done:
        self.received += into
        return DONE


def test_what_a_ring_gathers_arrives_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its chunks were sent before, to be added up. Of messages too long to be received ahead."""
    monkeypatch.setattr("phalanx.runtime.comm.schedule_executor.SEGMENT", 64)
    monkeypatch.setattr("phalanx.runtime.comm.schedule_executor._STAGING_BYTES", 256)
    buffer, over = torch.zeros(1024), Instant()
    steps = program(build("all_reduce", "ring", 4, 1024), me=0)
    Executor(over, grouped=False).run(steps, lambda low, high: buffer[low:high], "sum", buffer)  # type: ignore[arg-type]
    there = buffer.untyped_storage().data_ptr()
    at_their_place = [t.numel() for t in over.received if t.untyped_storage().data_ptr() == there]
    assert sum(at_their_place) == 3 * 1024 // 4


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_many_at_once_over_mixed_transports_waited_for_in_any_order(pool: Pool, seed: int) -> None:
    pool.run(4, many_at_once, seed, 80)


def test_our_reduce_scatter_moves_half_of_gloos_bytes(pool: Pool) -> None:
    """Counted by the loopback interface: (p-1)/p S for each rank, where Gloo moves an all-reduce's bytes."""
    for ranks in (2, 4):
        ours, gloos = pool.run(ranks, loopback_bytes, 2**24)[0]
        optimum = (ranks - 1) * 2**24
        assert ours == pytest.approx(optimum, rel=0.05)
        assert gloos == pytest.approx(2 * optimum, rel=0.05)


def test_a_rank_that_issues_something_else_is_named(pool: Pool) -> None:
    with pytest.raises(
        CaseFailed,
        match=r"rank 1 issued a different operation, all_gather \(32 bytes of float32\), where this rank issued",
    ):
        pool.run(2, broken_program)


def test_a_type_is_another_operation(pool: Pool) -> None:
    with pytest.raises(
        CaseFailed, match=r"a different operation, all_reduce \(32 bytes of int32, sum\), where this rank"
    ):
        pool.run(2, broken_program, "int32")


def test_memory_that_is_used_again_is_not_mistaken(pool: Pool) -> None:
    """At one address: another type of the same width, and a copy of what lies elsewhere."""
    pool.run(2, used_again)


def test_uneven_sizes_choose_alike(pool: Pool) -> None:
    pool.run(2, uneven_choice)


def test_what_cannot_be_is_refused_before_it_is_issued() -> None:
    flat = torch.zeros(8)
    for make, words in (
        (lambda: Call("all_gather", (0, 1), 0, torch.zeros(4, 2)[:, 0], flat), "flat contiguous"),
        (lambda: Call("all_to_all", (0, 1), 0, flat, flat, sends=(10, 10), receives=(4, 4)), "8 elements"),
        (lambda: Call("all_to_all", (0, 1, 2), 0, flat, flat), "8 elements"),
        (lambda: Call("all_reduce", (0, 1), 0, flat.int(), flat.int(), "avg"), "cannot be averaged"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_a_killed_rank_is_named_by_those_that_wait(pool: Pool) -> None:
    with pytest.raises(
        CaseFailed, match="rank 1 died while this rank waited for it in all_reduce of gradients over world"
    ):
        pool.run(3, die_in_shm, 1)


def test_ranks_that_cannot_share_memory_say_so_and_go_on(pool: Pool) -> None:
    said = pool.run(3, without_arena, 2)
    pool.stop()  # no rank has its arena any more
    note = "note: rank 2 has no shared memory (for a test); 3 ranks use torch.distributed's own"
    assert [text.count(note) for text in said] == [1, 0, 0]


def test_calls_that_differ_in_anything_have_another_code() -> None:
    """By which ranks notice that they do not do the same."""
    calls = [
        SimpleNamespace(op=op, reduction=reduction, sends=sends, source=SimpleNamespace(dtype=dtype))
        for op, reduction, dtype in product(shm._OPS, shm._REDUCTIONS, shm._DTYPES)
        for sends in ((), (1, 2))
    ]
    assert len({shm._code(call) for call in calls}) == len(calls)  # type: ignore[arg-type]
