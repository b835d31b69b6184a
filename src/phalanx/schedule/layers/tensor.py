"""Tensor parallelism: how many chunks tokens are cut into for overlap, and the buffer that sums partial gradients.
What each pass sends, and in which order, stands in layers/collectives.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.schedule.gradients.buckets import Bucket, layout
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split, partial


def chunks(tokens: Any, tp: int) -> Any:
    """Return into how many chunks the tokens of a micro-batch are cut, so that one is computed while another travels:
    2 if that leaves every rank equally many tokens of each, else 1. A number or a column."""
    return 1 + (tokens % (2 * tp) == 0)


def summed_elements(split: Split, cut: Sequence[Bucket], s: Strategy) -> int:
    """Return the elements of the buffer in which tp ranks sum their partial gradients: on every rank as many as the
    shard with the most partial gradients needs."""
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
