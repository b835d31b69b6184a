"""Predict and measure the bytes and FLOPs of a unit's passes on one rank."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import RankPass
from phalanx.cost.memory import footprint
from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.live_bytes import Pass
from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.trainer.step import FakeRank
from phalanx.runtime.autograd.deferred_weight_grads import GroupedProduct, Product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import RunningPass
from phalanx.runtime.tracing.instrument import instrument
from phalanx.schedule.event import Phase
from phalanx.schedule.layers import collectives, context
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import ExpertTraffic, expert_traffic
from phalanx.schedule.layout import repeat_of
from phalanx.spec.job import DTYPE_BYTES, DType, Job
from phalanx.spec.model.blocks.lowering import block_of
from phalanx.spec.model.blocks.operators import Router
from phalanx.spec.model.spec import ModelSpec, units
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model
from support.split_backward_cases import Part, batches

PLACED: DType = "float32"


Key = tuple[str, str]
"""Phase and unit."""


LAYOUTS = [
    Strategy(),
    Strategy(tp=2),
    Strategy(tp=2, sp=True),
    Strategy(cp=2),
    Strategy(cp=2, ulysses=2),
    Strategy(tp=2, sp=True, cp=2),
    Strategy(tp=2, cp=4, ulysses=2),
]


@dataclass
class Found:
    passes: dict[Key, Pass]
    flops: dict[Key, int]
    sent: dict[Key, list[tuple[str, int]]]
    peak: int = 0


def measured(spec: ModelSpec, job: Job, s: Strategy, rank: int, split: bool) -> Found:
    """Measure one micro-batch forward, and backward in two parts or in one."""
    comm = Comm(FakeRank(rank, s.world, 0, 1), mesh(s), null=True)
    part = Part(spec, job, s, comm)
    part.splits()
    (batch,) = batches(spec, job, s, part, 1)
    if job.documents == "packed":
        part.model.prepare(job.seq)

    places = {id(p): torch.empty(p.shape, dtype=torch.float32) for p in part.model.parameters()}

    def deliver(
        p: nn.Parameter, gradient: Tensor | Product | GroupedProduct | None, rows: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Deliver a gradient like an engine that stores gradients in memory of its own type."""
        if isinstance(gradient, Product | GroupedProduct):
            gradient.write(places[id(p)], add=True)
        while rows:
            index, values = rows[-1]
            values.to(torch.float32)
            del index, values
            rows.pop()

    def hook(p: nn.Parameter) -> None:
        products: list[Product] = p.gradient_products  # type: ignore[attr-defined]
        deliver(p, products.pop() if products else None, p.gradient_rows)  # type: ignore[attr-defined]
        p.grad = None

    for p in part.model.parameters():
        p.gradient_rows = []  # type: ignore[attr-defined]
        p.gradient_products = []  # type: ignore[attr-defined]
        p.register_post_accumulate_grad_hook(hook)
    gc.collect()
    with instrument(part.model.units(), comm.recorder, lambda: RunningPass(0, "B")) as tracker:
        loss = part.forward(batch)
        if split:
            left = part.inputs(loss)
            del loss
            for unit, gradients in left:
                comm.recorder.compute("weight_grad", "W", unit, 0, "")
                gradients(deliver)
        else:
            loss.backward()
            del loss
        comm.recorder.compute("over", "opt", "", None, "")
    found = Found({}, {}, defaultdict(list), tracker.peak)
    for e in comm.recorder.events:
        if e.phase == "opt":
            continue
        if e.kind == "compute":
            key = ("I" if split and e.phase == "B" else e.phase, e.unit)
            found.passes[key], found.flops[key] = Pass(e.alloc, e.alloc - e.free), e.flops
        else:
            found.sent[e.phase, e.unit].append((e.op, e.bytes))
    del part
    return found


