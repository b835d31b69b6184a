"""The state of training by layout-free names, as checkpoints hold it: single-process names, global shapes. Of what
ranks split over tp, ep and etp, each knows a box.

parameters.<fqn>              in the master type
optimizer.<fqn>.<state>       exp_avg, exp_avg_sq, momentum_buffer, ...; step
buffers.<fqn>                 what a model learns without gradients
compression.<fqn>.kept        what was kept back of the gradient, summed over the ranks; split evenly on load
compression.<fqn>.q<rank>     PowerSGD's factor; compression.draws: how many reductions have drawn

Parts are views of live memory: what a rank saves it reads there, what it loads is written there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.runtime.checkpoint import store
from phalanx.runtime.checkpoint.boxes import Part, share, whole
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.model.spec import is_head_copy
from phalanx.spec.strategy.split import Split

OPTIONAL = "compression."
"""A checkpoint of another strategy lacks these: training then begins with nothing kept back."""


def owned(
    engine: DataParallel, masters: dict[str, Tensor], optimizer: torch.optim.Optimizer, split: Split | None = None
) -> Iterator[Part]:
    """What this rank saves: the shares of all ranks make everything, once. All ranks together."""
    comm, grid = engine.comm, engine.comm.mesh

    def shared(parts: Iterable[Part], axis: str) -> Iterator[Part]:
        return share(parts, comm.index(axis), comm.size(axis))

    apart = {p.fqn for b in engine.buckets if b.bucket.experts for p in b.bucket.parameters}
    kinds = [(False, grid.gradient_axis, "dp_replicate"), (True, "edp", "")]
    for experts, whole_on, shards_on in kinds:
        of = {name: master for name, master in masters.items() if (name in apart) == experts}
        # A counter is its parameter's as a whole: whoever holds the first element writes it. Of what several tp ranks
        # hold, the first of them writes all.
        mine = (p for first, p in _held(engine, of, optimizer, split, copies=False) if first or p.shape)
        yield from shared(mine, whole_on if engine.zero == 0 else shards_on)
    yield from shared(_compression(engine), grid.gradient_axis)
    if split is not None:
        alike = (whole(name, t) for name, t in buffers(engine.module).items())
        yield from shared(alike, grid.name("dp_replicate", "dp_shard", "cp", "tp"))


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """What a model learns without gradients, and all ranks alike: those of its buffers that its state_dict has."""
    kept = module.state_dict().keys()
    return {f"buffers.{name}": t for name, t in module.named_buffers() if name in kept}


def _held(
    engine: DataParallel,
    masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    split: Split | None,
    copies: bool = True,
) -> Iterator[tuple[bool, Part]]:
    """(Whether it is its parameter's first element and more, part) of this rank's masters and their optimizer states.
    Without `copies` what a rank of tp or of the pipeline before this one holds too is left out."""
    pieces = {piece.parameter.fqn: piece for piece, _, _ in engine.pieces()} if engine.zero else {}
    for name, master in masters.items():
        if not copies and split is not None and is_head_copy(split.spec, name):
            continue
        shape, start, within = tuple(master.shape), 0, None
        if name in pieces:
            shape, start = pieces[name].parameter.shape, pieces[name].start
        inside = master.numel()
        if split is not None and not split.whole:
            held = split.held(name)
            if not copies and split.index % held.copies:
                continue
            shape, within = held.parameter.shape, (held.offsets, held.sizes)
            inside = max(0, min(inside, held.numel - start))  # the rest are rows of no token
        first = start == 0 and not any(within[0] if within else ())
        for label, t in _tensors(name, master, optimizer):
            if not t.dim():
                yield first, whole(label, t)
            elif inside:
                yield first, Part(label, shape, start, t.detach().view(-1)[:inside], within)


def _tensors(name: str, master: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield f"parameters.{name}", master
    for key, value in optimizer.state[master].items():
        if not isinstance(value, Tensor):
            kind = f"{type(optimizer).__name__}'s state {key!r}"
            raise TypeError(f"{kind} is of type {type(value).__name__}: a checkpoint holds tensors")
        yield f"optimizer.{name}.{key}", value


@torch.no_grad()
def gradients(engine: DataParallel, split: Split) -> dict[str, Tensor]:
    """Every parameter's gradient, whole. Of what several ranks hold, that one which is farthest from the first's. All
    ranks together."""
    found = _over_layers(engine, split)
    for other in engine.comm.gather_objects(found, "pp"):
        for name, gradient in other.items():
            if name not in found or not torch.equal(found[name], gradient):  # of a tied embedding there are two
                found[name] = gradient
    return found


def _over_layers(engine: DataParallel, split: Split) -> dict[str, Tensor]:
    """The same on a pipeline rank: of what is split over tp, and over the ranks that hold all experts."""
    if split.whole:
        return dict(engine.gradients())
    own, found = dict(engine.gradients()), {}
    for axis, seen_at in (("ep+etp", split.at_experts), ("tp", split.at)):
        names = [name for name in own if split.held(name).parameter.of_experts == (axis != "tp")]
        for name, parts in zip(names, _everywhere(engine.comm, axis, [own[name] for name in names]), strict=True):
            shape = split.held(name).parameter.shape
            first, farthest = own[name].new_zeros(shape), own[name].new_zeros(shape)
            for index, part in enumerate(parts):
                held = seen_at(index).held(name)
                place = tuple(slice(o, o + n) for o, n in zip(held.offsets, held.sizes, strict=True))
                part = part[tuple(slice(n) for n in held.sizes)]
                if index % held.copies == 0:
                    first[place], farthest[place] = part, part
                elif (part - first[place]).norm() > (farthest[place] - first[place]).norm():
                    farthest[place] = part
            found[name] = farthest
    return found


def _everywhere(comm: Comm, axis: str, mine: list[Tensor]) -> list[Tensor]:
    """Of each tensor those of all ranks of an axis, in their order: one more dimension, in front. One message, for
    there are many small ones."""
    ranks = comm.ranks(axis)
    if not mine:
        return []
    flat = torch.cat([t.reshape(-1) for t in mine])
    parts = flat.new_empty(len(ranks), flat.numel())
    comm.start(Call("all_gather", ranks, comm.index(axis), flat, parts.view(-1))).wait()
    pieces = parts.split([t.numel() for t in mine], dim=1)
    return [piece.reshape(len(ranks), *t.shape) for piece, t in zip(pieces, mine, strict=True)]


@torch.no_grad()
def kept_back(engine: DataParallel) -> dict[str, Tensor]:
    """What compression has kept back of each parameter's gradient, summed over the ranks. All ranks together."""
    c, comm, found = engine.compressor, engine.comm, {}
    for b in engine.buckets if c is not None else ():
        kept = c.kept_back(b)
        if kept is not None:
            ranks = comm.ranks(comm.mesh.gradient_axis)
            comm.start(Call("all_reduce", ranks, ranks.index(comm.world.rank), kept, kept)).wait()
            found |= b.views(kept)
    return found


def _compression(engine: DataParallel) -> Iterator[Part]:
    """The compressor's state, which all ranks of the data axis hold alike."""
    c = engine.compressor
    if c is None:
        return
    yield whole(f"{OPTIONAL}draws", torch.tensor(c.draws))
    for name, kept in kept_back(engine).items():
        yield whole(f"{OPTIONAL}{name}.kept", kept)
    for b in engine.buckets:
        for name, q in c.factors(b).items():
            yield whole(f"{OPTIONAL}{name}.q{q.shape[1]}", q)


@torch.no_grad()
def load(
    engine: DataParallel,
    masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    folder: Path,
    step: int,
    rest: dict[str, Tensor] | None = None,
    split: Split | None = None,
) -> None:
    """Go on from a checkpoint, and from what `rest` names in it; at stage 0 weights of another type than the masters
    are the caller's to cast. All ranks together. Raises CheckpointError."""
    # The first weights may still be on their way round: they would meet those that are read, in the same memory.
    engine.wait_parameters(list(engine.parameters))
    parts = [part for _, part in _held(engine, masters, optimizer, split)]
    parts += [whole(name, tensor) for name, tensor in (rest or {}).items()]
    c = engine.compressor
    if c is None:
        store.load(folder, step, parts)
        engine.updated()
        return
    draws = torch.tensor(c.draws)
    parts.append(whole(f"{OPTIONAL}draws", draws))
    # A checkpoint without compression has kept nothing back.
    kept = {b.name: torch.zeros_like(k) for b in engine.buckets if (k := c.kept_back(b)) is not None}
    for b in engine.buckets:
        if b.name in kept:
            parts += [whole(f"{OPTIONAL}{name}.kept", view) for name, view in b.views(kept[b.name]).items()]
        parts += [whole(f"{OPTIONAL}{name}.q{q.shape[1]}", q) for name, q in c.factors(b).items()]
    store.load(folder, step, parts, OPTIONAL)
    c.draws = int(draws)
    for b in engine.buckets:
        if b.name in kept:
            c.put_back(b, kept[b.name].div_(engine.comm.size(engine.comm.mesh.gradient_axis)))
    engine.updated()
