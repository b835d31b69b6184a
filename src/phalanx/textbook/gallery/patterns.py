"""Pictures of the ways to divide a training: the steps of data parallelism, stages in a row, the bytes that each way
sends on one scale, and the nested levels of a mesh."""

from dataclasses import replace
from math import prod

from phalanx.planning.explain.traffic import flows
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.placement import default_placement
from phalanx.report.pictures.figure import Arrow, Bar, Bars, Box, Diagram, Label, Picture
from phalanx.report.pictures.numbers import short
from phalanx.schedule.pipeline.stages import blocks_of, stream
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy

_RANKS = 4
"""Ranks side by side on a page."""


def data_parallelism(batch: int = 32) -> Picture:
    """Draw the six steps of data parallelism over four ranks."""
    if batch % _RANKS:
        raise InputError("batch", batch, f"is not a multiple of {_RANKS} ranks", "use 32")
    each = batch // _RANKS
    items: list[Box | Arrow | Label] = [Box(0, 0, 79, 3, (f"a batch of {batch} sequences, cut by rank",))]
    steps = ("copy of the model", "forward: loss", "backward")
    for r in range(_RANKS):
        x, middle = 20 * r, 20 * r + 9
        rows = (f"{r * each} to {(r + 1) * each - 1}", *steps)
        for i, words in enumerate(rows):
            items += [Arrow(((middle, 3 + 5 * i), (middle, 4 + 5 * i))), Box(x, 5 + 5 * i, 19, 3, (words,), r)]
        items += [Arrow(((middle, 23), (middle, 24)), 2), Arrow(((middle, 28), (middle, 29)))]
        items.append(Box(x, 30, 19, 3, ("the same update",), r))
    items.append(Box(0, 25, 79, 3, ("all-reduce: the mean of the gradients, on every rank",)))
    return Picture(
        f"Data parallelism over {_RANKS} ranks: cut the batch, copy the model, average the gradients",
        (Diagram(tuple(items)),),
        "Li et al. 2020 (PyTorch DDP); `phalanx parity` and examples/listings/ddp.py compare it with one process",
        "Copies start equal and take equal updates, so weights are never sent again. Only gradients are: as many as "
        "the model has parameters, whatever the batch.",
    )


def stages(model: str = "llama3-8b", ranks: int = 4, seq: int = 8192) -> Picture:
    """Draw the stages of a pipeline in a row: activations go forward, gradients back."""
    spec, _ = model_named(model)
    if ranks not in (2, 3, 4):
        raise InputError("ranks", ranks, "does not fit the page", "use 2 to 4")
    s = Strategy(pp=ranks)
    counts = blocks_of(spec, s)
    rows = stream(spec, Job(1, seq, Precision("bfloat16")), s)
    sent = 2.0 * prod(rows)
    items: list[Box | Arrow | Label] = []
    at = 0
    for r, count in enumerate(counts):
        x = 21 * r
        ends = (
            ["embedding"] * (r == 0)
            + [f"blocks {at}-{at + count - 1}"] * bool(count)
            + ["head, loss"] * (r == ranks - 1)
        )
        items.append(Box(x, 2, 15, 6, (f"stage {r}", *ends), r))
        if r:
            items += [Arrow(((x - 6, 3), (x - 1, 3))), Arrow(((x - 1, 6), (x - 6, 6)))]
        at += count
    items += [Label(0, 0, "forward: activations to the right"), Label(0, 9, "backward: gradients to the left")]
    shape = " x ".join(f"{size:,}" for size in rows)
    return Picture(
        f"A pipeline of {ranks} stages of {model}: each rank has some of the layers",
        (Diagram(tuple(items)),),
        "the split of `phalanx plan` (schedule/pipeline/stages.py), equal in multiplied weights, the head among them",
        f"Each arrow is the hidden states of a micro-batch, {shape} in bf16: {short(sent, 'bytes')}, "
        "however large the layers are. `phalanx learn draw pipelines` shows when each stage works.",
    )


