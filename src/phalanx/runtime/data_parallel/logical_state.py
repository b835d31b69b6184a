"""The state of training under layout-free names, as checkpoints hold it: single-process names, global shapes.

    parameters.<fqn>              in the master type
    optimizer.<fqn>.<state>       exp_avg, exp_avg_sq, momentum_buffer, ...; step
    outer.<fqn>                   the outer optimizer's momentum, of replicas that take steps alone
    replica<r>.optimizer...       of the other replicas that take steps alone, whose optimizer state differs; a
                                  replica that the checkpoint does not know starts from the first one's
    outer_before.<fqn>            the outer optimizer's parameters, where replicas' own differ after the last step
                                  too (fragments); the others' are then replica<r>.parameters.<fqn>
    replica<r>.residual.<fqn>     of a replica's compressed changes; a replica that joins starts without
    buffers.<fqn>                 buffers that the model learns without gradients
    compression.<fqn>.kept        the residual of the gradient, summed over the ranks; split evenly on load
    compression.own.<layout>...   each rank's own residuals, of up to OWN_RANKS ranks: the same layout
                                  resumes from them bitwise
    compression.<fqn>.q<rank>     PowerSGD's factor; compression.draws: the number of reductions so far

A parameter split over tp, ep and etp has a box on each rank. Parts are views of live memory: a rank saves from there,
and loads into it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.runtime.checkpoint import store
from phalanx.runtime.checkpoint.boxes import TensorPart, full_part, share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.model.spec import is_head_copy
from phalanx.spec.strategy.split import ParameterBox, Split

OPTIONAL = "compression."
"""Prefix of tensors that checkpoints of other strategies may lack: residuals then start from zero."""
BEFORE = "outer_before"
"""Prefix of the outer optimizer's parameters, where replicas that take steps alone go on from others."""
REPLICA = "replica"
"""Prefix of the optimizer state of replicas that take steps alone, after the first."""
OWN_RANKS = 8
"""Maximum ranks of the data axis for which each rank's residuals are saved too: they are as large as the gradients on
every rank. With more ranks only the sum is saved."""


Outer = Mapping[str, Mapping[str, Tensor]]
"""State of the outer optimizer by prefix and parameter (outer.py)."""


class Boxes(Protocol):
    """Box of each logical parameter on a rank: the Split of a decoder, or the SplitNames of any module
    (runtime/any_module/split_names.py). `index`: the rank's coordinate along tp."""

    @property
    def index(self) -> int: ...

    @property
    def unsplit(self) -> bool: ...

    def boxes_of(self, fqn: str) -> tuple[ParameterBox, ...]: ...


def owned_parts(
    engine: DataParallel,
    masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    split: Boxes | None = None,
    outer: Outer = MappingProxyType({}),
) -> Iterator[TensorPart]:
    """Yield the parts that this rank saves; all ranks' parts together are the state, each element once. With the
    Split of a decoder its buffers are among them. All ranks together."""
    comm, grid = engine.comm, engine.comm.mesh
    replica = grid.place(comm.world.rank).get("dp_local", 0)

    def shared(parts: Iterable[TensorPart], axis: str) -> Iterator[TensorPart]:
        return share(parts, comm.index(axis), comm.size(axis))

    of_experts = {p.fqn for b in engine.buckets if b.bucket.experts for p in b.bucket.parameters}
    kinds = [(False, grid.gradient_axis, "dp_replicate"), (True, "edp", "")]
    for experts, whole_on, shards_on in kinds:
        of = {name: master for name, master in masters.items() if (name in of_experts) == experts}
        # The holder of a parameter's first element writes its scalar states (step). Tensors on several tp ranks, the
        # first of them writes.
        mine = [
            p for first, p in _parts_of_rank(engine, of, optimizer, split, outer, copies=False) if first or p.shape
        ]
        if replica:
            mine = _replica_parts(replica, mine, BEFORE in outer)
        yield from shared(mine, shards_on if engine.sharding.state else whole_on)
    if replica:
        return
    yield from shared(_compression(engine), grid.gradient_axis)
    yield from _own_residuals(engine)
    if isinstance(split, Split):
        alike = (full_part(name, t) for name, t in buffers(engine.module).items())
        yield from shared(alike, grid.name("dp_replicate", "dp_shard", "cp", "tp"))


