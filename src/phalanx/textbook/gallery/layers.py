"""Pictures of layers over ranks: the parts of matrices, the activations that sp splits by tokens, and the cost of
tensor parallelism."""

from collections.abc import Sequence

from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search.priced import price
from phalanx.report.pictures.figure import Arrow, Box, Diagram, Label, Lines, Picture, PlotAxis, RuleLine, Series
from phalanx.schedule.layers.collectives import CoreRuns, communication
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import ParameterBox, Split, require_split

Items = list[Box | Arrow | Label]


def _tp(ranks: int, sp: bool = False) -> Strategy:
    return Strategy(tp=ranks, sp=sp)


def _boxes(spec: ModelSpec, ranks: int, name: str) -> list[ParameterBox]:
    """Return the box of a parameter on each tp rank."""
    return [Split.of(spec, _tp(ranks), tp=rank).box(name) for rank in range(ranks)]


def _columns(x: int, y: int, high: int, names: Sequence[str]) -> list[Box]:
    """Return the boxes of a matrix cut into columns, one for each rank."""
    return [Box(x + 7 * r, y, 7, high, tuple(name.split()), r) for r, name in enumerate(names)]


def _rows(x: int, y: int, wide: int, names: Sequence[str]) -> list[Box]:
    """Return the boxes of a matrix cut into rows, one for each rank."""
    return [Box(x, y + 3 * r, wide, 3, (name,), r) for r, name in enumerate(names)]


def _products(column: Sequence[ParameterBox], row: Sequence[ParameterBox]) -> Items:
    """Draw X W = Y with W cut into columns, then Y V = Z with V cut into rows: the parts of each rank in its colour.
    Weights are stored as (out, in), so that their columns here are their rows in memory."""
    ranks = len(column)
    (wide, narrow), cut = column[0].parameter.shape, range(ranks)
    high, middle = 3 * ranks, 3 * ranks // 2
    parts = 7 * ranks
    items: Items = [Label(0, 0, f"column-parallel: W ({narrow:,} x {wide:,}) by columns, so Y too; nothing is sent")]
    items += [Box(0, 1, 14, high, ("X", "whole", f"n x {narrow:,}")), Label(16, 1 + middle, "x")]
    items += [
        *_columns(19, 1, high, [f"W{r} {_span(column[r], 0).replace('-', ' to ')}" for r in cut]),
        Label(21 + parts, 1 + middle, "="),
    ]
    items += _columns(24 + parts, 1, high, [f"Y{r} X W{r}" for r in cut])
    y = high + 2
    items.append(Label(0, y, f"row-parallel: V ({wide:,} x {narrow:,}) by rows; the products are added"))
    items += [*_columns(0, y + 1, high, [f"Y{r}" for r in cut]), Label(2 + parts, y + 1 + middle, "x")]
    items += _rows(5 + parts, y + 1, 16, [f"V{r} {_span(row[r], 1)}" for r in cut])
    items += [
        Label(23 + parts, y + 1 + middle, "="),
        Box(26 + parts, y + 1, 24, high, ("Z: all-reduce of", "the sum of Yr Vr")),
    ]
    return items


def _span(box: ParameterBox, dim: int) -> str:
    return f"{box.offsets[dim]}-{box.offsets[dim] + box.sizes[dim] - 1}"


def partition(model: str = "llama3-8b", ranks: int = 4) -> Picture:
    """Draw the parts of a column- and a row-parallel matrix, of the MLP and of attention that each tp rank holds."""
    spec, _ = model_named(model)
    if ranks not in (2, 4):
        raise InputError("ranks", ranks, "does not fit the page", "use 2 or 4")
    if spec.experts is not None or spec.latent is not None:
        raise InputError("model", model, "has other matrices than this picture", "name a dense model")
    require_split(spec, _tp(ranks))
    column, row = (_boxes(spec, ranks, f"blocks.0.mlp.{name}.weight") for name in ("up", "down"))
    local = Split.of(spec, _tp(ranks)).local
    chain: Items = []
    heads = f"{local.heads} of {spec.heads} heads"
    rows_ = (
        ("MLP", f"{'gate, up' if spec.gated else 'up'}: {local.ffn}", "activation", "down", f"of {spec.ffn}"),
        ("attention", "q, k, v", heads, "o", f"k, v: {local.kv_heads} of {spec.kv_heads} heads"),
    )
    for place, (what, first, middle, last, whole) in enumerate(rows_):
        y = (ranks * 3 + 3) * place
        chain.append(Label(0, y, f"{what} ({whole}): one all-reduce forward, one backward"))
        chain.append(Box(0, y + 1, 9, 3 * ranks, ("X", "whole")))
        chain.append(Box(70, y + 1, 9, 3 * ranks, ("sum",)))
        for r in range(ranks):
            at = y + 1 + 3 * r
            chain += [Box(12, at, 20, 3, (first,), r), Box(34, at, 19, 3, (middle,), r)]
            chain.append(Box(55, at, 12, 3, (last,), r))
            chain += [Arrow(((x, at + 1), (x + 1, at + 1))) for x in (9, 32, 53, 67)]
            chain[-1] = Arrow(((67, at + 1), (69, at + 1)))
            chain[-4] = Arrow(((9, at + 1), (11, at + 1)))
    return Picture(
        f"How {ranks} tensor-parallel ranks cut the matrices of {model}",
        (
            Diagram(tuple(_products(column, row)), "X W = Y by columns of W, then Y V = Z by rows of V"),
            Diagram(tuple(chain), "Column, then row: what happens in between stays on its rank"),
        ),
        "the split that the runtime, its memory and `phalanx verify` use (spec/strategy/split.py); "
        "Shoeybi et al. 2019",
        "Each colour is a rank; W is mlp.up, V mlp.down, n tokens. X and Z are the same on all ranks. A weight is "
        "stored as (out, in), so in memory W is cut by rows.",
    )


