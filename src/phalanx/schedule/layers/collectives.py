"""What is sent inside of layers, in order: over tensor-parallel ranks, and where in between attention's core runs,
which itself sends over those that share sequences (context_parallel.py); and over those that share experts.

    embed    F   its output
    blocks   F   core; what attention and MLP add to the residual stream: each, or their sum where both read one input
             B   the gradient of the input of the MLP; core; that of attention's input
    head     F   each token's largest logit; its sum of exponentials and its target's logit
             B   the gradient of its input, which is normed

Each is an all-reduce. With sequence parallelism the residual stream is split by tokens, and what reads it all is
brought together first. In place of the all-reduces of the stream:

    embed    F   reduce-scatter of its output
             B   all-gather of that one's gradient
    blocks   F   all-gather of what attention and MLP read, reduce-scatter of what they add
             B   all-gather of the gradient of what they add; of what they read, and reduce-scatter of its gradient
    head     F   all-gather of its input, which is normed, before all else
             B   the same, and reduce-scatter of its gradient

Where a block has experts in place of the MLP, over the ranks that share those (runtime/expert_parallel.py):

    blocks   F   all-to-all of counts, of rows to their experts, and of results back; before, where a choice depends
                 on those of the sequence's other tokens, all-gather of choices over the ranks that have them
             B   all-to-all of results' gradients, and of rows' gradients back

and what experts add to the stream comes from all of the ranks' tokens: with sequence parallelism each has its own,
and only what a shared expert adds is scattered.

In a backward pass in two parts (runtime/weight_gradients.py) all is sent in I, but for what weights' gradients alone
need: with sequence parallelism, in W, what was brought together forward once more, and the embedding's gradient.

Where the forward pass is repeated, before all else of the backward pass comes what it sends but the last, of which
nobody needs the result; where the core alone is, the core once more just before its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.schedule.event import Phase
from phalanx.schedule.layers.routing import Routed, looks_around
from phalanx.schedule.layers.tensor import chunks
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute, Strategy

Way = Literal["F", "B"]


@dataclass(frozen=True)
class Sent:
    """`count` collectives, one after the other, of `bytes` together; numbers or columns. `routed`: how much depends
    on where tokens go; this is what it is when that is balanced. `beside`: meanwhile the MLP is computed that all
    tokens share."""

    op: str
    dtype: DType | Literal["int64"]
    bytes: Any
    count: Any = 1
    axis: str = "tp"
    routed: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Core:
    """Attention's core runs, forward or backward."""

    way: Way


Sends = tuple[Sent | Core, ...]


def sent(
    spec: ModelSpec,
    job: Job,
    s: Strategy,
    unit: str,
    phase: Phase,
    tokens: Any,
    repeat: Recompute = "none",
    rows: Routed | None = None,
) -> Sends:
    """In a pass of a unit class over `tokens` tokens of a rank, a number or a column. `repeat`: what a block repeats;
    `rows`: where it has experts, those of its tokens."""
    compute = job.precision.compute
    size = tokens * spec.hidden * DTYPE_BYTES[compute]
    wide: DType = "float64" if compute == "float64" else "float32"
    scalars: Sends = tuple(Sent("all_reduce", wide, n * tokens * DTYPE_BYTES[wide]) for n in (1, 2))
    reduce: Sends = (Sent("all_reduce", compute, size),)
    if s.tp == 1:
        reduce = scalars = ()
    if unit == "blocks":
        gather, scatter = _apart(s, compute, size, tokens)
        if spec.experts is not None and rows is not None:
            experts = _experts(spec, spec.experts, job, s, tokens, rows)
            return _with_experts(spec.experts, phase, repeat, reduce, gather, scatter, s.sp, experts)
        return _block(spec, phase, repeat, reduce, gather, scatter, s.sp)
    if s.sp:
        gather, scatter = _apart(s, compute, size, tokens)
        if unit == "embed":
            return {"F": scatter, "B": gather, "I": (), "W": gather}[phase]
        return {"F": gather + scalars, "B": gather + scatter, "I": scatter, "W": gather}[phase]
    if unit == "embed":
        return reduce if phase == "F" else ()
    return {"F": scalars, "W": ()}.get(phase, reduce)


