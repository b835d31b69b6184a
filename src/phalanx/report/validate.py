"""The error of predictions against published runs, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from phalanx.report.style import empty_table
from phalanx.validate.prediction_error import PredictionError

_PLACES = {
    "time": "step time",
    "memory_allocated": "allocated",
    "memory_reserved": "reserved",
    "memory_shown": "shown",
}


def _percent(value: float | None, sign: bool = False) -> str:
    return "" if value is None else f"{value:+.1f}" if sign else f"{value:.1f}"


def families(scores: Mapping[str, Any]) -> Table:
    """Tabulate the error by source family and quantity; "left out": by constants that were fitted without the family.
    Rows priced by a generic stack are in a line of their own, not in `all`."""
    table = empty_table("predicted against published runs: error in percent")
    columns = ("family", "of", "runs", "mean", "median", "p90", "bias", "rank corr.")
    for name in (*columns, "left out: mean", "median"):
        table.add_column(name, justify="left" if name in ("family", "of") else "right", no_wrap=True)
    parts = dict(scores["by_family"])
    kinds = [name.split("/")[0] for name in scores["by_kind"]]
    several = {name: of for name, of in scores["by_kind"].items() if kinds.count(name.split("/")[0]) > 1}
    lines = [(name, of, _PLACES) for name, of in parts.items()]
    lines += [(name, of, {"time": _PLACES["time"]}) for name, of in several.items()]
    lines.sort(key=lambda line: line[0].split("/")[0])
    generic = [("generic stacks", scores["generic_stacks"], _PLACES)] if "generic_stacks" in scores else []
    for family, scored, places in [*lines, ("all", scores, _PLACES), *generic]:
        for key, shown in places.items():
            e = scored[key]
            if e["n"]:
                rho = "" if e["spearman"] is None else f"{e['spearman']:.3f}"
                numbers = (_percent(e["mape"]), _percent(e["median"]), _percent(e["p90"]), _percent(e["bias"], True))
                blind = scored["time_left_out"] if key == "time" else {"mape": None, "median": None}
                table.add_row(
                    family, shown, str(e["n"]), *numbers, rho, _percent(blind["mape"]), _percent(blind["median"])
                )
    return table


def side_by_side(compared: PredictionError) -> Table:
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


def replaced_stacks(scores: Mapping[str, Any]) -> Table:
    """Tabulate the stacks that are not known, and what stands in for each."""
    table = empty_table("stacks that are not known")
    for name in ("stated", "priced as", "", "rows"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for line in scores["replaced_stacks"]:
        how = "a generic stack, scored apart" if line["generic"] else "the nearest release"
        table.add_row(line["stated"], line["priced_as"], how, str(line["rows"]))
    return table


def reasons(scores: Mapping[str, Any]) -> Table:
    """Tabulate why rows were left out."""
    left = scores["skipped"]["n"]
    table = empty_table(f"{left} row{'s' * (left != 1)} left out")
    for name in ("family", "rows", "reason"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for family, counts in scores["skipped"]["reasons"].items():
        for why, count in counts.items():
            table.add_row(family, str(count), why)
    return table
