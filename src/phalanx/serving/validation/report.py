"""Tables of measured and predicted serving runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from phalanx.report.style import empty_table
from phalanx.serving.validation.large_ep import LargeEpRun

_SHOWN = {"tpot": "TPOT", "ttft": "TTFT"}


def engines(scores: Mapping[str, Any]) -> Table:
    """Tabulate errors by engine and mode. Left out: with constants fitted without the run's (model, GPU, engine)."""
    table = empty_table("serving: absolute error in percent, mean / median")
    for name in ("engine, mode", "of", "runs", "error", "bias", "left out", "floor", "other tool*"):
        table.add_column(name, justify="left" if name in ("engine, mode", "of") else "right", no_wrap=True)
    for name, scored in scores["by_engine"].items():
        for key, shown in _SHOWN.items():
            e = scored[key]
            if not e["n"]:
                continue
            other = scored.get("other_predictor_on_other_rows", {}).get(key)
            floor = scored["floor" if key == "tpot" else "ttft_floor"]
            errors = (str(e["n"]), _two(e), f"{e['bias']:+.0f}", _two(scored["left_out"][key]))
            least = "" if floor is None else f"{floor:.1f}"
            table.add_row(name if key == "tpot" else "", shown, *errors, least, "" if other is None else _two(other))
    return table


def parts(scores: Mapping[str, Any], by: str, title: str) -> Table:
    """Tabulate errors by engine, mode and the key `by`."""
    table = empty_table(title)
    table.add_column("engine, mode, " + by, no_wrap=True)
    for name in ("runs", "TPOT", "TTFT", "left out: TPOT", "TTFT"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, scored in scores[f"by_{by}"].items():
        left = scored["left_out"]
        cells = (_two(scored["tpot"]), _two(scored["ttft"]), _two(left["tpot"]), _two(left["ttft"]))
        table.add_row(name, str(scored["tpot"]["n"]), *cells)
    return table


def large_ep(runs: Sequence[LargeEpRun]) -> Table:
    """Tabulate published deployments of experts over many GPUs, with their predictions."""
    table = empty_table("experts over many GPUs, published: tokens/s of a GPU")
    table.add_column("model, GPU, phase", no_wrap=True)
    for name in ("GPUs", "tokens a GPU", "length", "measured", "predicted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        row = run.row
        numbers = (f"{run.measured:,.0f}", f"{run.predicted:,.0f}", f"{run.error:+.0%}")
        name = f"{row['model'].split('/')[-1]} {row['gpu']} {row['phase']}"
        table.add_row(name, row["ranks"], row["tokens"], row["length"], *numbers)
    return table


def bursts(scores: Mapping[str, Any]) -> Table:
    """Tabulate published benchmarks of a number of requests: measured over predicted, at 10, 50 and 90 % of the
    runs."""
    table = empty_table("benchmarks of a number of requests: measured / predicted, 10 %, median, 90 %")
    table.add_column("engine, requests", no_wrap=True)
    for name in ("runs", "makespan", "median TTFT", "median TPOT"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, by_figure in scores["by_kind"].items():
        cells = (
            f"{f['p10']:.2f}  {f['p50']:.2f}  {f['p90']:.2f}" if (f := by_figure.get(figure)) else ""
            for figure in ("makespan_s", "ttft_s", "tpot_s")
        )
        table.add_row(kind, str(max(f["n"] for f in by_figure.values())), *cells)
    return table


def notes(scores: Mapping[str, Any]) -> str:
    """Return notes on the floor, the other tool, and the rows that are not predicted."""
    lines = [
        "floor: median error that repeats of one configuration leave to any prediction.",
        "* aiconfigurator-core 0.12.0, on other rows of the same source: not the same comparison.",
    ]
    skipped = scores["skipped"]
    if skipped["n"]:
        lines.append(f"{skipped['n']} rows are not predicted:")
        lines += [f"  {n:4}  {why}" for why, n in list(skipped["reasons"].items())[:12]]
    return "\n".join(lines)


def _two(e: Mapping[str, Any]) -> str:
    return "" if not e.get("n") else f"{e['mape']:.0f} / {e['median']:.1f}"
