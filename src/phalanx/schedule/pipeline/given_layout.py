"""Blocks of each chunk as prescribed by a strategy or its stack's options, in forward order.

    layers=7/8/8/7                      as written
    first_stage_layers, last_stage_...  these on the first and last rank, the others share the rest equally
    embedding_as_layer, loss_as_layer   L + e + l layers in equal chunks; embedding and head count as one each

(Megatron-Core 0.19, megatron/core/transformer/transformer_config.py:1988-2110.)
"""

import numpy as np

from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

Blocks = tuple[int, ...]
"""The blocks of each chunk of a pipeline, in forward order."""


def write_layers(blocks: Blocks) -> str:
    """Write the blocks of each chunk as `layers` does: 7/8/8/7."""
    return "/".join(map(str, blocks))


def equal_blocks(layers: int, chunks: int) -> Blocks:
    """Return an even division of blocks into chunks, earlier chunks getting the remainder; if two chunks must be
    empty, they are the ends, which have the embedding and the head."""
    if layers == chunks - 2:
        return (0, *(1,) * layers, 0)
    return tuple(len(part) for part in np.array_split(np.arange(layers), chunks))


def given_blocks(s: Strategy, options: StackOptions, layers: int) -> Blocks | None:
    """Return the blocks of each of pp x virtual chunks; None if nothing prescribes them or there is no pipeline.
    Raises InputError for parts that do not add up."""
    if s.pp == 1:
        return None
    if s.layers != "auto":
        return tuple(int(n) for n in s.layers.split("/"))
    o, chunks = options, len(rank_of(s))
    if o.first_stage_layers or o.last_stage_layers:
        return _short_ends(s, o, layers)
    if not (o.embedding_as_layer or o.loss_as_layer):
        return None
    total = layers + o.embedding_as_layer + o.loss_as_layer
    blocks = [*equal_blocks(total, chunks)]
    blocks[0] -= o.embedding_as_layer
    blocks[-1] -= o.loss_as_layer
    if min(blocks[0], blocks[-1]) < 0 or 0 in blocks[1:-1]:
        name = "embedding_as_layer" if o.embedding_as_layer else "loss_as_layer"
        reason = f"{total} layers leave some of {chunks} chunks without a block"
        raise InputError(f"options.{name}", 1, reason, "use fewer chunks")
    return tuple(blocks)


def _short_ends(s: Strategy, o: StackOptions, layers: int) -> Blocks:
    """Return the blocks of each chunk, given the first or last rank's."""
    ends = {0: o.first_stage_layers, s.pp - 1: o.last_stage_layers}
    fixed = {rank: count for rank, count in ends.items() if count}
    rest, others = layers - sum(fixed.values()), s.pp - len(fixed)
    if rest < 0 or (others == 0 and rest) or (others and rest == 0):
        name = "first_stage_layers" if o.first_stage_layers else "last_stage_layers"
        reason = f"leaves {rest} of {layers} blocks for {others} other ranks"
        raise InputError(f"options.{name}", sum(fixed.values()), reason, "use other numbers")
    shares = iter(equal_blocks(rest, others) if others else ())
    of_rank = [fixed[rank] if rank in fixed else next(shares) for rank in range(s.pp)]
    ranks = rank_of(s)
    each = len(ranks) // s.pp
    split = [iter(equal_blocks(n, each)) for n in of_rank]
    blocks = tuple(next(split[rank]) for rank in ranks)
    if 0 in blocks[1:-1]:
        name = "first_stage_layers" if o.first_stage_layers else "last_stage_layers"
        reason = f"leaves some of {len(ranks)} chunks without a block"
        raise InputError(f"options.{name}", sum(fixed.values()), reason, "use fewer chunks")
    return blocks


def ends_of(s: Strategy, options: StackOptions, layers: int, cut: Blocks | None = None) -> tuple[int, int, int, int]:
    """Return (the numbers of blocks of the first, the fullest and the last pipeline rank; the first fullest rank): as
    prescribed, or else from `cut`, the blocks of each chunk. All are -1 without either, and if the prescribed parts
    do not add up."""
    try:
        blocks = given_blocks(s, options, layers) or cut
    except InputError:
        return -1, -1, -1, -1
    if blocks is None:
        return -1, -1, -1, -1
    ranks = blocks_of_ranks(blocks, s)
    return ranks[0], max(ranks), ranks[-1], ranks.index(max(ranks))


def blocks_of_ranks(blocks: Blocks, s: Strategy) -> tuple[int, ...]:
    """Sum the blocks of each chunk into the blocks of each pipeline rank."""
    return tuple(np.bincount(rank_of(s), weights=blocks, minlength=s.pp).astype(int).tolist())
