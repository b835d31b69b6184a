"""Whether replicas still hold the same bits: checksums of all that must be equal, gathered once, compared by name.

    weights           stages 0, 1, 2: all data-parallel ranks hold them whole; experts, all of edp
    masters           of a type of their own, or at stage 3, where weights rest in them: equal on all that
                      hold the same shard
    module buffers    all data-parallel ranks
    a tied embedding    the first and the last rank of a pipeline
    what tp ranks hold copies of: weights, or where those are sharded the masters of the same pieces

A shard that nobody else holds (dp_replicate = 1, and of experts any) has nothing to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.runtime.comm.transport import Call
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.model.spec import holds_one_tied_copy
from phalanx.spec.strategy.split import Split

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**20  # elements: their int64 copies stay small beside the tensors
_MASTER = "the master of "
_NAMED, _RANKS = 3, 8  # how many tensors, and of each how many ranks, an error names


class ReplicasDiffer(RuntimeError):
    """Replicas hold different bits; the message names the tensors and the ranks."""


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements, their bits read as whole numbers, modulo 2^64: (), int64.

    Exact and the same in any order; a NaN is a number like any other. Changes that cancel in the sum go unseen.
    """
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(_AT_ONCE)]).sum()


def compare(engine: DataParallel, masters: Mapping[str, Tensor], split: Split | None = None) -> None:
    """Compare the replicas' state between two steps. `masters`: of what this rank updates, by parameter, as pieces at
    stages 1 to 3; `split`: what this rank holds of the model. Every rank takes part in one all-gather of a number per
    tensor, unrecorded.

    Raises ReplicasDiffer, on all of them alike.
    """
    comm = engine.comm
    found = [] if comm.world.size == 1 else _found(engine, masters, split)
    if comm.size("pp") > 1:
        found = sorted({what for told in comm.gather_objects(found, "pp") for what in told})
    if found:
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise ReplicasDiffer(f"replicas hold different bits in {', '.join(found[:_NAMED])}{more}")


def _found(engine: DataParallel, masters: Mapping[str, Tensor], split: Split | None) -> list[str]:
    """What differs among the ranks at one place of the pipeline, in words."""
    comm = engine.comm
    stage = comm.mesh.name("dp_replicate", "dp_shard", "cp", "tp")
    ranks = comm.ranks(stage)
    whole, shards = _held(engine, masters)
    names = [*whole, *shards]
    nothing = torch.zeros((), dtype=torch.int64, device=comm.world.device)
    sums = [nothing if t is None else checksum(t) for t in (*whole.values(), *shards.values())]
    own = torch.stack(sums)
    table = own.new_empty(len(ranks) * len(names))
    comm.start(Call("all_gather", ranks, ranks.index(comm.world.rank), own, table)).wait()
    table = table.view(len(ranks), len(names)).cpu()  # (ranks, tensors)
    found: list[str] = []

    def groups(axis: str) -> list[list[int]]:
        """Those among these ranks."""
        return [group for group in comm.mesh.groups(axis).tolist() if group[0] in ranks] if axis else []

    def rows(group: list[int]) -> list[int]:
        return [ranks.index(rank) for rank in group]

    apart = {p.fqn for b in engine.buckets if b.bucket.experts for p in b.bucket.parameters}
    axis, whole_ones = comm.mesh.gradient_axis, engine.zero == 0
    for experts, weights_on, shards_on in ((False, axis, "dp_replicate"), (True, "edp", "")):
        of = [i for i, name in enumerate(names) if (name.removeprefix(_MASTER) in apart) == experts]
        first = [i for i in of if i < len(whole)], [i for i in of if i >= len(whole)]
        for held_by, columns in zip((weights_on, weights_on if whole_ones else shards_on), first, strict=True):
            for group in groups(held_by) if columns else ():
                found += _differences(table[rows(group)][:, columns], [names[i] for i in columns], group)
    if split is not None and split.tp > 1:
        for group in groups("tp"):
            for i, name in enumerate(names):
                n = _copies(name, split)
                for first in range(0, split.tp, n) if n > 1 else ():
                    holders = group[first : first + n]
                    found += _differences(table[rows(holders), i : i + 1], [name], holders)
    if split is not None and holds_one_tied_copy(split.spec):
        ends = comm.ranks("embed")
        both = [
            t
            for name, t in (*whole.items(), *shards.items())
            if name.endswith("embed.token.weight") and t is not None
        ]
        told = comm.gather_objects([int(checksum(t)) for t in both], "embed")
        if told[0] != told[1]:
            found.append(f"embed.token.weight (rank {ends[0]} against rank {ends[1]}, where it is the head)")
    return list(dict.fromkeys(found))


def _held(
    engine: DataParallel, masters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """What all ranks hold whole, and what only replicas of a shard have in common, by name; the same names on every
    rank, None where there is nothing of it here, or nothing that was not named before."""
    if engine.zero < 3:
        engine.wait_parameters(list(engine.parameters))
    whole: dict[str, Tensor | None] = {}
    shards: dict[str, Tensor | None] = {}
    for name, weight in engine.parameters.items():
        master = masters.get(name)
        if engine.zero < 3:
            whole[name] = weight
        own = engine.zero == 3 or (master is not None and master.dtype != weight.dtype)
        shards[f"{_MASTER}{name}"] = master if own else None
    whole |= {f"buffer {name}": tensor for name, tensor in engine.module.named_buffers()}
    return whole, shards


def _copies(name: str, split: Split) -> int:
    """How many neighbouring tp ranks hold the same of what is called so."""
    return split.tp if name.startswith("buffer ") else split.held(name.removeprefix(_MASTER)).copies


def _differences(table: Tensor, names: Sequence[str], ranks: Sequence[int]) -> Iterator[str]:
    """The columns of a table (ranks, tensors) that are not constant, with who holds what: the fewest first."""
    for i in (table != table[0]).any(0).nonzero().flatten().tolist():
        holders: dict[int, list[int]] = {}
        for rank, value in zip(ranks, table[:, i].tolist(), strict=True):
            holders.setdefault(value, []).append(rank)
        yield f"{names[i]} ({' against '.join(map(_listed, sorted(holders.values(), key=len)))})"


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_RANKS]))}{more}"