def predicted(spec: ModelSpec, job: Job, s: Strategy, rank: int, split: bool) -> Found:
    held, part = local_model(spec, s), Context(job.seq, s.ring, s.ulysses)
    t, e = s.micro_batch * part.tokens, DTYPE_BYTES[job.precision.compute]
    core = Core(held, job, t, part, int(mesh(s).along("ring")[rank])) if part.parallel else None
    apart = footprint.documents(held, job, t, part)
    last_use = {f"blocks.{i}": size for i, size in apart.items()}
    stream = t // (s.tp if s.sp else 1) * held.hidden * e
    found = Found({}, {}, defaultdict(list))
    phases: tuple[Phase, ...] = ("F", "I", "W") if split else ("F", "B")
    for unit in units(spec):
        kind, repeat = unit.split(".")[0], repeat_of(s, unit)
        unit_held = footprint.footprint(held, unit, t, job.seq, job, PLACED, s.tp, s.sp, repeat, core, in_parts=True)
        made = held_back = 0
        if kind == "embed" and apart:
            held_back = sum(apart.values())
            made = held_back + (t * job.seq if core is None else core.first_visible_temporary())
        forward = unit_held.kept + max(int(unit_held.forward), made)
        freed = {"embed": -stream, "blocks": 0, "head": stream}[kind] + unit_held.kept
        assert unit_held.parts is not None
        passes = {
            "F": Pass(forward, unit_held.kept + held_back),
            "B": Pass(unit_held.backward, unit_held.leaves - freed, unit_held.masked),
            "I": unit_held.parts.inputs,
            "W": unit_held.parts.weights,
        }
        flops = flops_of(spec, job, s, unit, t)
        for phase in phases:
            masks = last_use.get(unit, 0) if phase in "BI" else 0
            p = passes[phase]
            found.passes[phase, unit] = Pass(max(p.masked, p.highest - masks), p.change - masks)
            found.flops[phase, unit] = flops[phase]
            found.sent[phase, unit] = list(sends(spec, job, s, unit, phase, t))
    return found


def flops_of(spec: ModelSpec, job: Job, s: Strategy, unit: str, t: int) -> dict[Phase, int]:
    p = RankPass(t, job.seq, DTYPE_BYTES[job.precision.compute], s, rows_of(spec, s, unit, t))
    again = unit_work.recomputed_work(spec, unit, repeat_of(s, unit), p).flops
    return {
        "F": unit_work.forward(spec, unit, p).flops,
        "B": unit_work.backward(spec, unit, p).flops + again,
        "I": unit_work.input_grad(spec, unit, p).flops + again,
        "W": unit_work.weight_grad(spec, unit, p).flops,
    }


def rows_of(spec: ModelSpec, s: Strategy, unit: str, t: int) -> ExpertTraffic | None:
    route = block_of(spec, unit).first(Router) if unit.startswith("blocks") else None
    return None if route is None else expert_traffic(route, s, t)


def sends(spec: ModelSpec, job: Job, s: Strategy, unit: str, phase: Phase, t: int) -> Iterator[tuple[str, int]]:
    repeat, rows = repeat_of(s, unit), rows_of(spec, s, unit, t)
    for x in collectives.communication(spec, job, s, unit, phase, t, repeat, rows, splits=True):
        if isinstance(x, collectives.CoreRuns):
            for y in context.communication(x.op, x.sublayer, s, job.precision.compute, x.way, t):
                yield y.op, y.bytes
        else:
            yield from [(x.op, x.bytes // x.count)] * x.count


def compare(case: Any, split: bool) -> None:
    got, want = measured(*case, split), predicted(*case, split)
    assert got.passes.keys() == want.passes.keys()
    slack = SLACK_BYTES + 1e-5 * got.peak
    for key, real in got.passes.items():
        assert abs(real.highest - want.passes[key].highest) < slack, (key, real, want.passes[key])
        assert abs(real.change - want.passes[key].change) < slack, (key, real, want.passes[key])
    assert got.flops == want.flops
    assert got.sent == {key: own for key, own in want.sent.items() if own}