def _replica_parts(replica: int, parts: Iterable[TensorPart], apart: bool) -> list[TensorPart]:
    """Return the parts of the optimizer's state, with `apart` also of parameters, that a replica which takes steps
    alone saves, under its own names."""
    kinds = ("optimizer.", "parameters.", REPLICA) if apart else ("optimizer.", REPLICA)
    own = (part for part in parts if part.name.startswith(kinds))
    return [
        part if part.name.startswith(REPLICA) else replace(part, name=f"{REPLICA}{replica}.{part.name}")
        for part in own
    ]


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a model learns without gradients, the same on all ranks: the buffers in its
    state_dict."""
    persistent = module.state_dict().keys()
    return {f"buffers.{name}": t for name, t in module.named_buffers() if name in persistent}


def _parts_of_rank(
    engine: DataParallel,
    masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    split: Boxes | None,
    outer: Outer,
    copies: bool = True,
) -> Iterator[tuple[bool, TensorPart]]:
    """Yield (whether it begins with its parameter's first element, part) of this rank's masters and their optimizer
    states. Without `copies`, parts that an earlier rank of tp or of the pipeline holds too are left out."""
    pieces = {piece.parameter.fqn: piece for piece, _, _ in engine.pieces()} if engine.sharding.state else {}
    for name, master in masters.items():
        if not copies and isinstance(split, Split) and is_head_copy(split.spec, name):
            continue
        shape, start, within = tuple(master.shape), 0, None
        if name in pieces:
            shape, start = pieces[name].parameter.shape, pieces[name].start
        boxes = () if split is None or split.unsplit else split.boxes_of(name)
        at = 0  # of a box in the rank's flat tensor, which has them one after the other
        for number, box in enumerate(boxes or (None,)):
            low, high = start, start + master.numel()
            if box is not None:
                # Beyond its last box is padding of the vocabulary.
                shape, within = box.parameter.shape, (box.offsets, box.sizes)
                low, high = max(start - at, 0), min(high - at, box.numel)
            if box is None or split is None or copies or not split.index % box.copies:
                first = low == 0 and not any(within[0] if within else ())
                for label, t in _tensors(name, master, optimizer, outer):
                    if t.dim() and low < high:
                        data = t.detach().view(-1)[at + low - start : at + high - start]
                        yield first, TensorPart(label, shape, low, data, within)
                    elif not t.dim() and not number:
                        yield first, full_part(label, t)
            at += box.numel if box is not None else 0


def _tensors(
    name: str, master: Tensor, optimizer: torch.optim.Optimizer, outer: Outer
) -> Iterator[tuple[str, Tensor]]:
    yield f"parameters.{name}", master
    for prefix, tensors in outer.items():
        if name in tensors:
            yield f"{prefix}.{name}", tensors[name]
    for key, value in optimizer.state[master].items():
        if not isinstance(value, Tensor):
            kind = f"{type(optimizer).__name__}'s state {key!r}"
            raise TypeError(f"{kind} is of type {type(value).__name__}: a checkpoint holds tensors")
        yield f"optimizer.{name}.{key}", value


@torch.no_grad()
def gradients(engine: DataParallel, split: Split) -> dict[str, Tensor]:
    """Gather every parameter's gradient, unsharded, by name; all ranks together. Of several ranks' copies, the one
    farthest from the first rank's is returned, so that parity checks the worst."""
    result = _over_layers(engine, split)
    for other in engine.comm.gather_objects(result, "pp"):
        for name, gradient in other.items():
            if name not in result or not torch.equal(result[name], gradient):  # a tied embedding has two
                result[name] = gradient
    return result


def _over_layers(engine: DataParallel, split: Split) -> dict[str, Tensor]:
    """Gather the gradients of this pipeline stage over tp, and over the ranks that hold its experts."""
    if split.unsplit:
        return dict(engine.gradients())
    own, result = dict(engine.gradients()), {}
    for axis, seen_at in (("ep+etp", split.at_experts), ("tp", split.at)):
        names = [name for name in own if split.box(name).parameter.of_experts == (axis != "tp")]
        splits = [seen_at(index) for index in range(len(engine.comm.ranks(axis)))]
        for name, parts in zip(names, _everywhere(engine.comm, axis, [own[name] for name in names]), strict=True):
            shape = split.box(name).parameter.shape
            first, farthest = own[name].new_zeros(shape), own[name].new_zeros(shape)
            for index, (part, seen) in enumerate(zip(parts, splits, strict=True)):
                box = seen.box(name)
                place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                part = part[tuple(slice(n) for n in box.sizes)]
                if index % box.copies == 0:
                    first[place], farthest[place] = part, part
                elif (part - first[place]).norm() > (farthest[place] - first[place]).norm():
                    farthest[place] = part
            result[name] = farthest
    return result


def _everywhere(comm: Comm, axis: str, mine: list[Tensor]) -> list[Tensor]:
    """Gather each tensor from all ranks of an axis, in one message: (ranks, *shape) each."""
    ranks = comm.ranks(axis)
    if not mine:
        return []
    flat = torch.cat([t.reshape(-1) for t in mine])
    parts = flat.new_empty(len(ranks), flat.numel())
    comm.start(Call("all_gather", ranks, comm.index(axis), flat, parts.view(-1))).wait()
    pieces = parts.split([t.numel() for t in mine], dim=1)
    return [piece.reshape(len(ranks), *t.shape) for piece, t in zip(pieces, mine, strict=True)]


@torch.no_grad()
def residuals(engine: DataParallel) -> dict[str, Tensor]:
    """Return the compression residual of each parameter's gradient, summed over the ranks; all ranks together."""
    c, comm = engine.compressor, engine.comm
    result: dict[str, Tensor] = {}
    if c is None:
        return result
    for b in engine.buckets:
        kept = c.residual(b)
        if kept is not None:
            ranks = comm.ranks(comm.mesh.gradient_axis)
            comm.start(Call("all_reduce", ranks, ranks.index(comm.world.rank), kept, kept)).wait()
            result |= b.views(kept)
    return result


def _compression(engine: DataParallel) -> Iterator[TensorPart]:
    """Yield the compressor's state, the same on all ranks of the data axis; all ranks together."""
    c = engine.compressor
    if c is None:
        return
    yield full_part(f"{OPTIONAL}draws", torch.tensor(c.draws))
    for name, kept in residuals(engine).items():
        yield full_part(f"{OPTIONAL}{name}.kept", kept)
    for b in engine.buckets:
        for name, q in c.factors(b).items():
            yield full_part(f"{OPTIONAL}{name}.q{q.shape[1]}", q)


def _own_residuals(engine: DataParallel) -> list[TensorPart]:
    """Return this rank's residuals, preceded by a marker tensor with value 1. Empty without error feedback, or over
    more than OWN_RANKS ranks."""
    c, comm = engine.compressor, engine.comm
    kept = [] if c is None else [(b.name, i, t) for b in engine.buckets for i, t in enumerate(c.kept(b))]
    if not kept or comm.size(comm.mesh.gradient_axis) > OWN_RANKS:
        return []
    layout = hashlib.sha256(f"{engine.strategy} {comm.world.size}".encode()).hexdigest()[:16]
    mine = f"{OPTIONAL}own.{layout}.rank{comm.world.rank}"
    mark = full_part(mine, torch.ones(1, dtype=torch.int64))
    return [mark, *(full_part(f"{mine}.{name}.{i}", t) for name, i, t in kept)]


@torch.no_grad()
def load(
    engine: DataParallel,
    masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    folder: Path,
    step: int,
    rest: Iterable[TensorPart] = (),
    split: Boxes | None = None,
    outer: Outer = MappingProxyType({}),
) -> None:
    """Load a checkpoint, and the parts of `rest` with it; all ranks together. With zero=0 the caller casts weights
    of another type than the masters. Raises CheckpointError."""
    # An all-gather of the initial weights may be in flight, in the memory that is read into.
    engine.wait_parameters(list(engine.parameters))
    parts = [part for _, part in _parts_of_rank(engine, masters, optimizer, split, outer)]
    if replica := engine.comm.mesh.place(engine.comm.world.rank).get("dp_local", 0):
        parts += _replica_parts(
            replica, parts, BEFORE in outer
        )  # read after the first one's, if the checkpoint has it
    parts += rest
    c = engine.compressor
    if c is None:
        store.load(folder, step, parts, REPLICA)
        engine.updated()
        return
    draws = torch.tensor(c.draws)
    parts.append(full_part(f"{OPTIONAL}draws", draws))
    # A checkpoint without compression has no residuals: start from zero.
    restored = {b.name: torch.zeros_like(k) for b in engine.buckets if (k := c.residual(b)) is not None}
    for b in engine.buckets:
        if b.name in restored:
            parts += [full_part(f"{OPTIONAL}{name}.kept", view) for name, view in b.views(restored[b.name]).items()]
        parts += [full_part(f"{OPTIONAL}{name}.q{q.shape[1]}", q) for name, q in c.factors(b).items()]
    own = _own_residuals(engine)
    for part in own[:1]:
        part.data.zero_()
    store.load(folder, step, [*parts, *own], OPTIONAL)
    c.draws = int(draws)
    resumes = bool(own) and bool(own[0].data.all())  # this layout's own residuals are in place
    for b in engine.buckets:
        if b.name in restored and not resumes:
            c.set_residual(b, restored[b.name].div_(engine.comm.size(engine.comm.mesh.gradient_axis)))
    engine.updated()
