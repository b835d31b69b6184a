"""The arena: memory is given, given back and given again, and nothing of it outlives its process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples

from phalanx.runtime.comm.shm_arena import Address, Arena, ArenaNeighbour


@examples(8, 100)
def test_blocks_never_overlap_and_come_back(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.lists(st.one_of(st.integers(1, 5000), st.integers(-5, -1)), max_size=60))
    def holds(steps: list[int]) -> None:
        arena = Arena()
        blocks: list[tuple[torch.Tensor, int]] = []
        for step in steps:
            if step > 0:
                tensor = arena.buffer(step, torch.float32)
                assert bool((tensor == 0).all())
                blocks.append((tensor.fill_(len(blocks) + 1), len(blocks) + 1))
            elif blocks:
                blocks.pop(-step % len(blocks))
                blocks = [(t.fill_(i + 1), i + 1) for i, (t, _) in enumerate(blocks)]
            for tensor, value in blocks:
                assert bool((tensor == value).all())
                assert arena.offset(tensor) % 64 == 0  # type: ignore[operator]
        top = arena._top
        tensor = None  # type: ignore[assignment]
        blocks.clear()
        gc.collect()
        arena.buffer(max(1, (top - 4096) // 4), torch.float32)
        assert arena._top <= max(top, 4096 + 64)

    holds()


def test_a_view_keeps_its_block() -> None:
    arena = Arena()
    view = arena.buffer(100, torch.float32)[10:20]
    gc.collect()
    other = arena.buffer(100, torch.float32)
    assert abs(arena.offset(view) - arena.offset(other)) >= 40  # type: ignore[operator]
    assert arena.offset(torch.zeros(3)) is None


def test_a_neighbour_sees_and_writes_and_dies() -> None:
    arena = Arena()
    mine = arena.buffer(4, torch.float32)
    offset = arena.offset(mine)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, torch\n"
            "from phalanx.runtime.comm.shm_arena import *\n"
            f"n = ArenaNeighbour(0, {arena.address!r})\n"
            f"n.tensor({offset}, 4, torch.float32).fill_(7)\n"
            "a = Arena(); a.buffer(1000, torch.float32)\n"
            "print(a.address.pid, a.address.fd, a.address.nonce, flush=True)\n"
            "sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    theirs = Address(*map(int, child.stdout.readline().split()))
    assert mine.tolist() == [7, 7, 7, 7]
    neighbour = ArenaNeighbour(1, theirs)
    assert neighbour.alive()
    child.kill()
    child.wait()
    assert not neighbour.alive()
    assert not list(Path("/dev/shm").glob("*phalanx*"))


def test_a_stranger_is_not_mapped() -> None:
    arena = Arena()
    with pytest.raises(OSError, match="is not rank 3"):
        ArenaNeighbour(3, Address(os.getpid(), arena.address.fd, 12345))
    with pytest.raises(OSError, match="No such file"):
        ArenaNeighbour(3, Address(os.getpid(), 9999, 1))
