"""The error of predictions against published runs, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.answers.validate import PredictionScores
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.style import counted
from phalanx.report.view import View
from phalanx.validate.prediction_error import PredictionError

_PLACES = {
    "time": "step time",
    "memory_allocated": "allocated",
    "memory_reserved": "reserved",
    "memory_shown": "shown",
}


def view(a: PredictionScores) -> View:
    """Show the errors by source family, whether runs fit, and what was left out."""
    parts: list[str | Sheet] = [] if a.runs is None else [side_by_side(a.runs)]
    if any(a.scores[key]["n"] for key in (*_PLACES, "fit")):
        parts += [families(a.scores), *overall(a.scores)]
    else:
        parts.append("none of these rows can be predicted")
    if a.scores["replaced_stacks"]:
        parts.append(replaced_stacks(a.scores))
    return View([*parts, reasons(a.scores)], "validate")


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def families(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the error by source family and quantity; "left out": by constants that were fitted without the family.
    Rows priced by a generic stack are in a line of their own, not in `all`."""
    kinds = [name.split("/")[0] for name in scores["by_kind"]]
    several = {name: of for name, of in scores["by_kind"].items() if kinds.count(name.split("/")[0]) > 1}
    lines = [(name, of, _PLACES) for name, of in scores["by_family"].items()]
    lines += [(name, of, {"time": _PLACES["time"]}) for name, of in several.items()]
    lines.sort(key=lambda line: line[0].split("/")[0])
    generic = [("generic stacks", scores["generic_stacks"], _PLACES)] if "generic_stacks" in scores else []
    rows = []
    for family, scored, places in [*lines, ("all", scores, _PLACES), *generic]:
        for key, shown in places.items():
            e = scored[key]
            if e["n"]:
                errors = (_share(e[name]) for name in ("mape", "median", "p90", "bias"))
                blind = scored["time_left_out"] if key == "time" else {"mape": None, "median": None}
                rows.append(
                    (family, shown, e["n"], *errors, e["spearman"], *map(_share, (blind["mape"], blind["median"])))
                )
    names = columns(
        *("family", "of", ("runs", "count"), ("mean", "share"), ("median", "share"), ("p90", "share")),
        *(("bias", "change"), ("rank corr.", "number"), ("left out: mean", "share"), ("left out: median", "share")),
    )
    return Sheet("error of predictions against published runs", names, rows, charted=False, keys=2)


def side_by_side(compared: PredictionError) -> Sheet:
    """Tabulate every run: published and predicted step time, and the error."""
    rows = []
    for prediction in compared.time:
        r = prediction.row
        degrees = {n: r[n] for n in ("tp", "cp", "pp", "vpp", "ep", "dp", "mbs") if r[n] not in ("", "1")}
        layout = " ".join(f"{n}={v}" for n, v in degrees.items())
        full = " full recompute" if r["act_ckpt"].startswith("full") else ""
        gpus = f"{r['gpus']} {r['gpu'].split('-')[0]}"
        times = (prediction.measured, prediction.predicted, prediction.predicted / prediction.measured - 1)
        rows.append((r["model"], gpus, layout + full, f"{r['gbs']} x {r['seq_len']}", r["precision"], *times))
    names = columns(
        *("model", "GPUs", "layout", "batch x seq", "number format", ("published", "number")),
        *(("predicted", "number"), ("error", "change")),
    )
    return Sheet("step time, seconds", names, rows, charted=False)


def overall(scores: Mapping[str, Any]) -> list[str]:
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
    return lines


def replaced_stacks(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the stacks that are not known, and what each is priced as."""
    how = {True: "a generic stack, scored apart", False: "the nearest release"}
    rows = [(r["stated"], r["priced_as"], how[r["generic"]], r["rows"]) for r in scores["replaced_stacks"]]
    names = columns("stated", "priced as", "", ("rows", "count"))
    return Sheet("stacks that are not known", names, rows, charted=False)


def reasons(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate why rows were left out."""
    families = scores["skipped"]["reasons"].items()
    rows = [(family, count, why) for family, counts in families for why, count in counts.items()]
    names = columns("family", ("rows", "count"), "reason")
    return Sheet(f"{counted(scores['skipped']['n'], 'row')} left out", names, rows, charted=False)
