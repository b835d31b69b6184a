"""The error of predictions against published runs, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from phalanx.report.style import empty_table
from phalanx.validate.prediction_error import Comparison

_PLACES = {
    "time": "step time",
    "memory_allocated": "allocated",
    "memory_reserved": "reserved",
    "memory_shown": "shown",
}


def _percent(value: float | None, sign: bool = False) -> str:
    return "" if value is None else f"{value:+.1f}" if sign else f"{value:.1f}"


def families(scores: Mapping[str, Any]) -> Table:
    """Tabulate the error by source family and quantity."""
    table = empty_table("predicted against published runs: error in percent")
    for name in ("family", "of", "runs", "mean", "median", "p90", "bias", "rank corr."):
        table.add_column(name, justify="left" if name in ("family", "of") else "right", no_wrap=True)
    parts = dict(scores["by_family"])
    kinds = [name.split("/")[0] for name in scores["by_kind"]]
    several = {name: of for name, of in scores["by_kind"].items() if kinds.count(name.split("/")[0]) > 1}
    lines = [(name, of, _PLACES) for name, of in parts.items()]
    lines += [(name, of, {"time": _PLACES["time"]}) for name, of in several.items()]
    lines.sort(key=lambda line: line[0].split("/")[0])
    for family, scored, places in [*lines, ("all", scores, _PLACES)]:
        for key, shown in places.items():
            e = scored[key]
            if e["n"]:
                rho = "" if e["spearman"] is None else f"{e['spearman']:.3f}"
                numbers = (_percent(e["mape"]), _percent(e["median"]), _percent(e["p90"]), _percent(e["bias"], True))
                table.add_row(family, shown, str(e["n"]), *numbers, rho)
    return table


def side_by_side(compared: Comparison) -> Table:
    """Tabulate every run: published and predicted step time, and the error."""
    table = empty_table("step time, seconds")
    for name in ("model", "GPUs", "layout", "batch x seq", "number format", "published", "predicted", "error"):
        left = ("model", "GPUs", "layout", "number format")
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "layout")
    for prediction in compared.time:
        r = prediction.row
        degrees = {n: r[n] for n in ("tp", "cp", "pp", "vpp", "ep", "dp", "mbs") if r[n] not in ("", "1")}
        layout = " ".join(f"{n}={v}" for n, v in degrees.items())
        full = " full recompute" if r["act_ckpt"].startswith("full") else ""
        table.add_row(
            r["model"],
            f"{r['gpus']} {r['gpu'].split('-')[0]}",
            layout + full,
            f"{r['gbs']} x {r['seq_len']}",
            r["precision"],
            f"{prediction.measured:.4g}",
            f"{prediction.predicted:.4g}",
            f"{100 * (prediction.predicted / prediction.measured - 1):+.1f} %",
        )
    return table


def overall(scores: Mapping[str, Any]) -> str:
    """Summarise, in sentences, the predictions of whether runs fit and of collective times."""
    lines = []
    for key, where in (("fit", "of all"), ("fit_near", "of those predicted at half to twice the card")):
        f = scores[key]
        if f["n"]:
            lines.append(
                f"fits or not: {f['accuracy']:.1f} % right {where} ({f['n']}; {f['tp']} fit and {f['tn']} do not as "
                f"predicted, {f['fp']} did not fit, {f['fn']} did after all)"
            )
    if "collectives" in scores:
        for name, e in scores["collectives"].items():
            if isinstance(e, Mapping) and e.get("n"):
                what = "all-reduce" if name == "all_reduce" else "other collectives"
                lines.append(
                    f"{what}: time off by {e['median']:.1f} % in the median, {e['mape']:.1f} % on average ({e['n']})"
                )
    return "\n".join(lines)


def reasons(scores: Mapping[str, Any]) -> Table:
    """Tabulate why rows were left out."""
    table = empty_table(f"{scores['skipped']['n']} rows left out")
    for name in ("family", "rows", "reason"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for family, counts in scores["skipped"]["reasons"].items():
        for why, count in counts.items():
            table.add_row(family, str(count), why)
    return table