def patterns(model: str = "mixtral-8x7b", cluster: str = "dgx-h100", batch: int = 8, seq: int = 4096) -> Picture:
    """Draw the bytes that each way of dividing a model over 8 GPUs sends, on one scale."""
    spec, _ = model_named(model)
    pricing = pricing_by_gpus(spec, cluster_named(cluster), batch, seq, "megatron-core")(8)
    etp = 8 if spec.experts is not None else 1  # an expert's matrices are cut like the others
    ways = {
        "data (DDP)": (Strategy(dp=8), "copies", "gradients, once a step"),
        "sharded data (FSDP)": (
            Strategy(dp=8, zero=3),
            "1/8 of weights, gradients, state",
            "weights twice, gradients",
        ),
        "tensor": (Strategy(tp=8, etp=etp), "1/8 of every matrix", "hidden states, in every layer"),
        "tensor and sequence": (
            Strategy(tp=8, sp=True, etp=etp),
            "the same, tokens in between",
            "the same, in two halves",
        ),
        "pipeline": (Strategy(pp=8), "1/8 of the layers", "hidden states, between stages"),
        "context": (Strategy(cp=8), "copies; 1/8 of each sequence", "keys and values; gradients"),
    }
    if spec.experts is not None:
        ways["expert"] = (Strategy(dp=8, ep=8), "1/8 of the experts", "tokens; gradients of the rest")
    bars = []
    for name, (s, has, sends) in ways.items():
        s = replace(s, micro_batch=max(1, batch // s.dp) if s.pp == 1 else 1)
        by_axis: dict[str, float] = {}
        for row in flows(pricing, s):
            axis = {"edp": "dp", "etp": "tp", "ring": "cp"}.get(row.axis, row.axis)
            by_axis[axis] = by_axis.get(axis, 0.0) + row.sent / 2**30
        parts = [(axis, by_axis.get(axis, 0.0)) for axis in ("dp", "tp", "pp", "cp", "ep")]
        bars.append(Bar(name, parts, f"{sum(by_axis.values()):.3g} GiB", heading=f"a rank has {has}; sends {sends}"))
    return Picture(
        f"What each way of dividing {model} over 8 GPUs sends, on one scale",
        (Bars("GiB that a rank sends in a step", tuple(bars)),),
        f"`phalanx tables comm` under megatron-core (gradients in fp32): {batch} sequences of {seq:,} tokens",
        "Data parallelism sends by the size of the model, the others by the tokens: with more tokens a step they "
        "grow, and it does not. Sharded, it gathers weights of 2 bytes twice and sums gradients of 4 "
        "bytes without sending them back: as much here, and half as much again where gradients take 2 bytes too.",
    )


def levels(cluster: str = "dgx-h100") -> Picture:
    """Draw 16 ranks as pipeline stages around replicas around tensor-parallel ranks, on their nodes."""
    s = Strategy(pp=2, dp=2, tp=4, ep=2)
    placed = default_placement(s, cluster_named(cluster)(16))
    items: list[Box | Arrow | Label] = []
    experts = {int(rank): group for group in placed.mesh.groups("ep") for rank in group}
    for pp in range(2):
        x = 40 * pp
        items.append(Box(x, 0, 39, 21))
        items.append(Label(x + 2, 1, f"pp {pp}: half of the layers", strong=True))
        for dp in range(2):
            y = 3 + 9 * dp
            items.append(Box(x + 2, y, 35, 8))
            items.append(Label(x + 4, y + 1, f"dp {dp}: half of the batch"))
            for tp in range(4):
                rank = pp * 8 + dp * 4 + tp
                node = placed.where(rank).split(",")[0]
                items.append(Box(x + 4 + 8 * tp, y + 3, 8, 4, (f"r {rank}", node), tp))
    items.append(Label(2, 22, "one colour: the same part of every matrix (tp)"))
    pair = " and ".join(str(int(r)) for r in experts[0])
    items.append(Label(2, 23, f"ep: ranks {pair}, and every such pair, have half of the experts each"))
    return Picture(
        f"Levels of a mesh: {s} on {' and '.join(placed.topology.hosts[:2])}",
        (Diagram(tuple(items)),),
        f"`phalanx tables mesh --strategy {s} --cluster {cluster}`: the mesh that the trainer makes its groups of",
        "The innermost axis talks most and has neighbouring ranks, so tp stays inside a node, and stages, which send "
        "least, are on different ones. Experts are no level of their own: ep takes the innermost ranks of dp and tp "
        "again.",
    )
