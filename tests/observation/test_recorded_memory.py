"""Lives of storages, groups of ranks and waits of the host as plain data: sums over drawn ones, and names."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.observation.fake.device import FakeCuda
from phalanx.observation.program.run import _operation
from phalanx.observation.recorder.models import ModelNames
from phalanx.observation.recorder.operations import saved_for_backward
from phalanx.observation.recorder.position import ModuleCall, Position, _Spans
from phalanx.observation.recorder.repetition import LIVES, Life
from phalanx.observation.recorder.step import GATHERED, GRADIENTS, PARAMETERS, STATE, StepRecord
from phalanx.observation.recorder.summary import GroupNames, StepMemory
from phalanx.observation.trainer.step import _of_whole_step
from phalanx.schedule.observation import STAY_GATHERED, Site


def _life(draw: np.random.Generator, began: int) -> Life:
    born = 0 if draw.random() < 0.2 else int(draw.integers(1, 90))
    died = LIVES if draw.random() < 0.2 else born + int(draw.integers(1, 60))
    kind = str(draw.choice(("", "", "", PARAMETERS, STATE, GATHERED, GRADIENTS)))
    phase, module = str(draw.choice(("F", "B", "opt"))), str(draw.choice(("", "blocks.0.mlp", "blocks.1", "head")))
    life = Life("cuda", int(draw.integers(0, 1000)), born, kind, module, phase, max(died, began + 1))
    life.operation, life.site = str(draw.choice(("mm", "add"))), Site("train.py", int(draw.integers(1, 4)), "step")
    life.saved_for = frozenset(str(x) for x in draw.choice(("mm", "silu"), int(draw.integers(0, 3))))
    return life


def _drawn(seed: int) -> tuple[StepMemory, list[Life]]:
    draw = np.random.default_rng(seed)
    step = StepRecord(2, began=10)
    step.lives = [_life(draw, step.began) for _ in range(60)]
    lives = [life for life in step.lives if life.bytes]
    step.lives += [Life("cpu", 10**6, 0, "", "", "F")]
    ends = np.sort(draw.choice(np.arange(20, 100), 4, replace=False)).tolist()
    step.backwards = [("B", i % 3, when) for i, when in enumerate(ends)]
    return StepMemory(step, "cuda", ModelNames()), lives


@pytest.mark.parametrize("seed", range(10))
def test_what_is_live_at_a_moment_is_held_by_somebody(seed: int) -> None:
    """From its birth on and not from its death on, of the device alone, the largest holder first."""
    memory, lives = _drawn(seed)
    times = list(range(120))
    for when, holders in zip(times, memory.holders(times), strict=True):
        live = [life for life in lives if life.born <= when < life.died]
        assert sum(h.bytes for h in holders) == sum(life.bytes for life in live)
        assert all(a.bytes >= b.bytes for a, b in pairwise(holders))
        of = Counter[str]()
        for h in holders:
            of[h.kind] += h.bytes
        for kind in (PARAMETERS, STATE):
            assert of[kind] == sum(life.bytes for life in live if life.kind == kind)
        made = [x for x in live if x.born > 10]
        assert of[GATHERED] == sum(x.bytes for x in made if x.kind == GATHERED)
        assert of[STAY_GATHERED] == sum(x.bytes for x in live if x.kind == GATHERED and x.born <= 10)
        assert of["activations"] == sum(x.bytes for x in made if not x.kind and x.phase == "F")
        late = [x for x in made if not x.kind and x.phase == "opt" and not _early(memory, x)]
        assert of["tensors of the optimizer"] == sum(x.bytes for x in late)
    start = memory.at_start()
    assert sum(start.values()) == sum(life.bytes for life in lives if life.born <= 10)
    assert start.get(STATE, 0) == sum(life.bytes for life in lives if life.born <= 10 and life.kind == STATE)


def _early(memory: StepMemory, life: Life) -> bool:
    """Whether a life began outside of passes, no later than the last backward pass."""
    return life.phase == "opt" and life.born <= memory.backwards[-1]


@pytest.mark.parametrize("seed", range(10))
def test_allocations_are_what_is_live_at_the_peak_and_as_the_fullest_backward_pass_begins(seed: int) -> None:
    memory, lives = _drawn(seed)
    peak = int(np.random.default_rng(seed).integers(20, 100))
    live = {when: sum(x.bytes for x in lives if x.born <= when < x.died) for when in (peak, *memory.backwards)}
    allocations = memory.allocations(peak)
    fullest = max(memory.backwards, key=lambda when: live[when])
    assert sum(a.peak_bytes for a in allocations) == live[peak]
    assert sum(a.backward_bytes for a in allocations) == live[fullest]
    either = [x for x in lives if x.born <= peak < x.died or x.born <= fullest < x.died]
    assert sum(a.count for a in allocations) == len(either)
    largest = [max(a.peak_bytes, a.backward_bytes) for a in allocations]
    assert largest == sorted(largest, reverse=True)
    assert all((a.operation == "") == (a.kind in (PARAMETERS, STATE, GATHERED, GRADIENTS)) for a in allocations)
    starts = memory.backward_starts()
    assert sorted(n for start in starts for n in start.micro_batches) == sorted(
        n for _, n, _ in memory.step.backwards
    )
    assert len({start.holders for start in starts}) == len(starts)
    memory.backwards.clear()
    memory.step.backwards.clear()
    assert sum(a.backward_bytes for a in memory.allocations(peak)) == 0


def test_no_more_than_64_allocations_are_kept_and_they_are_the_largest() -> None:
    step = StepRecord(2)
    step.lives = [Life("cuda", n + 1, 1, "", "", "F", site=Site("a.py", n + 1, "f")) for n in range(100)]
    kept = StepMemory(step, "cuda", ModelNames()).allocations(1)
    assert [a.peak_bytes for a in kept] == list(range(100, 36, -1))


@pytest.mark.parametrize("seed", range(20))
def test_a_group_has_the_name_of_the_axis_along_which_it_lies(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = [int(n) for n in draw.integers(2, 5, int(draw.integers(2, 4)))]
    axes = dict(zip(("dp", "cp", "tp"), sizes, strict=False))
    world = math.prod(sizes)
    mesh = np.arange(world).reshape(sizes)
    named, bare = GroupNames(world, axes), GroupNames(world)
    for i, (axis, size) in enumerate(axes.items()):
        groups = np.moveaxis(mesh, i, -1).reshape(-1, size)
        stride = math.prod(sizes[i + 1 :])
        for ranks in groups.tolist():
            assert named.name("", ranks) == axis
            assert bare.name("", ranks) == (f"{size} neighbours" if stride == 1 else f"{size} ranks, {stride} apart")
    assert named.name("", range(world)) == bare.name("", range(world)) == "world"
    assert bare.name("", (0, 1, 3)) == named.name("", (0, 1, 3)) == ("3 ranks" if world > 3 else "world")
    bare._named["7"] = "pp"
    assert bare.name("7", range(world)) == "pp"


@pytest.mark.parametrize("seed", range(5))
def test_a_node_belongs_to_the_call_during_which_its_number_was_given(seed: int) -> None:
    draw = np.random.default_rng(seed)
    span, calls = _Spans(), dict[int, Any]()
    for start in np.sort(draw.integers(5, 60, 20)).tolist():  # of two that begin at one number the later has it
        calls[start] = ModuleCall(f"block.{len(calls)}", None)
        span.mark(start, calls[start])
    for number in range(70):
        begun = [start for start in calls if start <= number]
        assert span.at(number) == (calls[max(begun)] if begun else None)
    assert len(span.starts) == len(calls)


@pytest.mark.parametrize("live", [0, 3 * 2**30])
def test_a_fake_gpu_has_as_much_free_as_its_program_leaves(live: int) -> None:
    gpu = FakeCuda()
    gpu.live = lambda: live
    free, whole = gpu.mem_get_info()
    assert free + gpu.memory_allocated() == whole == gpu.get_device_properties().total_memory
    assert gpu.memory_allocated() == live


@pytest.mark.parametrize("seed", range(8))
def test_a_step_waits_as_often_as_all_of_its_micro_batches(seed: int) -> None:
    """Where some are not executed, the last one of the others represents them."""
    draw = np.random.default_rng(seed)
    count, ran = int(draw.integers(4, 12)), int(draw.integers(1, 4))
    own = [{line: int(draw.integers(0, 3)) for line in ("a.py:1", "b.py:2")} for _ in range(ran)]
    waits = [*own, *[own[-1]] * (count - ran)]
    once = {(None, "a.py:1"): 4}

    def reads(executed: list[dict[str, int]]) -> Counter[tuple[int | None, str]]:
        return Counter({(i, line): n for i, lines in enumerate(executed) for line, n in lines.items()} | once)

    in_full = _of_whole_step(reads(waits), count, count, count)
    assert _of_whole_step(reads(own), ran, count, ran) == in_full
    assert in_full["a.py:1"] == 4 + sum(lines["a.py:1"] for lines in waits)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("aten::nonzero needs values", ("aten", "nonzero")),
        ("'aten.item.default' of a fake tensor", ("aten", "item")),
        ("no operation\nis named", ("no operation",)),
    ],
)
def test_an_error_names_its_operation_or_its_first_line(message: str, said: tuple[str, ...]) -> None:
    assert _operation(message) == said


@pytest.mark.parametrize(
    ("order", "lengths", "partial"),
    [
        ("aaa", [1, 1, 1], [False] * 3),
        ("ababab", [1, 1, 2, 2], [False, True, False, False]),  # b's first makes the step before it a part of one
        ("abaaaab", [1, 1, 2, 2], [False, True, False, False]),  # a steps twice: b may not step again
        ("abbaabba", [1, 1, 2, 2, 2], [False, True, False, False, False]),
    ],
)
def test_a_step_ends_with_all_known_optimizers_a_second_step_of_one_or_the_first_of_another(
    order: str, lengths: list[int], partial: list[bool]
) -> None:
    model = nn.Linear(1, 1)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.0) for name in "ab"}
    taken, ended = list[str](), list[tuple[int, bool]]()
    position = Position(lambda: ended.append((len(taken), position.partial)))
    try:
        for name in order:
            taken.append(name)
            optimizers[name].step()
            assert position.stepped
            model(torch.ones(1))
            assert not position.stepped
    finally:
        position.close()
    ends = [0, *(at for at, _ in ended)]
    assert [b - a for a, b in pairwise(ends)] == lengths
    assert [was for _, was in ended] == partial


def test_a_graph_whose_branches_join_again_is_walked_once() -> None:
    """Each of 60 blocks doubles the ways to the first one."""
    x = start = torch.ones(3, requires_grad=True)
    for _ in range(60):
        x = x * x + x
    found = list(saved_for_backward([x]))
    assert len(found) == 2 * 60  # both factors of each product
    assert (start.untyped_storage()._cdata, "mul") in found
