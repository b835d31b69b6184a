"""What tensor parallelism sends over the tp ranks: the all-reduces of each unit's passes, in order, and the one that
makes gradients whole of which ranks have parts.

    embed    F   its output
    blocks   F   what attention and MLP add to the residual stream: each, or their sum where both read one input
             B   the gradient of the input of the MLP, then of attention's; where the forward pass is repeated, before
                 them its all-reduces but the last, of which nobody needs the result
    head     F   each token's largest logit; its sum of exponentials and its target's logit
             B   the gradient of its input, which is normed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.schedule.buckets import Bucket, layout
from phalanx.schedule.event import Phase
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.split import Split, partial
from phalanx.spec.strategy import Recompute, Strategy


def sent(
    spec: ModelSpec, job: Job, unit: str, phase: Phase, tokens: Any, repeat: Recompute = "none"
) -> tuple[tuple[DType, Any], ...]:
    """(Type, bytes) of the all-reduces of a pass of a unit class over `tokens` tokens, a number or a column.
    `repeat`: what a block repeats."""
    compute = job.precision.compute
    stream = (compute, tokens * spec.hidden * DTYPE_BYTES[compute])
    if unit == "embed":
        return (stream,) if phase == "F" else ()
    if unit == "blocks":
        forward = (stream,) * (2 if spec.residual == "serial" else 1)
        again = forward[:-1] if repeat == "full" else ()
        return forward if phase == "F" else (*again, stream, stream)
    if phase == "B":
        return (stream,)
    wide: DType = "float64" if compute == "float64" else "float32"
    return (wide, tokens * DTYPE_BYTES[wide]), (wide, 2 * tokens * DTYPE_BYTES[wide])


def summed_elements(split: Split, cut: Sequence[Bucket], s: Strategy) -> int:
    """Elements of the buffer in which ranks add up their parts of gradients (runtime/copies.py): as many as the shard
    needs that needs the most, on every rank."""
    boxes = partial(split.spec, split.tp)
    parts = layout(s)[0]
    of_shard = [0] * parts
    for bucket in cut if boxes else ():
        size, begins = bucket.padded(s) // parts, 0
        for p in bucket.parameters:
            ends = begins + p.numel
            if p.fqn in boxes:
                for shard in range(begins // size, -(-ends // size)):
                    here = min(ends, (shard + 1) * size) - max(begins, shard * size)
                    of_shard[shard] += here * boxes[p.fqn]
            begins = ends
    return max(of_shard)
