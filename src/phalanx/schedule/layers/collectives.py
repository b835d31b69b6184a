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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.schedule.event import Phase
from phalanx.schedule.gradients.buckets import Bucket, layout
from phalanx.schedule.layers.head import slices_over_ranks
from phalanx.schedule.layers.routing import ExpertTraffic, depends_on_other_tokens
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision
from phalanx.spec.model.blocks.block import Block, Sublayer
from phalanx.spec.model.blocks.lowering import block_of
from phalanx.spec.model.blocks.operators import (
    Attend,
    Combine,
    Conv,
    Dispatch,
    Linear,
    Norm,
    Operator,
    Router,
    Scan,
)
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute, Strategy, pieces
from phalanx.spec.strategy.split import Split, partial


def chunks(tokens: Any, tp: int) -> Any:
    """Return the number of chunks into which a micro-batch's tokens are cut, so that one is computed while another
    travels: 2 if every rank then has equally many tokens of each, else 1. `tokens`: a number or a column."""
    return 1 + (tokens % (2 * tp) == 0)


def summed_elements(split: Split, cut: Sequence[Bucket], s: Strategy) -> int:
    """Return the elements of the buffer in which tp ranks sum their partial gradients: on all ranks as many as the
    shard with the most needs."""
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
    """Marks where a sublayer's attention core or recurrence runs, forward or backward."""

    way: Way
    op: Attend | Scan
    sublayer: Sublayer


Sends = tuple[LayerMessage | CoreRuns, ...]


def communication(
    spec: ModelSpec,
    job: Job,
    s: Strategy,
    unit: str,
    phase: Phase,
    tokens: Any,
    repeat: Recompute = "none",
    rows: ExpertTraffic | None = None,
    splits: bool = False,
) -> Sends:
    """Return the messages of one pass of a unit class over `tokens` tokens of a rank (a number or a column), in
    order. `repeat`: the part of a block that is recomputed; `rows`: the traffic of its experts, if it has any;
    `splits`: whether the schedule splits backward passes."""
    compute = job.precision.compute
    size = tokens * spec.hidden * DTYPE_BYTES[compute]
    wide = wide_of(compute)
    slices = head_slices(spec, job, s, tokens) if unit == "head" and not splits else 1
    numbers = tokens // slices * DTYPE_BYTES[wide]
    scalars: Sends = (
        LayerMessage("all_reduce", wide, numbers),
        LayerMessage("all_reduce", wide, 2 * numbers),
    ) * slices
    reduce: Sends = (LayerMessage("all_reduce", compute, size),)
    if s.tp == 1:
        reduce = scalars = ()
    if unit.startswith("blocks"):
        stream = _of_blocks(job.precision, s, size, tokens) if s.sp else (reduce, (), (), ())
        return _BlockPass(block_of(spec, unit), job, s, tokens, rows, repeat, *stream).sends(phase)
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


def wide_of(dtype: DType) -> DType:
    """Return the type in which numbers of a compute type are summed."""
    return "float64" if dtype == "float64" else "float32"


