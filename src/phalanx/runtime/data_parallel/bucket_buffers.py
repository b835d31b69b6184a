"""A bucket's memory on one rank: flat buffers in which parameters are views, and this rank's shard of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.runtime.autograd.deferred_weight_grads import GroupedProduct, Product
from phalanx.runtime.comm.transport import Handle, same_place
from phalanx.schedule.gradients.buckets import Bucket
from phalanx.spec.model.spec import Parameter
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of a flattened parameter; they begin at `at` in this rank's shard of its bucket."""

    parameter: Parameter
    start: int
    stop: int
    at: int

    def of(self, shard: Tensor) -> Tensor:
        """Return the view of the piece in a shard."""
        return shard[self.at : self.at + self.stop - self.start]


class FlatBucket:
    """A bucket cut into the equal shards of a strategy; `index`: this rank's shard. Gradients are reduced over
    `axis`, and then `across_replicas` of the shard (HSDP). `zero` decides which tensors exist:

    weights   (padded,) of the compute type, the parameters' own memory        zero 1, 2
    gradients (padded,) of the accumulate type, of all parameters              zero 0, 1
    sent      (padded,) of the reduce type, the buffer to reduce: `gradients` itself if types agree; at zero 2, 3
              a shared buffer while the bucket fills and travels
    shard     (part,) of the accumulate type, this rank's gradients            all; at 0, 1 in `gradients`
    master    (part,) of the master type                                       zero 1, 2 (a view of `weights` if the
                                                                               types agree), 3
    """

    weights: Tensor
    shard: Tensor
    master: Tensor

    def __init__(self, bucket: Bucket, strategy: Strategy, index: int) -> None:
        self.bucket, self.name = bucket, bucket.name
        self.padded = bucket.padded(strategy)
        self.axis, self.across_replicas = bucket.axis(strategy), bucket.across(strategy)
        parts = bucket.parts(strategy)
        self.part = self.padded // parts
        self.low = index % parts * self.part
        self.gradients: Tensor | None = None
        self.sent: Tensor | None = None
        self.places: dict[str, Tensor] = {}  # views of the parameters' gradients in a shared `sent`
        self.missing = 0
        self.left = 0  # reductions until its gradients are complete: one for each chunk that fills it
        self.arrived: set[str] = set()  # parameters with a gradient in this micro-batch
        self.touched: set[str] = set()  # in this step
        self.handle: Handle | None = None  # of the reduction in flight
        self.gathering: Handle | None = None  # of the parameters' all-gather in flight
        self.across: Handle | None = None  # of the shard's reduction over replicas

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of the bucket's parameters in a flat buffer, by name."""
        sizes = [p.numel for p in self.bucket.parameters]
        parts = flat[: self.bucket.numel].split(sizes)
        return {p.fqn: part.view(p.shape) for p, part in zip(self.bucket.parameters, parts, strict=True)}

    def attach(self, memory: Tensor) -> None:
        """Attach `memory`, (padded,), to the bucket: its gradients go there from now on."""
        if not self.places or not same_place(next(iter(self.places.values())), memory):
            self.places = self.views(memory)
        self.sent = memory
        if self.bucket.numel < self.padded:
            memory[self.bucket.numel :].zero_()

    def own(self, flat: Tensor) -> Tensor:
        """Return the view of this rank's shard in a flat buffer of the bucket."""
        return flat[self.low : self.low + self.part]

    def pieces(self) -> Iterator[Piece]:
        """Yield the piece of each parameter that lies in this rank's shard."""
        begins = 0
        for p in self.bucket.parameters:
            low, high = max(begins, self.low), min(begins + p.numel, self.low + self.part)
            if low < high:
                yield Piece(p, low - begins, high - begins, low - self.low)
            begins += p.numel


def placeholder(parameter: Tensor) -> Tensor:
    """Return a NaN expanded to the parameter's shape: it takes the memory of one element, and accidental use shows
    up."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


_SLICE_ELEMENTS = {"cpu": 2**20, "gpu": 2**28}  # elements


def write_gradient(
    place: Tensor, grad: Tensor | Product | GroupedProduct | None, rows: list[tuple[Tensor, Tensor]], add: bool
) -> None:
    """Write a gradient to `place`, where it is reduced, or `add` it there: its dense part, if any, and `rows`,
    (index, values) pairs."""
    if isinstance(grad, Product | GroupedProduct):
        grad.write(place, add)
        grad = None
    elif grad is None or grad.is_sparse:
        if not add:
            place.zero_()
    else:
        place.add_(grad) if add else place.copy_(grad)
    if grad is not None and grad.is_sparse:  # from a foreign module's sparse embedding
        rows = [*rows, (grad._indices()[0], grad._values())]
    for index, values in rows:
        place.index_add_(0, index, values.to(place.dtype))


def square(flat: Tensor) -> Tensor:
    """Return the squared 2-norm, (), fp64. Computed in pieces: torch's norm on the CPU adds sequentially in fp32, and
    over millions of elements has a relative error of 1e-4 to 1e-3. A GPU sums in a tree, where thousands of small
    kernels would take longer than the sum, so its pieces are large."""
    pieces = flat.split(_SLICE_ELEMENTS["cpu" if flat.device.type == "cpu" else "gpu"])
    if flat.dtype in (torch.float32, torch.float64):
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).double().sum()
    if flat.device.type == "cpu":
        pieces = flat.split(_SLICE_ELEMENTS["cpu"] // 16)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces]
    return torch.stack(norms).double().square_().sum()
