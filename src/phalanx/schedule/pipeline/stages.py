"""Units of each pipeline rank under a strategy, and the schedule that runs them.

A strategy gives the number of blocks of each chunk (`layers=7/9/9/7`), or leaves it to `auto`: then the slowest rank
gets as few multiplied weights as possible. The embedding counts as none, the head as vocab x hidden.
"""

from phalanx.schedule.partition.balance import Units, partition
from phalanx.schedule.pipeline.actions import PipelineSchedule, round_robin, v_shape
from phalanx.schedule.pipeline.schedules import build, facts_of
from phalanx.schedule.pipeline.simulate import insert_sends
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy import legality
from phalanx.spec.strategy.spec import Strategy


def rank_of(s: Strategy) -> tuple[int, ...]:
    """Return the pipeline rank of each chunk, in the order of the model."""
    return v_shape(s.pp) if facts_of(s.schedule).v_shaped else round_robin(s.pp, s.virtual)


def splits_backward(s: Strategy) -> bool:
    """Whether the pipeline runs gradients of inputs and of weights as separate actions, I and W."""
    return s.pp > 1 and facts_of(s.schedule).split_backward


def blocks_of(spec: ModelSpec, s: Strategy) -> tuple[int, ...]:
    """Return the number of blocks of each chunk, from `layers` or balanced by multiplied weights per token."""
    if s.layers != "auto":
        return tuple(map(int, s.layers.split("/")))
    multiplied: dict[str, int] = {}  # weights that each token is multiplied with, by unit
    for p in parameters(spec):
        if p.role not in ("embedding", "position", "norm") and len(p.shape) > 1:
            experts = spec.experts if p.of_experts else None  # a token visits top_k of them
            numel = p.numel * experts.top_k // experts.count if experts else p.numel
            multiplied[p.unit] = multiplied.get(p.unit, 0) + numel
    costs = [multiplied[f"blocks.{i}"] for i in range(spec.layers)]
    return partition(Units(0, tuple(costs), spec.vocab * spec.hidden), rank_of(s)).blocks


def chunks(spec: ModelSpec, s: Strategy) -> tuple[tuple[str, ...], ...]:
    """Return the names of the units of each chunk, in the order of the model."""
    result, at, counts = [], 0, blocks_of(spec, s)
    for chunk, count in enumerate(counts):
        blocks = [f"blocks.{i}" for i in range(at, at + count)]
        at += count
        first, last = ["embed"] * (chunk == 0), ["head"] * (chunk == len(counts) - 1)
        result.append((*first, *blocks, *last))
    return tuple(result)


def stream(spec: ModelSpec, job: Job, s: Strategy, sequences: int | None = None) -> tuple[int, ...]:
    """Return the shape of the activation that travels from chunk to chunk, for a micro-batch or for `sequences`.

    (sequences, tokens, hidden); with sequence parallelism (tokens of this tp rank, hidden), provided that the tokens
    split evenly.
    """
    rows, tokens = sequences or s.micro_batch, job.seq // s.cp
    if s.sp and rows * tokens % s.tp == 0:
        return rows * tokens // s.tp, spec.hidden
    return rows, tokens, spec.hidden


def schedule(s: Strategy, micro_batches: int) -> PipelineSchedule:
    """Return the schedule of all pipeline ranks, sends and receives included. With pp = 1: one micro-batch after the
    other."""
    name = s.schedule if s.pp > 1 else "naive"
    return insert_sends(build(name, s.pp, micro_batches, s.virtual if s.virtual > 1 else None))


def require_chunks(s: Strategy) -> None:
    """Require that a strategy's pipeline fields fit its schedule: defaults without a pipeline, else as many chunks
    per rank as the schedule has. Raises InputError."""
    if s.pp == 1:
        for name in ("virtual", "schedule", "layers"):
            if getattr(s, name) != getattr(Strategy, name):
                raise InputError(
                    f"strategy.{name}", getattr(s, name), "applies to pipelines only, and pp = 1", "use pp >= 2"
                )
        return
    facts = facts_of(s.schedule)
    if facts.takes_virtual and s.virtual != facts.chunks and not facts.repeats:
        reason = f"{s.schedule} has {facts.chunks} chunks per rank"
        raise InputError("strategy.virtual", s.virtual, reason, f"use virtual={facts.chunks}")
    if facts.takes_virtual and s.virtual == 1:
        remedy = f"use virtual={facts.chunks}, or {facts.counterpart}"
        raise InputError("strategy.virtual", 1, f"{s.schedule} has several chunks per rank", remedy)
    if not facts.takes_virtual and s.virtual > 1:
        has = "always has two chunks per rank" if facts.v_shaped else "has one chunk per rank"
        raise InputError("strategy.virtual", s.virtual, f"{s.schedule} {has}", "leave it out, or use interleaved")


def check(strategy: Strategy, model: ModelSpec, job: Job, world: int | None) -> None:
    """Require that the strategy fits this model, batch and number of ranks (None: any number), including its
    pipeline. Raises InputError otherwise."""
    legality.check(strategy, model, job, world)
    s = strategy
    require_chunks(s)
    if s.pp == 1:
        return
    n = len(rank_of(s))
    # Blocks of the chunks.
    if model.layers < n - 2:  # embed and head may be alone
        each = f" ({n // s.pp} per rank)" if n > s.pp else ""
        reason = f"makes {n} chunks{each}, too many for model.layers = {model.layers}"
        raise InputError("strategy.pp", s.pp, reason, "use fewer")
    if s.layers != "auto":
        counts = blocks_of(model, s)
        if len(counts) != n or sum(counts) != model.layers or 0 in counts[1:-1]:
            reason = (
                f"gives {sum(counts)} blocks to {len(counts)} chunks; there are {model.layers} blocks and {n} chunks"
            )
            if (len(counts), sum(counts)) == (n, model.layers):
                reason = "leaves a chunk without blocks that has neither the embedding nor the head"
            remedy = f"give {n} chunks {model.layers} blocks in all, or leave it out"
            raise InputError("strategy.layers", s.layers, reason, remedy)
    # Micro-batches of the schedule.
    facts = facts_of(s.schedule)
    refusal = facts.refusal(s.pp, s.accumulation(job))  # the refused number is not a field of the strategy
    if refusal:
        why, remedy = refusal
        reason = f"makes {s.accumulation(job)} micro-batches, and {why}"
        raise InputError("strategy.micro_batch", s.micro_batch, reason, remedy)