def _apart(s: Strategy, dtype: DType, size: Any, tokens: Any) -> tuple[Sends, Sends]:
    """With sequence parallelism: all-gather and reduce-scatter of the stream."""
    parts = chunks(tokens, s.tp)
    return (Sent("all_gather", dtype, size, parts),), (Sent("reduce_scatter", dtype, size, parts),)


def _block(
    spec: ModelSpec, phase: Phase, repeat: Recompute, reduce: Sends, gather: Sends, scatter: Sends, sp: bool
) -> Sends:
    there: Sends = (Core("F"),)
    back: Sends = (Core("B"),)
    if repeat == "selective":
        back = there + back
    serial = spec.residual == "serial"
    if phase == "W":
        return gather * 2 if sp else ()
    again = () if phase == "I" else gather  # what products have read
    if not sp:
        forward, last = (there + reduce, reduce) if serial else (there, reduce)
        backward = reduce + back + reduce
    elif serial:
        forward, last = gather + there + scatter + gather, scatter
        backward = (gather + again + scatter) + gather + back + (again + scatter)
    elif repeat == "selective":  # the core runs where its product is summed
        forward, last = gather + gather + there, scatter
        backward = gather + back + (again + scatter) * 2
    else:
        forward, last = gather + there + gather, scatter
        backward = gather + (again + scatter) + back + (again + scatter)
    if phase == "F":
        return forward + last
    return (forward if repeat == "full" else ()) + backward


@dataclass(frozen=True)
class _Experts:
    """Before what is shared is computed, and after it; and of gradients."""

    leave: Sends
    come: Sends
    back: Sends


def _experts(spec: ModelSpec, x: Experts, job: Job, s: Strategy, tokens: Any, rows: Routed) -> _Experts:
    compute = job.precision.compute
    e, ranks = DTYPE_BYTES[compute] * spec.hidden, s.ep * s.etp
    leave: Sends = ()
    if s.cp * s.tp > 1 and looks_around(x, s):
        # What each token chooses; or where experts choose, its scores.
        wide: DType = "float64" if compute == "float64" else "float32"
        dtype, n = ("int32", 4 * x.top_k) if x.chooser == "tokens" else (wide, DTYPE_BYTES[wide] * x.count)
        size = s.cp * s.tp * -(-tokens // s.tp) * n
        leave += (Sent("all_gather", dtype, size, axis="tokens"),)  # type: ignore[arg-type]
    if ranks == 1:
        return _Experts(leave, (), ())
    axis = "ep" if s.etp == 1 else "ep+etp"
    shared = x.shared_ffn > 0
    out = Sent("all_to_all", compute, rows.rows * rows.copies * e, axis=axis, routed=True)
    home = Sent("all_to_all", compute, rows.came * e, axis=axis, routed=True)
    counts = Sent("all_to_all", "int64", x.count * s.etp * 8, axis=axis)
    return _Experts((*leave, counts, replace(out, beside=shared)), (home,), (out, replace(home, beside=shared)))


def _with_experts(
    x: Experts, phase: Phase, repeat: Recompute, reduce: Sends, gather: Sends, scatter: Sends, sp: bool, of: _Experts
) -> Sends:
    """As `_block`, one after the other."""
    there: Sends = (Core("F"),)
    back: Sends = (Core("B"),)
    if repeat == "selective":
        back = there + back
    shared = sp and x.shared_ffn > 0
    if phase == "W":
        return gather * (1 + shared) if sp else ()
    again = () if phase == "I" else gather  # what products have read
    if not sp:
        forward, last = there + reduce + of.leave + of.come, reduce
        backward = of.back + reduce + back + reduce
    else:
        forward = gather + there + scatter + of.leave + gather * shared + of.come
        last = scatter * shared
        backward = gather * shared + of.back + (again + scatter) * shared + gather + back + (again + scatter)
    if phase == "F":
        return forward + last
    return (forward if repeat == "full" else ()) + backward
