"""How good predicted choices are, as tables (answers/choices.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.answers.validate import ChoiceScores
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View

_LINKS = {"cluster": "measured", "datasheet": "datasheet"}
_WORST = 5
"""How many of the worst sweeps are listed."""


def view(a: ChoiceScores) -> View:
    """Show how good choices are among sweeps and against recipes that experts tuned."""
    s, parts = a.scores, list[str | Sheet]()
    tuned = any(kind["n"] for kind in s["recipes"].values())
    if s["sweeps"]["n"]:
        parts += [sweeps(s), worst_sweeps(s)]
    if tuned:
        parts += [*([each_recipe(s)] if a.each else []), recipes(s), options(s)]
    if not s["sweeps"]["n"] and not tuned:
        parts.append(f"no recipe, and no question with enough strategies, among {a.rows} rows")
    if s["left_out"]:
        rows = [(count, reason) for reason, count in s["left_out"].items()]
        parts.append(
            Sheet("runs that are no recipe, and why", columns(("runs", "count"), "reason"), rows, charted=False)
        )
    return View(parts, "validate")


def sweeps(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the sweeps by family and links: rank correlation, regret of the first predicted, strategies that ran
    but are predicted not to fit, and sweeps whose chosen strategy ran out of memory (OOM)."""
    rows = []
    for family, by_links in [*scores["sweeps"]["by_family"].items(), ("all", scores["sweeps"]["links"])]:
        for links, name in _LINKS.items():
            s = by_links[links]
            if s["n"]:
                rows.append((family, name, *(s[key] for key in _OF_SWEEPS)))
    names = columns(
        *("family", "links", ("sweeps", "count"), ("strategies", "count"), ("rank corr.", "number")),
        *(("median", "share"), ("p90", "share"), ("left out p90", "share"), ("refused", "count"), ("OOM", "count")),
    )
    title = "sweeps: regret of the first predicted of the strategies measured for one question"
    return Sheet(title, names, rows, charted=False, keys=2)


_OF_SWEEPS = (
    *("n", "strategies", "spearman_median", "regret_median", "regret_p90", "regret_p90_left_out"),
    *("refused", "chosen_out_of_memory"),
)


def worst_sweeps(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the sweeps of most regret, with links as measured."""
    rows = []
    for s in sorted(scores["sweeps"]["each"]["cluster"], key=lambda s: -s["regret"])[:_WORST]:
        chosen = _line(s["chosen"]) + (", ran out of memory" if s["chosen_out_of_memory"] else "")
        rows.append((s["question"], s["strategies"], s["spearman"], s["regret"], chosen or "none"))
    names = columns(
        *("question", ("strategies", "count"), ("rank corr.", "number"), ("regret", "share")),
        "first that is predicted to fit",
    )
    return Sheet("sweeps of most regret, links as measured", names, rows, charted=False)


def recipes(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the recipes that experts tuned: the best strategy predicted against theirs."""
    rows = []
    for kind, r in scores["recipes"].items():
        if r["n"]:
            differ = ", ".join(f"{name} {n}" for name, n in r["fields_that_differ"].items())
            numbers = (r[key] for key in ("n", "ratio_p10", "ratio_median", "ratio_p90", "said_to_fit"))
            rows.append((kind, *numbers, differ))
    names = columns(
        *("models", ("recipes", "count"), ("ratio p10", "number"), ("median", "number"), ("p90", "number")),
        *(("fit", "share"), "fields that differ, and how often"),
    )
    title = "recipes that experts tuned: predicted step time of the best strategy over that of theirs"
    return Sheet(title, names, rows, charted=False)


def options(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate which of the experts' strategies are predicted to fit, by the option that a strategy lacks."""
    rows = [
        (kind, option, members["n"], members["said_to_fit"])
        for kind, r in scores["recipes"].items()
        for option, members in r["said_to_fit_by_option"].items()
    ]
    names = columns("models", "option", ("recipes", "count"), ("predicted to fit", "share"))
    title = "which of them are predicted to fit, by the option with which they save memory"
    return Sheet(title, names, rows, charted=False)


def each_recipe(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate every recipe: the expert's strategy and the one predicted to be best."""
    rows = []
    for r in (r for kind in scores["recipes"].values() for r in kind["each"]):
        best = _line(r["best"]) or "none fits"
        rows.append((r["question"], r["stack"], _line(r["expert"]), r["share_of_memory"], best, r["ratio"]))
    names = columns("question", "stack", "expert", ("of memory", "share"), "best predicted", ("ratio", "number"))
    return Sheet("every recipe", names, rows, charted=False)


def _line(strategy: str) -> str:
    """Return a strategy's line with spaces, so that it wraps between fields."""
    return strategy.replace(",", ", ")
