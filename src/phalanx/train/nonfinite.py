"""Where a number that is not finite came from: its parameter, rank and micro-batch.

A step whose loss or gradient norm is not finite changes no weight. So it can be run again, by all ranks together,
and this time every number is looked at where it arises:

    forward     a unit's weights before its pass, its output behind it (the head's is the loss)
    backward    each parameter's own gradient when it is ready, before it is reduced
    reduction   the sums over the ranks, of the first run and of the second

The first in this order is the origin, of the lowest micro-batch: forward through the units of the whole model, then
back. From there NaN and Inf spread through activations to all that comes later. When a rank came to it says nothing:
of a pipeline a later stage has fewer units, and micro-batches overtake each other. A step that goes well is never
looked at, and pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.engine import DataParallel

Place = tuple[int, ...]
"""Where on a micro-batch's way through the model something is: less is earlier."""


class Way:
    """The places of what units have. `whole`: the model's, in forward order; `held`: this rank's."""

    def __init__(self, whole: Sequence[str], held: Sequence[str]) -> None:
        self._at = {unit: i for i, unit in enumerate(whole)}
        self._held = held

    def forward(self, unit: str, after: bool) -> Place:
        return 0, self._at[unit], int(after)

    def gradient(self, parameter: str) -> Place:
        own = (unit for unit in self._held if parameter.startswith(f"{unit}."))
        return 1, -self._at[next(own, "head")]  # which has the embedding's name for what is tied to it


@dataclass(frozen=True)
class Found:
    """`what` is not finite."""

    what: str
    elements: str
    micro_batch: int = 0
    place: Place = ()


def faulty(what: str, tensors: list[Tensor], micro_batch: int = 0, place: Place = ()) -> Found | None:
    """What is not finite in the tensors, if anything."""
    nan = inf = total = 0
    for t in tensors:
        t = t.detach()
        values = t._values() if t.is_sparse else t
        nan += int(torch.isnan(values).sum())
        inf += int(torch.isinf(values).sum())
        total += values.numel()
    if not nan + inf:
        return None
    kinds = " and ".join(kind for kind, n in (("nan", nan), ("inf", inf)) if n)
    return Found(what, f"{nan + inf} of {total} elements: {kinds}", micro_batch, place)


class _Watch:
    """Looks at all that could come before the first that it has found so far."""

    def __init__(self, micro_batch: Callable[[], int]) -> None:
        self.found: Found | None = None
        self._micro_batch = micro_batch

    def see(self, what: str, place: Place, *tensors: Tensor) -> None:
        at = self._micro_batch()
        if self.found is None or (at, place) < (self.found.micro_batch, self.found.place):
            self.found = faulty(what, list(tensors), at, place) or self.found


@contextmanager
def _watching(
    engine: DataParallel, units: dict[str, nn.Module], way: Way, micro_batch: Callable[[], int]
) -> Iterator[_Watch]:
    watch = _Watch(micro_batch)
    hooks = []

    def follow(unit: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: object) -> None:  # behind the engine's own hook: weights are gathered
            for name, p in module.named_parameters(prefix=unit):
                watch.see(f"weight {name}", way.forward(unit, after=False), p)

        def after(_: nn.Module, args: object, out: Tensor) -> None:
            watch.see(f"output of {unit}" if out.dim() else "loss", way.forward(unit, after=True), out)

        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(after))

    def gradient(name: str, grad: Tensor | None, rows: list[tuple[Tensor, Tensor]]) -> None:
        dense = [] if grad is None else [grad]
        watch.see(f"gradient of {name}", way.gradient(name), *dense, *(values for _, values in rows))

    for unit, module in units.items():
        follow(unit, module)
    engine.watch = gradient
    try:
        yield watch
    finally:
        engine.watch = None
        for hook in hooks:
            hook.remove()


def _sums(engine: DataParallel, way: Way) -> Found | None:
    """The first of the reduced gradients on this rank that is not finite."""
    for b in engine.buckets:
        assert b.shard is not None
        if engine.zero == 0:
            held = b.views(b.shard)
        else:
            held = {piece.parameter.fqn: piece.of(b.shard) for piece in b.pieces()}
        for name, gradient in held.items():
            found = faulty(name, [gradient], place=way.gradient(name))
            if found is not None:
                return found
    return None


def origin(
    engine: DataParallel,
    units: dict[str, nn.Module],
    whole: Sequence[str],
    micro_batch: Callable[[], int],
    again: Callable[[], object],
) -> str:
    """Where the numbers of a step that were not finite came from, in words, the same on all ranks. `units`: what this
    rank has of the `whole` model's. `again` runs the step's passes once more, `micro_batch` says which is under way;
    all ranks together."""
    way = Way(whole, list(units))
    before = _sums(engine, way)
    with _watching(engine, units, way, micro_batch) as watch:
        again()
    engine.comm.status.now("the search for what is not finite")
    told = engine.comm.gather_objects((watch.found, before, _sums(engine, way)), "world")
    return _said(engine.comm, *(list(column) for column in zip(*told, strict=True)))


def _said(comm: Comm, own: list[Found | None], once: list[Found | None], twice: list[Found | None]) -> str:
    """What each rank found in its second run, and in the sums of the first and the second, as a line."""

    def first(of_ranks: list[Found | None]) -> tuple[Found, str] | None:
        found = [(f.micro_batch, f.place, rank) for rank, f in enumerate(of_ranks) if f is not None]
        if not found:
            return None
        rank = min(found)[2]
        place = ", ".join(f"{axis} {i}" for axis, i in comm.mesh.coordinates(rank).items())
        others = {1: "", 2: ", and another rank has some"}.get(
            len(found), f", and {len(found) - 1} other ranks have some"
        )
        chosen = of_ranks[rank]
        assert chosen is not None
        return chosen, f"rank {rank}{f' ({place})' if place else ''}{{}} ({chosen.elements}{others})"

    local = first(own)
    if local is not None:
        f, where = local
        return f"{f.what} on {where.format(f' in micro-batch {f.micro_batch} is not finite')}"
    summed = first(twice)
    if summed is not None:
        f, where = summed
        return (
            f"every rank's own gradients are finite, but the reduced one of {f.what} is not on {where.format('')}: "
            "it is too large for its type, or communication is at fault"
        )
    transient = "this did not happen again when the step was repeated: a transient fault of hardware or communication"
    reduced = first(once)
    if reduced is not None:
        f, where = reduced
        return f"the reduced gradient of {f.what} was not finite on {where.format('')}; {transient}"
    return f"loss or gradient norm was not finite, but every gradient is: their norm overflows, or {transient}"
