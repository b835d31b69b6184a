"""How the tensors of a module are cut over the tp ranks, and joined again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.spec.model.spec import Parameter
from phalanx.spec.strategy.split import ParameterBox


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut along a dim into one part per rank. `counts`: the sizes, along dim 0, of the matrices that
    one packs (gate and up; q, k and v), of each of which a rank has its part."""

    dim: int
    counts: tuple[int, ...] = ()

    def part(self, whole: Tensor, tp: int, index: int) -> Tensor:
        """Return a rank's part of a whole tensor."""
        packed = whole.split(self.counts, self.dim) if self.counts else (whole,)
        return torch.cat([each.chunk(tp, self.dim)[index] for each in packed], self.dim)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from all ranks' parts."""
        if not self.counts:
            return torch.cat(tuple(parts), self.dim)
        of_ranks = [part.split([n // len(parts) for n in self.counts], self.dim) for part in parts]
        return torch.cat([torch.cat(each, self.dim) for each in zip(*of_ranks, strict=True)], self.dim)


@dataclass(frozen=True)
class SplitNames:
    """Tensors of a module split by a plan, on tp rank `index`: `cuts` has the cut of each split tensor, `shapes` the
    shape of this rank's part of every tensor."""

    tp: int
    index: int
    cuts: Mapping[str, Cut]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def unsplit(self) -> bool:
        """Whether no tensor is split."""
        return self.tp == 1

    def boxes_of(self, fqn: str) -> tuple[ParameterBox, ...]:
        """Return this rank's boxes of the whole tensor, one after the other in its part."""
        own, cut = self.shapes[fqn], self.cuts.get(fqn)
        dim = None if cut is None else cut.dim
        whole = tuple(n * self.tp if i == dim else n for i, n in enumerate(own))
        parameter, copies = Parameter(fqn, whole, "column", ""), 1 if cut is not None else self.tp
        packed, start, boxes = (cut and cut.counts) or (whole[dim or 0] if whole else 1,), 0, []
        for count in packed:
            rows = count // self.tp
            sizes = tuple(rows if i == dim else n for i, n in enumerate(own))
            offsets = tuple(start + rows * self.index if i == dim else 0 for i, _ in enumerate(own))
            boxes.append(ParameterBox(parameter, sizes, offsets, sizes, copies))
            start += count
        return tuple(boxes)

    def shape(self, fqn: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self.boxes_of(fqn)[0].parameter.shape

    def part(self, fqn: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        cut = self.cuts.get(fqn)
        return whole if cut is None else cut.part(whole, self.tp, self.index)