def sequence_parallel(model: str = "llama3-8b", ranks: int = 4, seq: int = 8192) -> Picture:
    """Draw the activations that sequence parallelism cuts by tokens, and the collectives between the two cuts."""
    spec, _ = model_named(model)
    if spec.experts is not None or spec.residual != "serial":
        what = "experts" if spec.experts is not None else "attention and MLP side by side"
        raise InputError("model", model, f"has {what}, which sends otherwise than drawn", "name another")
    require_split(spec, _tp(ranks) if ranks in (2, 4) else _tp(1))
    if ranks not in (2, 4) or seq % ranks:
        raise InputError("ranks", ranks, "does not fit the page or the sequence", "use 2 or 4, a divisor of --seq")
    local = Split.of(spec, _tp(ranks)).local
    rank_tokens = seq // ranks
    job = Job(1, seq, Precision("bfloat16"))
    sent = [
        x for x in communication(spec, job, _tp(ranks, True), "blocks.0", "F", seq) if not isinstance(x, CoreRuns)
    ]
    kinds = list(dict.fromkeys(x.op for x in sent))
    assert [x.op for x in sent] == kinds * 2, sent  # gather, scatter; gather, scatter
    items: Items = []
    stages = (
        ("norm", ""),
        ("attention", f"{local.heads} heads"),
        ("norm, residual", ""),
        ("MLP", f"{local.ffn} wide"),
    )
    for k, (words, cut) in enumerate(stages):
        x = 21 * k
        for r in range(ranks):
            part = cut or f"{r * rank_tokens}-{(r + 1) * rank_tokens - 1}"
            tokens = f"all {seq}" if cut else "tokens"
            items.append(Box(x, 1 + 5 * r, 16, 5, (words, tokens, part), r))
            items += [Arrow(((x - 5, 3 + 5 * r), (x - 1, 3 + 5 * r)))] if k else []
    for k, x_ in enumerate(sent[:3]):
        word = {"all_gather": "gather", "reduce_scatter": "scatter"}[x_.op]
        items.append(Label(21 * k + 15, 0, word))
    rows_ = 2 + 5 * ranks
    items.append(Label(0, rows_, "gather: all-gather of tokens; scatter: reduce-scatter, also behind the MLP"))
    items.append(
        Label(0, rows_ + 1, f"each of them moves {float(sent[0].bytes) / 2**20:g} MiB, as nccl-tests counts")
    )
    without = [x for x in communication(spec, job, _tp(ranks), "blocks.0", "F", seq) if not isinstance(x, CoreRuns)]
    return Picture(
        f"Sequence parallelism along with tensor parallelism: a block of {model} over {ranks} ranks",
        (Diagram(tuple(items)),),
        "the collectives that a block's forward pass sends (schedule/layers/collectives.py), as `phalanx verify` "
        "records them; Korthikanti et al. 2022",
        f"Without sp: {len(without)} all-reduces of {float(without[0].bytes) / 2**20:g} MiB in the same places. "
        "An all-reduce is a reduce-scatter and an all-gather, so the bytes are the same; what lies between is cut "
        "by tokens.",
    )


_LINKS = (("dgx-b200", "NVLink 5"), ("dgx-h100", "NVLink 4"), ("dgx-a100", "NVLink 3"), ("pcie-a100", "PCIe 4"))


def tp_efficiency(model: str = "llama3-70b", seq: int = 4096) -> Picture:
    """Draw the share of a step that tensor parallelism computes, over its degree, on each kind of links."""
    spec, _ = model_named(model)
    degrees = [t for t in (1, 2, 4, 8, 16, 32) if spec.heads % t == 0]
    if len(degrees) < 2:
        raise InputError("model", model, f"has {spec.heads} heads, which no degree divides", "name another")
    curves = []
    for name, links in _LINKS:
        points = []
        for t in degrees:
            asked = pricing_by_gpus(spec, cluster_named(name), 1, seq, "megatron-core")(t)
            terms = price(asked, [_tp(t, t > 1)])[0].terms
            points.append((float(t), terms["matmul"] + terms["attention"] + terms["memory"] + terms["tp"]))
        alone = points[0][1]
        curves.append(Series(f"{links} ({name})", [(t, alone / t / seconds) for t, seconds in points], dots=True))
    panel = Lines(
        PlotAxis("tp: ranks that share a layer", "count", log=True, base=2, low=1, high=float(degrees[-1])),
        PlotAxis("efficiency: time on one GPU / (tp x time on tp GPUs)", "share", low=0.0, high=1.05),
        tuple(curves),
        rules=(RuleLine("x", 8.0, "a node ends"),),
    )
    return Picture(
        f"Efficiency of tensor parallelism over its degree: {model}, {seq:,} tokens",
        (panel,),
        "`phalanx predict --strategy tp=T,sp=1` under megatron-core: products, attention, memory-bound work and tp's "
        "exposed messages; fitted on published runs",
        "Beyond a node every message crosses the network. Smaller pieces of products also run below their best rate.",
    )
