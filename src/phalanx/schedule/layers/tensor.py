"""Tensor parallelism: how many chunks tokens are cut into for overlap, and the buffer that sums partial gradients.
layers/collectives.py lists what each pass sends, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.schedule.gradients.buckets import Bucket, layout
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split, partial


def chunks(tokens: Any, tp: int) -> Any:
    """Return the number of chunks of a micro-batch's tokens, of which one is computed while another travels: 2 if
    every rank then has equally many tokens of each, else 1. A number or a column."""
    return 1 + (tokens % (2 * tp) == 0)


def summed_elements(split: Split, cut: Sequence[Bucket], s: Strategy) -> int:
    """Return the elements of the buffer in which tp ranks sum their partial gradients, equal on all ranks: the need
    of the shard with the most."""
    boxes = partial(split)
    parts = layout(s)[0]
    of_shard = [0] * parts
    for bucket in cut if boxes else ():
        if bucket.experts:
            continue
        size, begins = bucket.padded(s) // parts, 0
        for p in bucket.parameters:
            ends = begins + p.numel
            if p.fqn in boxes:
                for shard in range(begins // size, -(-ends // size)):
                    here = min(ends, (shard + 1) * size) - max(begins, shard * size)
                    of_shard[shard] += here * boxes[p.fqn]
            begins = ends
    return max(of_shard)
