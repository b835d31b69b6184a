"""Pictures of data parallelism: a step with its buckets, FSDP's gathers and frees, prefetching, HSDP, and the bytes
that compression of gradients saves.

The events of a step are timed on two streams, as on a GPU: compute, and concurrent communication.

Collectives run one after the other in the order in which they are issued. A collective issued after a pass begins
once that pass has ended; one issued before a pass overlaps with it. A pass waits only for the gather of its own unit.
So a gather that is issued one unit ahead (`prefetch`) is hidden by the pass before its own, and gradients by the
passes that follow them. Gathered parameters are freed when their pass ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.step.expand import expand
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.planning.placement import axis_groups, default_placement
from phalanx.planning.tables import textbook
from phalanx.report.pictures.figure import (
    Arrow,
    Box,
    Diagram,
    Label,
    Lane,
    LaneBlock,
    Lines,
    Picture,
    PlotAxis,
    RuleLine,
    Series,
    Timeline,
)
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.spec import GIB, ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec, Parameter
from phalanx.spec.strategy.compressors import PLACE_BYTES, Codes, Compression, Summed
from phalanx.spec.strategy.spec import Strategy

_SHARED_UNIT = ""
"""Name for parameters that several units share, such as a tied embedding: the next pass waits for them."""


@dataclass(frozen=True)
class Timed:
    """An event with its start and end, in seconds."""

    event: Event
    start: float
    end: float


def with_times(events: Sequence[Event], seconds: Callable[[Event], float]) -> list[Timed]:
    """Return each event of a step with its start and end, in the order of the program; `seconds`: duration of an
    event without contention.

    A pass before the optimizer waits for gathers of its unit; the optimizer for everything."""
    result: list[Timed] = []
    compute = link = 0.0
    gathered: dict[str, float] = {}
    units = {event.unit for event in events if event.kind == "compute"}
    for event in events:
        took = seconds(event)
        if event.kind == "compute":
            arrived = max(gathered.pop(event.unit, 0.0), gathered.pop(_SHARED_UNIT, 0.0))
            start = max(compute, arrived, link if event.phase == "opt" else 0.0)
            compute = start + took
            result.append(Timed(event, start, compute))
            continue
        start = max(compute, link)
        link = start + took
        result.append(Timed(event, start, link))
        if event.op == "all_gather":
            gathered[event.unit if event.unit in units else _SHARED_UNIT] = link
        elif event.phase == "opt":
            compute = link
    return result


def exposed_seconds(step: Sequence[Timed]) -> float:
    """Return the seconds of a step in which nothing is computed."""
    computing = sum(t.end - t.start for t in step if t.event.kind == "compute")
    return max((t.end for t in step), default=0.0) - computing


def gathered_bytes(step: Sequence[Timed]) -> list[tuple[float, float]]:
    """Return (seconds, bytes of gathered parameters from then on) of a step that gathers units for their passes."""
    changes: list[tuple[float, float]] = [(0.0, 0.0)]
    waiting: dict[str, float] = {}
    for t in step:
        if t.event.op == "all_gather":
            changes.append((t.start, float(t.event.bytes)))
            waiting[t.event.unit] = float(t.event.bytes)
        elif t.event.kind == "compute" and t.event.unit in waiting:
            changes.append((t.end, -waiting.pop(t.event.unit)))
    total, points = 0.0, dict[float, float]()
    for at, change in sorted(changes):
        total += change
        points[at] = total  # a free and a gather at the same instant leave no dip
    return list(points.items())


_BLOCKS = 4
"""Blocks of the drawn model: more would be too small to see."""
_COMPUTE = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}
_SENT = {
    "all_gather": "all-gather of parameters",
    "reduce_scatter": "reduce-scatter of gradients",
    "all_reduce": "all-reduce of gradients",
}
_PALETTE = tuple(
    (name, name[0] if name != _SENT["all_reduce"] else "r") for name in (*_COMPUTE.values(), *_SENT.values())
)


def data_parallel_step(
    model: str = "llama3-8b", cluster: str = "dgx-h100", gpus: int = 16, seq: int = 2048
) -> Picture:
    """Draw the step of DDP: buckets are reduced during the backward pass."""
    ways = (("400", "buckets of 400 MiB: reduced as they fill"), ("100000", "one bucket: reduced at the end"))
    steps = [_step(model, cluster, gpus, seq, f"dp={gpus},zero=0,bucket={bucket}")[0] for bucket, _ in ways]
    end = max(t.end for step in steps for t in step)
    waits = [exposed_seconds(step) for step in steps]
    heads = [f"{what}; waits {wait * 1e3:.3g} ms" for (_, what), wait in zip(ways, waits, strict=True)]
    panels = [_timeline(step, head, end) for step, head in zip(steps, heads, strict=True)]
    return Picture(
        f"A data-parallel step: {_blocks_of(model)} on {gpus} GPUs of {cluster}, one sequence of {seq:,} tokens each",
        tuple(panels),
        _source(f"dp={gpus},zero=0"),
        f"Buckets hide {(1 - waits[0] / waits[1]):.0%} of what one bucket exposes: all of them but the last travel "
        "while earlier blocks still compute their gradients.",
    )


def fsdp(model: str = "llama3-8b", cluster: str = "dgx-h100", gpus: int = 16, seq: int = 4096) -> Picture:
    """Draw FSDP's (ZeRO-3's) step: units gathered, computed and freed, and the gathered bytes."""
    line = f"dp={gpus},zero=3,prefetch=1"
    step, layout = _step(model, cluster, gpus, seq, line)
    ddp, _ = _step(model, cluster, gpus, seq, f"dp={gpus},zero=0")
    points = [(at * 1e3, held / GIB) for at, held in gathered_bytes(step)]
    whole, ratio = 2 * layout.model.parameter_count / GIB, _sent(step) / _sent(ddp)
    curve = Lines(
        PlotAxis("time, ms", low=0, high=max(t.end for t in step) * 1e3),
        PlotAxis("GiB of gathered parameters on a rank", "GB", low=0),
        (
            Series("gathered", points, stairs=True),
            Series(f"all parameters: {whole:.3g} GiB", [(0, whole), (points[-1][0], whole)], dashed=True),
        ),
        head="Parameters are whole only from their gather until their pass ends",
        height=160,
    )
    return Picture(
        f"FSDP gathers and frees: {_blocks_of(model)} on {gpus} GPUs of {cluster}, {seq:,} tokens each",
        (_timeline(step, f"one step, {line}; waits {exposed_seconds(step) * 1e3:.3g} ms"), curve),
        _source(line),
        "Each unit is gathered twice, for the forward and for the backward pass, and its gradients leave as a "
        f"reduce-scatter: {ratio:.3g} times what DDP sends here, where the head stays whole between "
        "its passes, and towards 1.5 the more blocks there are.",
    )


def prefetch(model: str = "llama3-8b", cluster: str = "dgx-h100", gpus: int = 16, seq: int = 4096) -> Picture:
    """Draw FSDP with and without gathering a unit ahead."""
    steps = [_step(model, cluster, gpus, seq, f"dp={gpus},zero=3,prefetch={n}")[0] for n in (0, 1)]
    ends, waits = [max(t.end for t in step) for step in steps], [exposed_seconds(step) for step in steps]
    panels = [
        _timeline(step, f"prefetch={n}: {end * 1e3:.4g} ms, of which {wait * 1e3:.3g} ms wait", max(ends))
        for n, (step, end, wait) in enumerate(zip(steps, ends, waits, strict=True))
    ]
    return Picture(
        f"Prefetching: {_blocks_of(model)}, ZeRO-3 on {gpus} GPUs of {cluster}, {seq:,} tokens each",
        tuple(panels),
        _source(f"dp={gpus},zero=3,prefetch=0|1"),
        f"With a gather issued one unit ahead, {1 - waits[1] / waits[0]:.0%} of the waiting goes; the price is a "
        "second unit's parameters in memory.",
    )


def hsdp(cluster: str = "dgx-h100", gpus: int = 32) -> Picture:
    """Draw HSDP: shards inside nodes, replicas across them, and what travels over each."""
    node = cluster_named(cluster)(1).ranks_per_node
    if gpus % node or not 2 <= gpus // node <= 4 or node > 8:
        remedy = f"use {2 * node}, of nodes of 8 GPUs at most"
        raise InputError("gpus", gpus, f"is not 2 to 4 nodes of {node}", remedy)
    s = _strategy(f"dp={gpus},zero=3,shard={node}")
    placed = default_placement(s, cluster_named(cluster)(gpus))
    groups = {g.axis: g for g in axis_groups(placed)}
    shards, copies = placed.mesh.groups("dp_shard"), placed.mesh.groups("dp_replicate")
    items: list[Box | Arrow | Label] = []
    for i, ranks in enumerate(shards.tolist()):
        y = 5 * i
        items.append(Box(0, y, 79, 5))
        items.append(Label(2, y + 2, f"node {i}"))
        for j, rank in enumerate(ranks):
            items.append(Box(11 + 8 * j, y + 1, 8, 3, (f"{rank}: s{j}",), j))
    lowest = 5 * len(shards) + 1
    shard, replicate = groups["dp_shard"], groups["dp_replicate"]
    words = (
        f"dp_shard: {shard.groups} groups of {node}, over {shard.tier}: all-gather, reduce-scatter",
        f"dp_replicate: {replicate.groups} groups of {len(shards)}, over {replicate.tier}: all-reduce of a shard",
        f"such as ranks {', '.join(map(str, copies[0].tolist()))}: all hold shard s0",
    )
    items += [Label(0, lowest + i, line) for i, line in enumerate(words)]
    return Picture(
        f"HSDP on {gpus} GPUs of {cluster}: shards inside a node, copies of a shard across nodes",
        (Diagram(tuple(items)),),
        f"`phalanx tables mesh --strategy {s} --cluster {cluster}`",
        f"Across nodes a rank sends gradients of its shard alone: 1/{node} of them, where ZeRO-3 over all ranks "
        "gathers all parameters across.",
    )


def _strategy(line: str) -> Strategy:
    s = make_strategy(line)
    assert s is not None
    return s


def _blocks_of(model: str) -> str:
    return f"{_BLOCKS} blocks of {model}"


def _source(line: str) -> str:
    return (
        f"the StepProgram of {line} that `phalanx verify` compares with the real step, timed with the rates that "
        "`phalanx predict` uses, on two streams"
    )


def _step(model: str, cluster: str, gpus: int, seq: int, line: str) -> tuple[list[Timed], Layout]:
    """Return the events of a step with their times. Raises InputError."""
    if gpus < 2:
        raise InputError("gpus", gpus, "sends nothing", "use 2 or more")
    spec, _ = model_named(model)
    if spec.experts is not None:
        raise InputError("model", model, "has experts, which this picture leaves out", "name a dense model")
    small: ModelSpec = replace(spec, layers=min(_BLOCKS, spec.layers), window_layers=None)
    layout = Layout(small, Job(gpus, seq, Precision("bfloat16", reduce="bfloat16")), _strategy(line))
    there = cluster_named(cluster)(gpus)
    return with_times(expand(layout.stage_view()).events, _seconds(there)), layout


def _seconds(cluster: ClusterSpec) -> Callable[[Event], float]:
    """Return a function from an event to its seconds: products at the rate of kernels, collectives as in NCCL."""
    system = system_of(cluster)
    rate = float(system.peak_bf16) * float(system.gemm)

    def seconds(event: Event) -> float:
        if event.kind == "compute":
            return event.flops / rate
        return float(collective_s(event.op, float(event.bytes), event.group_size, 1, system))

    return seconds


def _sent(step: Sequence[Timed]) -> float:
    """Return the bytes of parameters and gradients that a rank sends, where an all-reduce counts its buffer twice."""
    events = [t.event for t in step if t.event.kind == "collective" and t.event.unit != "metrics"]
    return float(sum(e.bytes * (2 if e.op == "all_reduce" else 1) for e in events))


def _timeline(step: Sequence[Timed], head: str, end: float | None = None) -> Timeline:
    compute, link = [], []
    for t in step:
        if t.end <= t.start or t.event.unit == "metrics":
            continue
        name = t.event.unit.removeprefix("blocks.").removeprefix("bucket.")
        if t.event.kind == "compute":
            compute.append(LaneBlock(t.start * 1e3, t.end * 1e3, name, _COMPUTE[t.event.op]))
        else:
            link.append(LaneBlock(t.start * 1e3, t.end * 1e3, name, _SENT[t.event.op]))
    lanes = (Lane("compute", compute), Lane("links", link))
    return Timeline("time, ms", lanes, head, None if end is None else end * 1e3, _PALETTE)


_COMPRESSED_RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
_SIDE = 4096
_MATRIX = Parameter("blocks.0.attention.q.weight", (_SIDE, _SIDE), "column", "blocks.0")
"""The matrix that PowerSGD factors here; its saving depends on the shape."""


def compression() -> Picture:
    """Draw the ratio of the bytes sent in an fp32 ring all-reduce to those under each compressor, over ranks."""
    chosen = (
        ("bf16", Compression("bf16")),
        ("int8", Compression("int8")),
        ("int4", Compression("int4")),
        ("randk:0.01", Compression("randk", 0.01)),
        ("powersgd:4", Compression("powersgd", 4)),
        ("powersgd:32", Compression("powersgd", 32)),
        ("topk:0.01", Compression("topk", 0.01)),
    )
    curves = [Series(name, [(p, times_less(c)(p)) for p in _COMPRESSED_RANKS], dots=True) for name, c in chosen]
    taught = {int(row[0]): float(row[3]) for row in textbook.top_k(1e9, _COMPRESSED_RANKS, 0.01).rows}
    wide = textbook.PLACE_BYTES
    curves.append(Series(f"topk:0.01, places of {wide} bytes", list(taught.items()), dots=True))
    panel = Lines(
        PlotAxis("ranks that reduce together", "count", log=True, base=2, low=2, high=256),
        PlotAxis("times less than a ring all-reduce in fp32 sends", "count", log=True),
        tuple(curves),
        rules=(RuleLine("y", 1.0, "no less than without"),),
        height=340,
    )
    four, thirty_two = (times_less(Compression("powersgd", r))(8) for r in (4, 32))
    own = times_less(Compression("topk", 0.01))
    return Picture(
        "Compression of gradients: what it saves on the wire",
        (panel,),
        "the table of compressors that parses, sends and prices them (spec/strategy/compressors.py); top-k with the "
        "int64 places of torch.topk: `phalanx tables comm --params N --top-k 0.01`",
        f"What every rank chooses for itself travels by all-gather: top 1 % saves {own(2):.3g} times at 2 ranks and "
        f"{own(64):.3g} at 64 ({taught[2]:.3g} and {taught[64]:.3g} with places of {wide} bytes). PowerSGD of a "
        f"{_SIDE:,} x {_SIDE:,} matrix: {four:.0f} times less at rank 4, {thirty_two:.0f} at rank 32.",
    )


def times_less(c: Compression) -> Callable[[int], float]:
    """Return a function from ranks to the bytes that each sends in an fp32 ring all-reduce over those under `c`."""
    row = c.row
    if isinstance(row, Codes):  # an all-to-all and an all-gather: the same (p-1)/p twice
        return lambda p: 4 / row.bytes_per_element
    if isinstance(row, Summed):
        return lambda p: 1 / row.share(c, [_MATRIX])
    return lambda p: 2 * 4 / p / (row.share(c, p) * (4 + PLACE_BYTES))
