"""Check that replicas hold the same bits: checksums of all tensors that must be equal, gathered once, compared by
name.

    what                                             must be equal on
    weights, zero 0, 1, 2                            all data-parallel ranks; experts: all ranks of edp
    masters, if not the weights themselves           all ranks with the same shard
    module buffers                                   all data-parallel ranks
    a tied embedding                                 the first and the last rank of a pipeline
    parameters that tp ranks share                   these ranks: weights, or where sharded the masters

A shard that one rank alone holds (dp_replicate = 1; any shard of experts) cannot be compared.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.runtime.comm.transport import Call
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.model.spec import holds_one_tied_copy
from phalanx.spec.strategy.split import Split

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLICE_ELEMENTS = 2**20  # elements: their int64 copies stay small compared with the tensors
_MASTER = "the master of "
_NAMED, _RANKS = 3, 8  # tensors, and ranks of each, that an error names


class ReplicasDiffer(RuntimeError):
    """Replicas hold different bits; the message names the tensors and the ranks."""


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, their bits read as integers, modulo 2^64: (), int64. Exact and
    independent of order; a NaN counts like any number. Changes that cancel in the sum go unseen."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(_SLICE_ELEMENTS)]).sum()


def compare(engine: DataParallel, masters: Mapping[str, Tensor], split: Split | None = None) -> None:
    """Compare the replicas' state between two steps; all ranks together, in one unrecorded all-gather of a number per
    tensor. `masters`: the tensors that this rank updates, by parameter, as pieces with zero >= 1; `split`: its part
    of the model. Raises ReplicasDiffer, on all ranks of a pipeline alike."""
    comm = engine.comm
    unequal = [] if comm.world.size == 1 else _unequal(engine, masters, split)
    if comm.size("pp") > 1:
        unequal = sorted({what for stage in comm.gather_objects(unequal, "pp") for what in stage})
    if unequal:
        more = f", and {len(unequal) - _NAMED} more" if len(unequal) > _NAMED else ""
        raise ReplicasDiffer(f"replicas hold different bits in {', '.join(unequal[:_NAMED])}{more}")


def _unequal(engine: DataParallel, masters: Mapping[str, Tensor], split: Split | None) -> list[str]:
    """Describe the tensors that differ among the ranks of one pipeline stage."""
    comm = engine.comm
    stage = comm.mesh.name("dp_replicate", "dp_shard", "cp", "tp")
    ranks = comm.ranks(stage)
    unsharded, shards = _tensors_by_sharding(engine, masters)
    names = [*unsharded, *shards]
    absent = torch.zeros((), dtype=torch.int64, device=comm.world.device)
    # One checksum per tensor, gathered over the ranks of this stage.
    sums = [absent if t is None else checksum(t) for t in (*unsharded.values(), *shards.values())]
    own = torch.stack(sums)
    table = own.new_empty(len(ranks) * len(names))
    comm.start(Call("all_gather", ranks, ranks.index(comm.world.rank), own, table)).wait()
    table = table.view(len(ranks), len(names)).cpu()  # (ranks, tensors)
    unequal: list[str] = []

    def groups(axis: str) -> list[list[int]]:
        """The groups of an axis inside this stage."""
        return [group for group in comm.mesh.groups(axis).tolist() if group[0] in ranks] if axis else []

    def rows(group: list[int]) -> list[int]:
        return [ranks.index(rank) for rank in group]

    # Data-parallel replicas of weights, and of shards.
    of_experts = {p.fqn for b in engine.buckets if b.bucket.experts for p in b.bucket.parameters}
    axis, replicated = comm.mesh.gradient_axis, not engine.sharding.state
    for experts, weights_on, shards_on in ((False, axis, "dp_replicate"), (True, "edp", "")):
        of = [i for i, name in enumerate(names) if (name.removeprefix(_MASTER) in of_experts) == experts]
        both = [i for i in of if i < len(unsharded)], [i for i in of if i >= len(unsharded)]
        for held_by, columns in zip((weights_on, weights_on if replicated else shards_on), both, strict=True):
            for group in groups(held_by) if columns else ():
                unequal += _differences(table[rows(group)][:, columns], [names[i] for i in columns], group)
    # Copies over tp.
    if split is not None and split.tp > 1:
        for group in groups("tp"):
            for i, name in enumerate(names):
                n = _copies(name, split)
                for first in range(0, split.tp, n) if n > 1 else ():
                    holders = group[first : first + n]
                    unequal += _differences(table[rows(holders), i : i + 1], [name], holders)
    # The two copies of a tied embedding.
    if split is not None and holds_one_tied_copy(split.spec):
        ends = comm.ranks("embed")
        tied = [
            t
            for name, t in (*unsharded.items(), *shards.items())
            if name.endswith("embed.token.weight") and t is not None
        ]
        sums_at = comm.gather_objects([int(checksum(t)) for t in tied], "embed")
        if sums_at[0] != sums_at[1]:
            unequal.append(f"embed.token.weight (rank {ends[0]} against rank {ends[1]}, where it is the head)")
    return list(dict.fromkeys(unequal))


def _tensors_by_sharding(
    engine: DataParallel, masters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return (unsharded tensors, shards) by name: the first must agree on all replicas, the second on replicas of the
    same shard. All ranks have the same names; None marks a tensor that a rank does not hold, or a master that is the
    weight itself."""
    if not engine.sharding.parameters:
        engine.wait_parameters(list(engine.parameters))
    unsharded: dict[str, Tensor | None] = {}
    shards: dict[str, Tensor | None] = {}
    for name, weight in engine.parameters.items():
        master = masters.get(name)
        if not engine.sharding.parameters:
            unsharded[name] = weight
        own = engine.sharding.parameters or (master is not None and master.dtype != weight.dtype)
        shards[f"{_MASTER}{name}"] = master if own else None
    unsharded |= {f"buffer {name}": tensor for name, tensor in engine.module.named_buffers()}
    return unsharded, shards


def _copies(name: str, split: Split) -> int:
    """Return the number of neighbouring tp ranks that hold the same tensor of this name."""
    return split.tp if name.startswith("buffer ") else split.box(name.removeprefix(_MASTER)).copies


def _differences(table: Tensor, names: Sequence[str], ranks: Sequence[int]) -> Iterator[str]:
    """Describe the columns of a table (ranks, tensors) that are not constant, with the ranks that agree, fewest
    first."""
    for i in (table != table[0]).any(0).nonzero().flatten().tolist():
        holders: dict[int, list[int]] = {}
        for rank, value in zip(ranks, table[:, i].tolist(), strict=True):
            holders.setdefault(value, []).append(rank)
        yield f"{names[i]} ({' against '.join(map(_name_ranks, sorted(holders.values(), key=len)))})"


def _name_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_RANKS]))}{more}"
