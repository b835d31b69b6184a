"""Live tensor bytes, as a maximum over instants and never as a sum of maxima.

Model state lives through the whole step. A unit's forward pass keeps what its backward pass needs; the backward pass
frees that, and in the meantime has temporaries in addition to what was live when it began. So every unit has three
numbers: the bytes that it keeps, and its temporaries forward and backward (ends.py for the embedding and the head
with its loss, passes.py for blocks). The walk over the step's events (cost/step/program.py) adds them up.
"""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.attention_core import Core, first_visible_bytes
from phalanx.cost.memory.ends import embed, head
from phalanx.cost.memory.live_bytes import Footprint
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.cost.memory.passes import BlockWalk
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import ExpertTraffic
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.blocks.block import Block
from phalanx.spec.model.blocks.lowering import architecture, block_of, blocks_with
from phalanx.spec.model.blocks.operators import Attend, Rotary, Router, Scan
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute


def documents(
    spec: ModelSpec, job: Job, tokens: Column, part: Context | None = None, blocks: Sequence[int] | None = None
) -> dict[int, Column]:
    """Return the bytes that separate a micro-batch's documents, by the block whose backward pass is the last to use
    them: a mask for each attention window, and every token's rotary angles; with context parallelism, first visible
    positions in place of masks, and for recurrences the positions of entire sequences. `blocks`: a chunk's blocks,
    which have their own masks; by default all."""
    blocks = spec.held_blocks if blocks is None else blocks
    if not job.separate:
        return {}
    attending, scanning, turning = (blocks_with(spec, blocks, kind) for kind in (Attend, Scan, Rotary))
    e, last = DTYPE_BYTES[job.precision.compute], {}
    if part is not None and part.parallel:
        result = first_visible_bytes(spec, part, tokens // part.tokens, True, attending)
        if scanning:
            last[scanning[0]] = tokens // part.tokens * part.seq * 8
    else:
        hiding: dict[int | None, int] = {}
        for i in attending:
            window = spec.window_of(i)
            hiding.setdefault(window if window is not None and window < job.seq else None, i)
        result = dict.fromkeys(hiding.values(), tokens * job.seq * e)
    if turning:
        last[turning[0]] = last.get(turning[0], 0) + tokens * spec.rotary_width * e
    return result | {i: result.get(i, 0) + size for i, size in last.items()}


def footprint(
    spec: ModelSpec,
    unit: str,
    tokens: Column,
    seq: int,
    job: Job,
    placed: DType,
    tp: int = 1,
    sp: bool = False,
    repeat: Recompute = "none",
    core: Core | None = None,
    in_parts: bool = False,
    routed: ExpertTraffic | None = None,
    gathered: bool = False,
) -> Footprint:
    """Return the bytes of a unit for `tokens` tokens of one micro-batch.

    `unit`: `embed`, `head`, a block such as `blocks.3`, or `blocks`, the first one. `spec`: one rank's part of the
    model. `sp`: whether the residual stream has only this rank's tokens. `placed`: dtype of the memory to which
    gradients are written. `repeat`: recomputation of a block. `core`: attention over ranks that share sequences.
    `in_parts`: whether layers can defer weight gradients, which are then computed directly in their memory if dtypes
    allow. `routed`: rows of a block with experts. `gathered`: whether weights are gathered in 8 bits."""
    if unit in ("embed", "head"):
        return (embed if unit == "embed" else head)(spec, tokens, seq, job, placed, tp, sp, core, in_parts)
    e = DTYPE_BYTES[job.precision.compute]
    mask: Column = 0
    if job.separate:
        part = core and core.part
        mask = tokens * (part.ulysses * 8 if part else seq * e)
    sizes = PassSizes(
        tokens,
        e,
        spec.hidden,
        tp,
        sp,
        repeat,
        core,
        job.precision.operands,
        gathered,
        sp and job.precision.operands is not None and job.precision.gathers_narrow,
        mask,
        placed == job.precision.compute if in_parts else None,
        spec.experts,
        routed,
        seq,
    )
    walk = BlockWalk(_block(spec, unit, routed is not None), sizes)
    forward, backward = walk.passes()
    return Footprint(
        kept=forward.live,
        forward=forward.highest - forward.live,
        backward=backward.highest,
        leaves=0,
        masked=backward.masked,
        parts=walk.parts() if in_parts else None,
    )


def _block(spec: ModelSpec, unit: str, routed: bool) -> Block:
    """Return the block of a unit such as `blocks.3`; of `blocks`, the model's first one, with experts if tokens are
    `routed`."""
    if unit != "blocks":
        return block_of(spec, unit)
    if spec.experts is None or not routed:
        return architecture(replace(spec, experts=None)).blocks[0]
    return next(block for block in architecture(spec).blocks if block.first(Router) is not None)
