"""Pictures of scaling: efficiency over the number of GPUs, and the share that each cause costs."""

from collections.abc import Sequence
from functools import cache

from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search import HEADROOM
from phalanx.planning.tables import scaling as tables
from phalanx.planning.tables.table import Sheet
from phalanx.report.pictures.figure import Bar, Bars, Lines, Picture, PlotAxis, Series
from phalanx.spec.errors import InputError

_LOST = ("communication", "bubble", "imbalance", "computing")


def scaling(
    model: str = "llama3-8b", cluster: str = "dgx-h100", gpus: int = 256, batch: int = 512, seq: int = 4096
) -> Picture:
    """Draw strong and weak scaling, and the share of the step that each cause costs."""
    counts = tuple(n for n in (8, 16, 32, 64, 128, 256, 512, 1024) if n <= gpus)
    if not counts:
        raise InputError("gpus", gpus, "is less than one node of 8", "ask for 8 or more")
    question = f"{model} on {cluster}, {batch:,} x {seq:,} tokens"
    return scaling_of(_scaling_sheets(model, cluster, counts, batch, seq), question)


@cache
def _scaling_sheets(model: str, cluster: str, counts: tuple[int, ...], batch: int, seq: int) -> tuple[Sheet, ...]:
    asked = pricing_by_gpus(model_named(model)[0], cluster_named(cluster), batch, seq, "megatron-core", HEADROOM)
    return tuple(tables.by_gpus(asked, counts, weak) for weak in (False, True))


def scaling_of(sheets: Sequence[Sheet], question: str) -> Picture:
    """Draw sheets of planning/tables/scaling.py: strong and weak scaling, then efficiency by batch. Raises InputError
    where nothing fits."""
    curves, panels = [], []
    for sheet, name in zip(sheets[:2], ("strong: one batch", "weak: the batch grows"), strict=False):
        rows = [r for r in sheet.records() if r["efficiency"] is not None]
        if not rows:
            raise InputError("save", None, "has nothing to draw: no number of GPUs has a strategy that fits")
        curves.append(Series(name, [(float(r["gpus"]), r["efficiency"]) for r in rows], dots=True))
        bars = []
        for r in rows:
            parts = [(cause, max(0.0, r[cause]) * 100) for cause in _LOST]
            kept = 100 - sum(value for _, value in parts)
            efficient = f"{r['efficiency']:.0%} efficient"
            text = f"{efficient}: {r['strategy']}"
            shares = (("computes as in the first row", kept), *parts)
            bars.append(Bar(f"{r['gpus']:,}", shares, text if len(text) < 48 else efficient))
        panels.append(Bars("% of the step", tuple(bars), head=f"{name}, by GPUs: what each cause takes of a step"))
    extra = []
    for sheet in sheets[2:]:
        rows = [r for r in sheet.records() if r["efficiency"] is not None]
        of_batch = [
            Series(n, [(float(r["batch"]), r[n.lower()]) for r in rows], dots=True) for n in ("efficiency", "MFU")
        ]
        if len(rows) > 1:
            x = PlotAxis("batch: sequences of a step", "count", log=True, base=2)
            extra.append(Lines(x, PlotAxis("share", "share", low=0.0), tuple(of_batch), head=sheet.title, height=200))
    most = max(x for s in curves for x, _ in s.points)
    least = min(x for s in curves for x, _ in s.points)
    plot = Lines(
        PlotAxis("GPUs", "count", log=True, base=2, low=least, high=max(most, 2 * least)),
        PlotAxis("efficiency: tokens/s of a GPU over that of the first row", "share", low=0.0),
        tuple(curves),
        height=220,
    )
    return Picture(
        f"Scaling of {question}",
        (plot, *panels, *extra),
        "`phalanx tables scaling`: the best strategy of the search at each number of GPUs",
        "Computing: smaller pieces, or more of them repeated, than in the first row.",
    )
