"""Over tensor-parallel ranks: into how many chunks tokens fall, and the buffer in which parts of gradients are added
up. What is sent in the passes of units, in which order: inside_layers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.schedule.gradients.buckets import Bucket, layout
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split, partial


def chunks(tokens: Any, tp: int) -> Any:
    """Into how many the tokens of a micro-batch fall, of which each is computed while another travels: two, if every
    rank's part of them is the same number of whole tokens. A number or a column."""
    return 1 + (tokens % (2 * tp) == 0)


def summed_elements(split: Split, cut: Sequence[Bucket], s: Strategy) -> int:
    """Elements of the buffer in which ranks add up their parts of gradients (runtime/copies.py): as many as the shard
    needs that needs the most, on every rank."""
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
