"""Gradients of parameters that several ranks of a replica hold: over tp norms, biases that are added once, and shared
key heads; over a pipeline an embedding that is tied to the head.

For most, every holder computes the same gradient. For some each computes a part, from its own heads: the norms of
queries and keys, and shared key heads; with sequence parallelism for all others too, from its own tokens. The parts
are summed once a step, after accumulation:

    end of backward   all-reduce over embed, the first and the last pipeline rank, of the tied embedding's gradient
                      all-reduce over tp of a buffer with a place for every distinct parameter part

In the gradient's norm each logical element counts once, regardless of how many tp ranks or replicas hold it.
"""

import torch
from torch import Tensor

from phalanx.runtime.data_parallel.bucket_buffers import square
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.schedule.layers.collectives import summed_elements
from phalanx.spec.model.spec import holds_one_tied_copy, is_head_copy
from phalanx.spec.strategy.split import Split, partial


class SharedGradients:
    """Sums the gradients that an engine shares with other ranks, and counts each element once in the norm. All ranks
    of tp hold the same pieces of their boxes of a parameter; both ranks of `embed` hold the same pieces of the tied
    embedding, which has its own bucket."""

    def __init__(self, engine: DataParallel, split: Split) -> None:
        self._comm = engine.comm
        self._runs: dict[int, list[Tensor]] = {}  # adjacent gradients, by how many ranks hold them
        sums: list[tuple[Tensor, int, int]] = []  # (gradient, distinct boxes among the ranks, index of this one)
        boxes = partial(split)
        self._tied: Tensor | None = None
        # Runs of adjacent gradients with equal numbers of holders, and gradients to sum over tp.
        for b in engine.buckets:
            begins, before = 0, 0
            replicas = b.bucket.replicas(engine.strategy)
            if holds_one_tied_copy(split.spec) and b.bucket.parameters[0].unit == "model":
                self._tied = b.shard
                if is_head_copy(split.spec, b.bucket.parameters[0].fqn):  # the first rank counts it
                    continue
            for piece in b.pieces():
                fqn, here = piece.parameter.fqn, piece.of(b.shard)
                box = split.box(fqn)
                if box.copies != before:
                    begins, before = piece.at, box.copies
                    self._runs.setdefault(before * replicas, []).append(here)
                self._runs[before * replicas][-1] = b.shard[begins : piece.at + here.numel()]
                if fqn in boxes:
                    sums.append((here, boxes[fqn], split.index // box.copies))
        # A place in the buffer for each distinct part of a summed gradient.
        self._sums: list[tuple[Tensor, Tensor]] = []  # (gradient, its place in the buffer)
        size = summed_elements(split, [b.bucket for b in engine.buckets], engine.strategy)
        self._buffer = engine.comm.buffer(size, engine.buckets[0].shard.dtype)
        begins = 0
        for gradient, different, which in sums:
            places = self._buffer[begins : begins + different * gradient.numel()].view(different, -1)
            self._sums.append((gradient, places[which]))
            begins += places.numel()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum shared gradients over their ranks, at the end of the last backward pass; all ranks together."""
        tied = None
        if self._tied is not None:
            tied = self._comm.all_reduce(self._tied, "embed", unit="embedding", phase="opt")
        if self._buffer.numel():
            self._reduce_parts()
        if tied is not None:
            tied.wait()

    def _reduce_parts(self) -> None:
        self._buffer.zero_()
        for gradient, place in self._sums:
            place.copy_(gradient)
        self._comm.all_reduce(self._buffer, "tp", unit="copies", phase="opt").wait()
        for gradient, place in self._sums:
            gradient.copy_(place)

    def norm_square(self) -> Tensor:
        """Return this rank's share of the squared 2-norm of all gradients over the world, (), fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self._comm.world.device)
        for holders, runs in self._runs.items():
            total += torch.stack([square(run) for run in runs]).sum() / holders
        return total
