"""The origin of a number that is not finite: its parameter, rank and micro-batch.

A step whose loss or gradient norm is not finite changes no weight. So all ranks can run it again together, and check
every number where it is produced:

    forward     a unit's weights before its pass, its output after it (the head's is the loss)
    backward    each parameter's own gradient when it is ready, before it is reduced
    reduction   the sums over the ranks, of the first run and of the second

The origin is the first of these in the lowest micro-batch: forward through the units of the full model, then back.
From there NaN and Inf spread through activations to everything later. The time at which a rank observed it proves
nothing: in a pipeline, later stages have fewer units and micro-batches overtake each other. A good step is never
checked and pays nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.tracing.unit_hooks import unit_hooks

Place = tuple[int, ...]
"""Position in a micro-batch's pass through the model; smaller is earlier."""


class PassPositions:
    """Positions of weights, outputs and gradients. `every`: the units of the full model in forward order; `held`:
    this rank's."""

    def __init__(self, every: Sequence[str], held: Sequence[str]) -> None:
        self._at = {unit: i for i, unit in enumerate(every)}
        self._held = held

    def forward(self, unit: str, after: bool) -> Place:
        """Return the position of a unit's weights or, with `after`, of its output."""
        return 0, self._at[unit], int(after)

    def gradient(self, parameter: str) -> Place:
        """Return the position of a parameter's gradient."""
        own = (unit for unit in self._held if parameter.startswith(f"{unit}."))
        return 1, -self._at[next(own, "head")]  # a head tied to the embedding has its parameter under that name


@dataclass(frozen=True)
class NonFinite:
    """A tensor that is not finite: its description, and its numbers of NaN and Inf."""

    what: str
    elements: str
    micro_batch: int = 0
    place: Place = ()


def nonfinite_in(name: str, tensors: list[Tensor], micro_batch: int = 0, place: Place = ()) -> NonFinite | None:
    """Return the NaN and Inf of some tensors, counted together, or None if all elements are finite."""
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
    return NonFinite(name, f"{nan + inf} of {total} elements: {kinds}", micro_batch, place)


class _Watch:
    """Tracks the earliest non-finite tensor; checks only tensors that could precede it."""

    def __init__(self, micro_batch: Callable[[], int]) -> None:
        self.earliest: NonFinite | None = None
        self._micro_batch = micro_batch

    def see(self, what: str, place: Place, *tensors: Tensor) -> None:
        at = self._micro_batch()
        if self.earliest is None or (at, place) < (self.earliest.micro_batch, self.earliest.place):
            self.earliest = nonfinite_in(what, list(tensors), at, place) or self.earliest


@contextmanager
def _watching(
    engine: DataParallel, units: dict[str, nn.Module], way: PassPositions, micro_batch: Callable[[], int]
) -> Iterator[_Watch]:
    watch = _Watch(micro_batch)

    def before(unit: str, module: nn.Module) -> None:  # after the engine's own hook: weights are gathered
        for name, p in module.named_parameters(prefix=unit):
            watch.see(f"weight {name}", way.forward(unit, after=False), p)

    def after(unit: str, _: nn.Module, out: Tensor) -> None:
        watch.see(f"output of {unit}" if out.dim() else "loss", way.forward(unit, after=True), out)

    def gradient(name: str, grad: Tensor | None, rows: list[tuple[Tensor, Tensor]]) -> None:
        dense = [] if grad is None else [grad]
        watch.see(f"gradient of {name}", way.gradient(name), *dense, *(values for _, values in rows))

    # Watch weights and outputs by hooks, gradients through the engine.
    engine.watch = gradient
    try:
        with unit_hooks(units, before, after):
            yield watch
    finally:
        engine.watch = None


def _sums(engine: DataParallel, way: PassPositions) -> NonFinite | None:
    """Return the first reduced gradient on this rank that is not finite."""
    for b in engine.buckets:
        if engine.sharding.state:
            gradients = {piece.parameter.fqn: piece.of(b.shard) for piece in b.pieces()}
        else:
            gradients = b.views(b.shard)
        for name, gradient in gradients.items():
            origin = nonfinite_in(name, [gradient], place=way.gradient(name))
            if origin is not None:
                return origin
    return None


def origin(
    engine: DataParallel,
    units: dict[str, nn.Module],
    every: Sequence[str],
    micro_batch: Callable[[], int],
    again: Callable[[], object],
) -> str:
    """Find the origin of a step's non-finite numbers and describe it, the same on all ranks; all ranks together.

    `units`: this rank's units, of `every` unit of the model. `again` repeats the step's passes; `micro_batch` returns
    the running micro-batch.
    """
    way = PassPositions(every, list(units))
    before = _sums(engine, way)
    with _watching(engine, units, way, micro_batch) as watch:
        again()
    engine.comm.status.now("the search for what is not finite")
    together = engine.comm.mesh.step_axis
    reports = engine.comm.gather_objects((watch.earliest, before, _sums(engine, way)), together)
    return _describe(engine.comm, *(list(column) for column in zip(*reports, strict=True)))


def _describe(
    comm: Comm, first_seen: list[NonFinite | None], once: list[NonFinite | None], twice: list[NonFinite | None]
) -> str:
    """Describe in one line the findings of every rank: in its second run, and in the sums of the first and second
    run."""

    def first(of_ranks: list[NonFinite | None]) -> tuple[NonFinite, str] | None:
        origins = [(f.micro_batch, f.place, index) for index, f in enumerate(of_ranks) if f is not None]
        if not origins:
            return None
        index = min(origins)[2]
        rank = comm.ranks(comm.mesh.step_axis)[index]
        place = ", ".join(f"{axis} {i}" for axis, i in comm.mesh.coordinates(rank).items())
        others = {1: "", 2: ", and another rank has some"}.get(
            len(origins), f", and {len(origins) - 1} other ranks have some"
        )
        chosen = of_ranks[index]
        assert chosen is not None
        return chosen, f"rank {rank}{f' ({place})' if place else ''}{{}} ({chosen.elements}{others})"

    # A rank produced it.
    local = first(first_seen)
    if local is not None:
        f, position = local
        return f"{f.what} on {position.format(f' in micro-batch {f.micro_batch} is not finite')}"
    # The reduction produced it, in both runs.
    summed = first(twice)
    if summed is not None:
        f, position = summed
        return (
            f"every rank's own gradients are finite, but the reduced one of {f.what} is not on {position.format('')}"
            ": it is too large for its type, or communication is at fault"
        )
    # It happened in the first run only.
    transient = "this did not happen again when the step was repeated: a transient fault of hardware or communication"
    reduced = first(once)
    if reduced is not None:
        f, position = reduced
        return f"the reduced gradient of {f.what} was not finite on {position.format('')}; {transient}"
    return f"loss or gradient norm was not finite, but every gradient is: their norm overflows, or {transient}"
