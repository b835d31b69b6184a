"""Messages of layers within a pass, in order: over tensor-parallel ranks, and over the ranks that share experts.
`CoreRuns` marks where the attention core runs, which itself sends over the ranks that share sequences
(layers/context.py).

    embed    F   its output
    blocks   F   core; what attention and MLP add to the residual stream: each, or their sum if both read one input
             B   the gradient of the MLP's input; core; the gradient of attention's input
    head     F   each token's largest logit; its sum of exponentials and its target's logit
             B   the gradient of its (normed) input

Each is an all-reduce. With sequence parallelism the residual stream is split by tokens, and layers that read all of
it gather it first. In place of the all-reduces of the stream:

    embed    F   reduce-scatter of its output
             B   all-gather of the gradient of its output
    blocks   F   all-gather of what attention and MLP read, reduce-scatter of what they add
             B   all-gather of the gradient of what they add; of what they read, and reduce-scatter of its gradient
    head     F   all-gather of its (normed) input, before all else
             B   the same, and reduce-scatter of its gradient

Where blocks gather in 8 bits (job.precision.gather = "float8"), ranks first reduce the largest magnitude of what they
gather to its maximum, from which each finds the same scale; what is gathered once more needs no new one.

If the head goes through its tokens in slices (layers/head.py), the two all-reduces of the loss run slice by slice,
and B does not gather its input again, as both products are done.

If a block has experts instead of an MLP, over the ranks that share them (runtime/model_parallel/expert.py):

    blocks   F   all-to-all of counts, of rows to their experts, and of results back; before these, if a choice
                 depends on the sequence's other tokens, all-gather of choices over the ranks that hold those tokens
             B   all-to-all of the results' gradients, and of the rows' gradients back

The output of experts is complete for every rank's tokens: with sequence parallelism each rank has its own tokens, and
only the output of a shared expert is reduce-scattered.

If the backward pass is split (runtime/autograd/deferred_weight_grads.py), I sends everything that weight gradients do
not need. W sends the rest, with sequence parallelism only: it gathers again what the forward pass gathered, and the
gradient of the embedding's output.

If the forward pass is recomputed, its messages precede the backward pass's, except the last, whose result is not
needed; if only the core is recomputed, the core runs once more just before its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.schedule.event import Phase
from phalanx.schedule.gradients.buckets import Bucket, layout
from phalanx.schedule.layers.head import slices_over_ranks
from phalanx.schedule.layers.routing import Routed, depends_on_other_tokens
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute, Strategy
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


Way = Literal["F", "B"]


@dataclass(frozen=True)
class LayerMessage:
    """`count` consecutive collectives of `bytes` in total; numbers or columns. `routed`: the bytes depend on where
    tokens go, and assume balanced routing. `overlapped`: the shared expert is computed meanwhile."""

    op: str
    dtype: DType | Literal["int64", "uint8"]
    bytes: Any
    count: Any = 1
    axis: str = "tp"
    routed: bool = False
    overlapped: bool = False


@dataclass(frozen=True)
class CoreRuns:
    """Marks where the attention core runs, forward or backward."""

    way: Way


Sends = tuple[LayerMessage | CoreRuns, ...]


@dataclass(frozen=True)
class _Stream:
    """Messages of a block's residual stream under sequence parallelism."""

    gather: Sends
    again: Sends
    """Gathers of the forward pass, repeated."""
    scatter: Sends


def communication(
    spec: ModelSpec,
    job: Job,
    s: Strategy,
    unit: str,
    phase: Phase,
    tokens: Any,
    repeat: Recompute = "none",
    rows: Routed | None = None,
    splits: bool = False,
) -> Sends:
    """Return the messages of one pass of a unit class over `tokens` tokens of a rank (a number or a column), in
    order. `repeat`: what a block recomputes; `rows`: the rows of its tokens, if it has experts; `splits`: whether the
    schedule splits backward passes."""
    compute = job.precision.compute
    size = tokens * spec.hidden * DTYPE_BYTES[compute]
    wide: DType = "float64" if compute == "float64" else "float32"
    slices = head_slices(spec, job, s, tokens) if unit == "head" and not splits else 1
    numbers = tokens // slices * DTYPE_BYTES[wide]
    scalars: Sends = (
        LayerMessage("all_reduce", wide, numbers),
        LayerMessage("all_reduce", wide, 2 * numbers),
    ) * slices
    reduce: Sends = (LayerMessage("all_reduce", compute, size),)
    if s.tp == 1:
        reduce = scalars = ()
    # Blocks.
    if unit == "blocks":
        stream = _of_blocks(job.precision, s, size, tokens * spec.hidden, tokens)
        if spec.experts is not None and rows is not None:
            experts = _experts(spec, spec.experts, job, s, tokens, rows)
            return _with_experts(spec.experts, phase, repeat, reduce, stream, s.sp, experts)
        return _block(spec, phase, repeat, reduce, stream, s.sp)
    # Embedding and head with sequence parallelism, then without.
    if s.sp:
        gather, scatter = _gather_and_scatter(s, compute, size, tokens)
        if unit == "embed":
            return {"F": scatter, "B": gather, "I": (), "W": gather}[phase]
        again = gather if slices == 1 else ()
        return {"F": gather + scalars, "B": again + scatter, "I": scatter, "W": gather}[phase]
    if unit == "embed":
        return reduce if phase == "F" else ()
    return {"F": scalars, "W": ()}.get(phase, reduce)


