"""Gradients of what several ranks hold alike: over tp norms, biases that are added once, key heads that ranks share;
over a pipeline an embedding that is tied to the head.

Of most, every holder computes the same gradient. Of some each computes its own part, from its own heads: the norms
of queries and keys, and shared key heads; with sequence parallelism of all others too, from its own tokens. Their
sums are made once a step, of the accumulated gradients:

    end of backward   all-reduce over embed, the first and the last pipeline rank, of the tied embedding's gradient
                      all-reduce over tp of a buffer in which every different part has its place

In the gradient's norm each logical element counts once, whoever else holds it: over tp, over replicas of its bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.runtime.data_parallel.bucket_buffers import square
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.schedule.layers.tensor import summed_elements
from phalanx.spec.model.spec import holds_one_tied_copy, is_head_copy
from phalanx.spec.strategy.split import Split, partial


class Copies:
    """What an engine's gradients are to those of other ranks. All of tp hold the same pieces of the same parameters,
    of the boxes that they have of them; and so do both of `embed` of the tied embedding: it has its own bucket."""

    def __init__(self, engine: DataParallel, split: Split) -> None:
        self._comm = engine.comm
        self._runs: dict[int, list[Tensor]] = {}  # neighbouring gradients, by how many ranks hold them
        sums: list[tuple[Tensor, int, int]] = []  # gradient, different ones among the ranks, which is this one
        boxes = partial(split)
        self._tied: Tensor | None = None
        for b in engine.buckets:
            assert b.shard is not None
            begins, before = 0, 0
            replicas = b.bucket.replicas(engine.strategy)
            if holds_one_tied_copy(split.spec) and b.bucket.parameters[0].unit == "model":
                self._tied = b.shard
                if is_head_copy(split.spec, b.bucket.parameters[0].fqn):  # which the first rank counts
                    continue
            for piece in b.pieces():
                fqn, here = piece.parameter.fqn, piece.of(b.shard)
                held = split.held(fqn)
                if held.copies != before:
                    begins, before = piece.at, held.copies
                    self._runs.setdefault(before * replicas, []).append(here)
                self._runs[before * replicas][-1] = b.shard[begins : piece.at + here.numel()]
                if fqn in boxes:
                    sums.append((here, boxes[fqn], split.index // held.copies))
        self._sums: list[tuple[Tensor, Tensor]] = []  # gradient, its place in the buffer
        shard = engine.buckets[0].shard
        assert shard is not None
        self._buffer = engine.comm.buffer(
            summed_elements(split, [b.bucket for b in engine.buckets], engine.strategy), shard.dtype
        )
        begins = 0
        for gradient, different, which in sums:
            places = self._buffer[begins : begins + different * gradient.numel()].view(different, -1)
            self._sums.append((gradient, places[which]))
            begins += places.numel()

    @torch.no_grad()
    def add_up(self) -> None:
        """The end of the last backward pass: gradients that are sums over tp ranks are made whole."""
        tied = None
        if self._tied is not None:
            tied = self._comm.all_reduce(self._tied, "embed", unit="embedding", phase="opt")
        if self._buffer.numel():
            self._add_up_parts()
        if tied is not None:
            tied.wait()

    def _add_up_parts(self) -> None:
        self._buffer.zero_()
        for gradient, place in self._sums:
            place.copy_(gradient)
        self._comm.all_reduce(self._buffer, "tp", unit="copies", phase="opt").wait()
        for gradient, place in self._sums:
            gradient.copy_(place)

    def norm_square(self) -> Tensor:
        """This rank's share of the square of the gradients' 2-norm over the world, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self._comm.world.device)
        for holders, runs in self._runs.items():
            total += torch.stack([square(run) for run in runs]).sum() / holders
        return total
