"""How good predicted choices are, as tables (answers/choices.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from phalanx.report.style import empty_table, table

_LINKS = {"cluster": "measured", "datasheet": "datasheet"}
_WORST = 5
"""How many of the worst sweeps are listed."""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _line(strategy: str) -> str:
    """Return a strategy's line with spaces, so that it wraps between fields."""
    return strategy.replace(",", ", ")


def sweeps(scores: Mapping[str, Any]) -> Table:
    """Tabulate the sweeps by family and links: rank correlation, regret of the first predicted, strategies that ran
    but are predicted not to fit, and sweeps whose chosen strategy ran out of memory (OOM)."""
    grid = empty_table("sweeps: regret of the first predicted of the strategies measured for one question")
    columns = ("sweeps", "strategies", "rank corr.", "median", "p90", "left out p90", "refused", "OOM")
    for name in ("family", "links", *columns):
        grid.add_column(name, justify="left" if name in ("family", "links") else "right", no_wrap=True)
    lines = [(family, by_links) for family, by_links in scores["sweeps"]["by_family"].items()]
    for family, by_links in [*lines, ("all", scores["sweeps"]["links"])]:
        for links, name in _LINKS.items():
            s = by_links[links]
            if s["n"]:
                regrets = (_percent(s[key]) for key in ("regret_median", "regret_p90", "regret_p90_left_out"))
                counts = (str(s["refused"]), str(s["chosen_out_of_memory"]))
                numbers = (str(s["n"]), str(s["strategies"]), _number(s["spearman_median"]))
                grid.add_row(family, name, *numbers, *regrets, *counts)
    return grid


def worst_sweeps(scores: Mapping[str, Any]) -> Table:
    """Tabulate the sweeps of most regret, with links as measured beside them."""
    grid = table(
        "sweeps of most regret, links as measured",
        *("question", "strategies", "rank corr.", "regret", "first that is predicted to fit"),
        left=("question", "first that is predicted to fit"),
    )
    each = sorted(scores["sweeps"]["each"]["cluster"], key=lambda s: -s["regret"])
    for s in each[:_WORST]:
        chosen = _line(s["chosen"]) + (", ran out of memory" if s["chosen_out_of_memory"] else "")
        grid.add_row(
            s["question"], str(s["strategies"]), _number(s["spearman"], 2), _percent(s["regret"]), chosen or "none"
        )
    return grid


def recipes(scores: Mapping[str, Any]) -> Table:
    """Tabulate the recipes that experts tuned: the best strategy predicted against theirs."""
    grid = table(
        "recipes that experts tuned: predicted step time of the best strategy over that of theirs",
        *("models", "recipes", "ratio p10", "median", "p90", "fit", "fields that differ, and how often"),
        left=("models", "fields that differ, and how often"),
    )
    for kind, r in scores["recipes"].items():
        if r["n"]:
            ratios = (_number(r[key]) for key in ("ratio_p10", "ratio_median", "ratio_p90"))
            differ = ", ".join(f"{name} {n}" for name, n in r["fields_that_differ"].items())
            grid.add_row(kind, str(r["n"]), *ratios, _percent(r["said_to_fit"]), differ)
    return grid


def options(scores: Mapping[str, Any]) -> Table:
    """Tabulate which of the experts' strategies are predicted to fit, by the option that a strategy lacks."""
    grid = table(
        "which of them are predicted to fit, by the option with which they save memory",
        *("models", "option", "recipes", "predicted to fit"),
        left=("models", "option"),
    )
    for kind, r in scores["recipes"].items():
        for option, members in r["said_to_fit_by_option"].items():
            grid.add_row(kind, option, str(members["n"]), _percent(members["said_to_fit"]))
    return grid


def each_recipe(scores: Mapping[str, Any]) -> Table:
    """Tabulate every recipe: the expert's strategy and the one predicted to be best."""
    grid = table(
        "every recipe",
        *("question", "stack", "expert", "of memory", "best predicted", "ratio"),
        left=("question", "stack", "expert", "best predicted"),
    )
    for r in (r for kind in scores["recipes"].values() for r in kind["each"]):
        share = f"{100 * r['share_of_memory']:.0f} %"
        grid.add_row(
            r["question"], r["stack"], _line(r["expert"]), share, _line(r["best"]) or "none fits", _number(r["ratio"])
        )
    return grid


def left_out(scores: Mapping[str, Any]) -> Table:
    """Tabulate why runs are neither in a sweep nor a recipe."""
    grid = table("runs that are no recipe, and why", "runs", "reason", left=("reason",))
    for reason, count in scores["left_out"].items():
        grid.add_row(str(count), reason)
    return grid
