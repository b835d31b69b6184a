"""The StepProgram of one rank's step of generation: prefill, decode, or both (schedule/generation.py).

    recv       the stream, (tokens, hidden), from the stage before
    embed      of all tokens; over tp an all-reduce
    blocks     as in training's forward pass (schedule/layers/collectives.py), for the tokens of the step; attention
               reads the cache
    head       of the tokens that yield another one; over tp an all-gather of their logits
    send       the stream to the stage after
    tokens     an all-reduce of the sampled tokens, int64, over all ranks, so that each knows the next step of all

Recurrences continue from a state per request, chunk by chunk from the step's first token.
FLOPs of attention are 4 x heads x width per query and key that are multiplied, masked or not: requests that decode
attend together, up to the length of the longest. Latent attention decodes in the space of the latents and computes
nothing for cached tokens (DeepSeek-AI 2024a, section 2.1.2); a prefill computes keys and values of all tokens that it
attends to.
"""

from collections.abc import Iterator
from dataclasses import replace

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.scan import recurrence
from phalanx.cost.compute.unit_work import RankPass
from phalanx.cost.memory.cache import latents
from phalanx.cost.memory.state import State, cache_bytes
from phalanx.cost.step.program import StepProgram
from phalanx.schedule.event import Event
from phalanx.schedule.generation import Batch, Room, reads
from phalanx.schedule.layers import collectives
from phalanx.schedule.layers.routing import expert_traffic
from phalanx.schedule.layout import Layout, RankView
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.job import DTYPE_BYTES, DType, Job, Precision, widest
from phalanx.spec.model.blocks.block import Block, products_of
from phalanx.spec.model.blocks.lowering import block_of
from phalanx.spec.model.blocks.operators import Attend, Expand, Index, Router, Scan
from phalanx.spec.model.spec import ModelSpec, buffers
from phalanx.spec.strategy.generation import require_generation, serving_model
from phalanx.spec.strategy.spec import Strategy


def generation_layout(model: ModelSpec, s: Strategy, dtype: DType) -> Layout:
    """Return the layout of a model that generates in `dtype`. Raises InputError if the strategy does not divide the
    model, or has fields for training alone."""
    require_generation(model, s)
    job = Job(s.dp, 1, Precision(compute=dtype))
    check(s, model, job, None)
    return Layout(serving_model(model), job, s)


def generation_step(view: RankView, batch: Batch, sampled: int, room: Room) -> StepProgram:
    """Return the program of a rank's step. `batch`: its replica's batch; `sampled`: number of tokens that all
    replicas sample; `room`: the room of its cache."""
    events = tuple(replace(e, micro_batch=0) if e.unit != TOKENS else e for e in _events(view, batch, sampled))
    return StepProgram(events, _state(view, room))


TOKENS = "tokens"
"""The unit of the all-reduce of sampled tokens."""


def _state(view: RankView, room: Room) -> State:
    """Return the state of a rank between steps: weights, tables of rotary angles, experts' biases, and the cache."""
    local, dtype = view.local, view.job.precision.compute
    e = DTYPE_BYTES[dtype]
    tables = local.max_seq * local.rotary_width * e if local.position == "rotary" else 0
    tables += sum(p.numel for p in buffers(local)) * DTYPE_BYTES[widest(dtype)]
    return State(local.parameter_count * e, 0, 0, 0, 0, tables, 0, cache=cache_bytes(local, room, dtype))


def _events(view: RankView, batch: Batch, sampled: int) -> Iterator[Event]:
    """Yield the events of a rank's step, in order."""
    s, place, spec = view.strategy, view.place, view.local
    dtype, tokens = view.job.precision.compute, batch.tokens
    e = DTYPE_BYTES[dtype]
    peers = view.mesh.group_of(view.representative, "pp")
    message = Event("p2p", "send", "F", f"chunk.{place}", "pp", s.pp, dtype=dtype, chunk=place)
    message = replace(message, bytes=tokens * spec.hidden * e)
    if tokens and place:
        yield replace(message, op="recv", peer=peers[place - 1])
    for unit in view.chunks[0] if tokens else ():
        kind = unit.split(".")[0]
        if kind == "head" and not batch.samples:
            continue
        yield from _pass(view, batch, unit, kind)
    if tokens and place < s.pp - 1:
        yield replace(message, peer=peers[place + 1])
    if s.world > 1 and sampled:
        event = Event("collective", "all_reduce", "F", TOKENS, "world", s.world, dtype="int64")
        yield replace(event, bytes=sampled * 8)


def _pass(view: RankView, batch: Batch, unit: str, kind: str) -> Iterator[Event]:
    """Yield the pass of a unit and the collectives inside it."""
    job, s, tokens = view.job, view.strategy, batch.samples if kind == "head" else batch.tokens
    dtype = job.precision.compute
    e, block = DTYPE_BYTES[dtype], block_of(view.model, unit) if kind == "blocks" else None
    x = block.first(Router) if block is not None else None
    rows = expert_traffic(x, s, batch.tokens, view.representative) if x is not None else None
    flops = unit_work.forward(view.model, unit, RankPass(tokens, 0, e, s, rows)).flops
    flops += mixing_flops(block, s, batch) if block is not None else 0
    yield Event("compute", "forward", "F", unit, dtype=dtype, flops=flops, routed=x is not None)
    if kind == "head":
        if s.tp > 1:
            logits = s.tp * tokens * view.local.vocab * e
            yield Event("collective", "all_gather", "F", unit, "tp", s.tp, dtype=dtype, bytes=logits)
        return
    for sent in collectives.communication(view.model, job, s, unit, "F", tokens, "none", rows):
        if isinstance(sent, collectives.LayerMessage):
            size = view.mesh.size(sent.axis)
            event = Event("collective", sent.op, "F", unit, sent.axis, size, dtype=sent.dtype, routed=sent.routed)
            yield replace(event, bytes=sent.bytes)


def mixing_flops(block: Block, s: Strategy, batch: Batch) -> int:
    """Return a rank's FLOPs in a block's recurrences over new tokens, its attention over cached tokens, and the keys
    and values that latent attention computes for cached tokens in a prefill."""
    flops = 0
    for sublayer in block.sublayers:
        if (op := sublayer.first(Scan)) is not None:
            for slots, _ in reads(batch, None):
                queries = sum(slot.new for slot in slots)
                flops += int(recurrence(op, queries, slots[0].new, 1, s, backward=False).flops)
        if (attend := sublayer.first(Attend)) is None:
            continue
        expand, index = sublayer.first(Expand), sublayer.first(Index)
        for slots, keys in reads(batch, attend.window):
            latent = expand is not None and slots[0].decodes
            queries = sum(slot.new for slot in slots)
            if index is not None and keys > index.top:
                flops += 2 * index.heads * index.each * queries * keys
            width = sum(latents(sublayer)) if latent else attend.core
            flops += 4 * attend.y.dim.groups(s) * width * queries * keys
            if expand is not None and not latent:
                (up,) = (op for op in products_of(sublayer) if op.y[0].name == expand.up)
                flops += 2 * (keys - queries) * up.into.size * up.y[0].dim.here(s)
    return flops