def head_slices(spec: ModelSpec, job: Job, s: Strategy, tokens: int) -> int:
    """Return the number of slices in which tp ranks process the head's tokens; 1: they hold all logits at once."""
    if s.tp == 1:
        return 1
    return int(slices_over_ranks(tokens, -(-spec.vocab // s.tp), spec.hidden, DTYPE_BYTES[job.precision.compute]))


def _gather_and_scatter(s: Strategy, dtype: DType, size: Any, tokens: Any) -> tuple[Sends, Sends]:
    """Return all-gather and reduce-scatter of the residual stream under sequence parallelism."""
    parts = chunks(tokens, s.tp)
    return (LayerMessage("all_gather", dtype, size, parts),), (LayerMessage("reduce_scatter", dtype, size, parts),)


def _of_blocks(p: Precision, s: Strategy, size: Any, tokens: Any) -> tuple[Sends, Sends, Sends, Sends]:
    """Return the fields `reduce`, `gather`, `again` and `scatter` of a _BlockPass with sequence parallelism, whose
    residual stream has `size` bytes."""
    gather, scatter = _gather_and_scatter(s, p.compute, size, tokens)
    if not p.gathers_narrow:
        return (), gather, gather, scatter
    again: Sends = (LayerMessage("all_gather", "uint8", size // DTYPE_BYTES[p.compute], chunks(tokens, s.tp)),)
    scale: Sends = (LayerMessage("all_reduce", "float32", DTYPE_BYTES["float32"]),)
    return (), scale + again, again, scatter


@dataclass(frozen=True)
class _BlockPass:
    """The messages of a block's passes over `tokens` tokens of a rank. Each of `reduce`, `gather` (with its scale,
    where it is of 8 bits), `again` (a gather of the forward pass, repeated) and `scatter` is empty if not sent."""

    block: Block
    job: Job
    s: Strategy
    tokens: Any
    rows: ExpertTraffic | None
    repeat: Recompute
    reduce: Sends
    gather: Sends
    again: Sends
    scatter: Sends

    def sends(self, phase: Phase) -> Sends:
        """Return the messages of one pass, in order."""
        if phase == "W":
            return self.again * sum(map(_gathers, self.block.sublayers))
        if phase == "F":
            return self._forward(needed=True)
        again = () if phase == "I" else self.again  # the inputs of products, which weight gradients need
        return (self._forward(needed=False) if self.repeat == "full" else ()) + self._backward(again + self.scatter)

    @property
    def _joined(self) -> bool:
        """Whether all sublayers add to the residual stream at once."""
        return self.block.residual != "serial" and all(s.after is None for s in self.block.sublayers)

    @property
    def _core_last(self) -> bool:
        """Whether the core is recomputed where its output is summed, after all sublayers gathered."""
        return self._joined and self.s.sp and self.repeat == "selective"

    def _read(self, sublayer: Sublayer) -> bool:
        """Whether a sublayer reads its own sum over tp ranks before it is added: by a norm, or a gate of own
        tokens."""
        return sublayer.after is not None or (self.s.sp and sublayer.scaled)

    def _leaves(self, sublayer: Sublayer) -> bool:
        """Whether a sum over tp ranks follows a sublayer."""
        return not self._joined or sublayer is self.block.sublayers[-1]

    def _forward(self, needed: bool) -> Sends:
        """Return the forward pass. Unless its result is `needed`, the last sum is only sent if it is read."""
        sent = self.gather * len(self.block.sublayers) if self._core_last else ()
        for sublayer in self.block.sublayers:
            gather = () if self._core_last else self.gather
            for op in sublayer.operators:
                if _reads_all(op):
                    sent, gather = sent + gather, ()
                sent += self._operator(op, sublayer, "F")
            last = sublayer is self.block.sublayers[-1]
            if self._leaves(sublayer) and (needed or not last or self._read(sublayer)):
                sent += self.reduce + self.scatter * _gathers(sublayer)
        return sent

    def _backward(self, enters: Sends) -> Sends:
        """Return the backward pass. `enters`: the messages with which a gathering sublayer ends, for the gradient of
        its input."""
        sent: Sends = ()
        for sublayer in reversed(self.block.sublayers):
            gathers = _gathers(sublayer)
            sent += self.gather * (gathers and self._leaves(sublayer))
            for op in sublayer.core() if self.repeat == "selective" else ():
                sent += self._operator(op, sublayer, "F")
            for op in reversed(sublayer.operators):
                sent += self._operator(op, sublayer, "B")
            sent += self.reduce + enters * (gathers and not self._core_last)
        return sent + enters * (len(self.block.sublayers) * self._core_last)

    def _operator(self, op: Operator, sublayer: Sublayer, way: Way) -> Sends:
        """Return the messages of one operator."""
        match op:
            case Attend() | Scan():
                return (CoreRuns(way, op, sublayer),)
            case Conv() if self.s.cp > 1 and sublayer.first(Scan) is None:
                # The last tokens of every rank's pieces, or their gradients (runtime/model_parallel/halo.py).
                rows = self.tokens * self.s.cp // self.job.seq * pieces(self.s.ring, self.s.ulysses) * self.s.cp
                width = sum(dim.here(self.s) for dim in op.channels)
                return (self._of_compute("all_gather", rows * (op.taps - 1) * width, "cp"),)
            case Norm() if op.inside and op.spans > op.y.dim.groups(self.s):
                numbers = self.tokens * (op.y.dim.count // op.spans)
                return (LayerMessage("all_reduce", self._wide, numbers * DTYPE_BYTES[self._wide]),)
            case Linear() if op.into.axis == "tp" and self.s.tp > 1:
                inner = sum(out.dim.size for out in op.y if not out.dim.axis and out.rows != "own")
                return (self._of_compute("all_reduce", self.tokens * inner, "tp"),) if inner else ()
            case Router() if way == "F" and self.s.cp * self.s.tp > 1 and depends_on_other_tokens(op, self.s):
                return (self._choices(op),)
            case Dispatch() if self.s.ep * self.s.etp > 1:
                if way == "B":
                    return (self._rows(op.width, received=True, overlapped=sublayer.shared),)
                experts = next(o.experts for o in sublayer.operators if isinstance(o, Linear) and o.experts)
                counts = LayerMessage("all_to_all", "int64", experts.count * self.s.etp * 8, axis=self._expert_axis)
                return (counts, self._rows(op.width, received=False, overlapped=sublayer.shared))
            case Combine() if self.s.ep * self.s.etp > 1:
                return (self._rows(op.width, received=way == "F"),)
        return ()

    @property
    def _wide(self) -> DType:
        return wide_of(self.job.precision.compute)

    @property
    def _expert_axis(self) -> str:
        return "ep" if self.s.etp == 1 else "ep+etp"

    def _of_compute(self, op: str, elements: Any, axis: str) -> LayerMessage:
        compute = self.job.precision.compute
        return LayerMessage(op, compute, elements * DTYPE_BYTES[compute], axis=axis)

    def _rows(self, width: int, received: bool, overlapped: bool = False) -> LayerMessage:
        """Return the all-to-all of rows to experts, or back of the rows that were `received`."""
        assert self.rows is not None
        n = self.rows.received if received else self.rows.rows * self.rows.copies
        message = self._of_compute("all_to_all", n * width, self._expert_axis)
        return replace(message, routed=True, overlapped=overlapped)

    def _choices(self, op: Router) -> LayerMessage:
        """Return the all-gather of the choices of each token; or, if experts choose, of its scores."""
        if op.chooser == "tokens":
            dtype: Any = "int32"
            each = 4 * op.top_k
        else:
            dtype, each = self._wide, DTYPE_BYTES[self._wide] * op.count
        size = self.s.cp * self.s.tp * -(-self.tokens // self.s.tp) * each
        return LayerMessage("all_gather", dtype, size, axis="tokens")


def _reads_all(op: Operator) -> bool:
    """Whether an operator reads the tokens of all tp ranks from the residual stream."""
    return isinstance(op, Linear) and op.x == "n" and any(out.rows == "all" for out in op.y)


def _gathers(sublayer: Sublayer) -> bool:
    """Whether a sublayer reads, and adds to, the tokens of all tp ranks: not so experts without a shared one."""
    return any(map(_reads_all, sublayer.operators))