def head_slices(spec: ModelSpec, job: Job, s: Strategy, tokens: int) -> int:
    """Return the number of slices into which tp ranks cut the head's tokens; 1: they hold all logits."""
    if s.tp == 1:
        return 1
    return int(slices_over_ranks(tokens, -(-spec.vocab // s.tp), spec.hidden, DTYPE_BYTES[job.precision.compute]))


def _gather_and_scatter(s: Strategy, dtype: DType, size: Any, tokens: Any) -> tuple[Sends, Sends]:
    """Return all-gather and reduce-scatter of the residual stream under sequence parallelism."""
    parts = chunks(tokens, s.tp)
    return (LayerMessage("all_gather", dtype, size, parts),), (LayerMessage("reduce_scatter", dtype, size, parts),)


def _of_blocks(p: Precision, s: Strategy, size: Any, elements: Any, tokens: Any) -> _Stream:
    gather, scatter = _gather_and_scatter(s, p.compute, size, tokens)
    if not p.gathers_narrow:
        return _Stream(gather, gather, scatter)
    again: Sends = (LayerMessage("all_gather", "uint8", elements, chunks(tokens, s.tp)),)
    scale: Sends = (LayerMessage("all_reduce", "float32", DTYPE_BYTES["float32"]),)
    return _Stream(scale + again, again, scatter)


def _block(spec: ModelSpec, phase: Phase, repeat: Recompute, reduce: Sends, stream: _Stream, sp: bool) -> Sends:
    gather, scatter = stream.gather, stream.scatter
    core_forward: Sends = (CoreRuns("F"),)
    core_backward: Sends = (CoreRuns("B"),)
    if repeat == "selective":
        core_backward = core_forward + core_backward
    serial = spec.residual == "serial"
    if phase == "W":
        return stream.again * 2 if sp else ()
    again = () if phase == "I" else stream.again  # the inputs of products, which weight gradients need
    if not sp:
        forward, last = (core_forward + reduce, reduce) if serial else (core_forward, reduce)
        backward = reduce + core_backward + reduce
    elif serial:
        forward, last = gather + core_forward + scatter + gather, scatter
        backward = (gather + again + scatter) + gather + core_backward + (again + scatter)
    elif repeat == "selective":  # the core is recomputed where its output is summed
        forward, last = gather + gather + core_forward, scatter
        backward = gather + core_backward + (again + scatter) * 2
    else:
        forward, last = gather + core_forward + gather, scatter
        backward = gather + (again + scatter) + core_backward + (again + scatter)
    if phase == "F":
        return forward + last
    return (forward if repeat == "full" else ()) + backward


@dataclass(frozen=True)
class _Experts:
    """Messages of experts: before the shared expert is computed, after it, and in the backward pass."""

    leave: Sends
    come: Sends
    back: Sends


def _experts(spec: ModelSpec, x: Experts, job: Job, s: Strategy, tokens: Any, rows: Routed) -> _Experts:
    compute = job.precision.compute
    e, ranks = DTYPE_BYTES[compute] * spec.hidden, s.ep * s.etp
    leave: Sends = ()
    if s.cp * s.tp > 1 and depends_on_other_tokens(x, s):
        # The choices of each token; or, if experts choose, its scores.
        score_dtype: DType = "float64" if compute == "float64" else "float32"
        dtype, n = (
            ("int32", 4 * x.top_k) if x.chooser == "tokens" else (score_dtype, DTYPE_BYTES[score_dtype] * x.count)
        )
        size = s.cp * s.tp * -(-tokens // s.tp) * n
        leave += (LayerMessage("all_gather", dtype, size, axis="tokens"),)  # type: ignore[arg-type]
    if ranks == 1:
        return _Experts(leave, (), ())
    axis = "ep" if s.etp == 1 else "ep+etp"
    shared = x.shared_ffn > 0
    rows_out = LayerMessage("all_to_all", compute, rows.rows * rows.copies * e, axis=axis, routed=True)
    results = LayerMessage("all_to_all", compute, rows.received * e, axis=axis, routed=True)
    counts = LayerMessage("all_to_all", "int64", x.count * s.etp * 8, axis=axis)
    return _Experts(
        (*leave, counts, replace(rows_out, overlapped=shared)),
        (results,),
        (rows_out, replace(results, overlapped=shared)),
    )


def _with_experts(
    x: Experts, phase: Phase, repeat: Recompute, reduce: Sends, stream: _Stream, sp: bool, messages: _Experts
) -> Sends:
    """Return the messages of a block with experts, which runs attention and experts in sequence."""
    gather, scatter = stream.gather, stream.scatter
    core_forward: Sends = (CoreRuns("F"),)
    core_backward: Sends = (CoreRuns("B"),)
    if repeat == "selective":
        core_backward = core_forward + core_backward
    reduces_shared = sp and x.shared_ffn > 0
    # Deferred weight gradients gather again what they read.
    if phase == "W":
        return stream.again * (1 + reduces_shared) if sp else ()
    again = () if phase == "I" else stream.again  # the inputs of products, which weight gradients need
    # The forward and the backward pass.
    if not sp:
        forward, last = core_forward + reduce + messages.leave + messages.come, reduce
        backward = messages.back + reduce + core_backward + reduce
    else:
        forward = gather + core_forward + scatter + messages.leave + gather * reduces_shared + messages.come
        last = scatter * reduces_shared
        backward = (
            gather * reduces_shared
            + messages.back
            + (again + scatter) * reduces_shared
            + gather
            + core_backward
            + (again + scatter)
        )
    if phase == "F":
        return forward + last
    return (forward if repeat == "full" else ()) + backward
