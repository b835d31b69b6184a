"""What tensor parallelism sends over the tp ranks: the all-reduces of each unit's passes, in order, and the one that
makes gradients whole of which ranks have parts.

    embed    F   its output
    blocks   F   what attention and MLP add to the residual stream: each, or their sum where both read one input
             B   the gradient of the input of the MLP, then of attention's; where the forward pass is repeated, before
                 them what it sends but the last, of which nobody needs the result
    head     F   each token's largest logit; its sum of exponentials and its target's logit
             B   the gradient of its input, which is normed

With sequence parallelism the residual stream is split by tokens, and what reads it all is brought together first. In
place of the all-reduces of the stream:

    embed    F   reduce-scatter of its output
             B   all-gather of that one's gradient
    blocks   F   all-gather of what attention and MLP read, reduce-scatter of what they add
             B   all-gather of the gradient of what they add; of what they read, and reduce-scatter of its gradient
    head     F   all-gather of its input, which is normed, before all else
             B   the same, and reduce-scatter of its gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.schedule.buckets import Bucket, layout
from phalanx.schedule.event import Phase
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.split import Split, partial
from phalanx.spec.strategy import Recompute, Strategy


@dataclass(frozen=True)
class Sent:
    """`count` collectives, one after the other, of `bytes` together; numbers or columns."""

    op: str
    dtype: DType
    bytes: Any
    count: Any = 1


def chunks(tokens: Any, tp: int) -> Any:
    """Into how many the tokens of a micro-batch fall, of which each is computed while another travels: two, if every
    rank's part of them is the same number of whole tokens. A number or a column."""
    return 1 + (tokens % (2 * tp) == 0)


def sent(
    spec: ModelSpec, job: Job, s: Strategy, unit: str, phase: Phase, tokens: Any, repeat: Recompute = "none"
) -> tuple[Sent, ...]:
    """The collectives of a pass of a unit class over `tokens` tokens, in order. `repeat`: what a block repeats."""
    compute = job.precision.compute
    size = tokens * spec.hidden * DTYPE_BYTES[compute]
    wide: DType = "float64" if compute == "float64" else "float32"
    scalars = tuple(Sent("all_reduce", wide, n * tokens * DTYPE_BYTES[wide]) for n in (1, 2))
    if not s.sp:
        stream = (Sent("all_reduce", compute, size),)
        if unit == "embed":
            return stream if phase == "F" else ()
        if unit == "head":
            return scalars if phase == "F" else stream
        forward, backward = stream * (2 if spec.residual == "serial" else 1), stream * 2
        return forward if phase == "F" else _again(forward, repeat) + backward
    parts = chunks(tokens, s.tp)
    gather, scatter = ((Sent(op, compute, size, parts),) for op in ("all_gather", "reduce_scatter"))
    if unit == "embed":
        return scatter if phase == "F" else gather
    if unit == "head":
        return gather + (scalars if phase == "F" else scatter)
    if spec.residual == "serial":
        forward, backward = (gather + scatter) * 2, (gather * 2 + scatter) * 2
    else:
        forward, backward = gather * 2 + scatter, gather + (gather + scatter) * 2
    return forward if phase == "F" else _again(forward, repeat) + backward


def _again(forward: tuple[Sent, ...], repeat: Recompute) -> tuple[Sent, ...]:
    """What is sent once more where the forward pass is repeated: all but what ends it, which nobody reads."""
    return forward[:-1] if repeat == "full" else ()


def summed_elements(split: Split, cut: Sequence[Bucket], s: Strategy) -> int:
    """Elements of the buffer in which ranks add up their parts of gradients (runtime/copies.py): as many as the shard
    needs that needs the most, on every rank."""
    boxes = partial(split)
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
