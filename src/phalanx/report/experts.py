"""How evenly tokens were spread over experts during a run: a row per layer, a column per stretch of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from phalanx.report.pictures.figure import Bar, Bars, Lines, Picture, PlotAxis, Series
from phalanx.spec.errors import InputError

STRETCHES = 8
"""Into how many stretches of steps a run is divided at most."""
_LEVELS = "▁▂▃▄▅▆▇█"
_WIDE = 32
"""The most experts whose loads are drawn."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a run with their routing."""

    first: int
    last: int
    chosen: Mapping[str, Sequence[int]]
    """Tokens that chose each expert, by layer."""
    dropped: float
    """Share of tokens dropped, averaged over the steps."""


def stretches(rows: Sequence[Mapping[str, Any]]) -> list[Stretch]:
    """Divide a run's rows of metrics.jsonl that report experts into at most `STRETCHES` stretches.

    Raises InputError for rows that do not count."""
    reporting = [row for row in rows if "expert_tokens" in row]
    if not reporting:
        return []
    for row in reporting:
        _require_counts(row, reporting[0]["expert_tokens"])
    size = -(-len(reporting) // STRETCHES)
    result = []
    for start in range(0, len(reporting), size):
        part = reporting[start : start + size]
        chosen = {
            block: [sum(counts) for counts in zip(*(row["expert_tokens"][block] for row in part), strict=True)]
            for block in part[0]["expert_tokens"]
        }
        dropped = sum(row["expert_dropped"] for row in part) / len(part)
        result.append(Stretch(part[0]["step"], part[-1]["step"], chosen, dropped))
    return result


def _require_counts(row: Mapping[str, Any], first: Any) -> None:
    """Require that a row counts the tokens of as many experts as the first one. Raises InputError."""
    tokens, dropped = row["expert_tokens"], row.get("expert_dropped")
    alike = (
        isinstance(tokens, dict)
        and isinstance(first, dict)
        and tokens.keys() == first.keys() != set()
        and all(_are_counts(counts) and len(counts) == len(first[block]) for block, counts in tokens.items())
    )
    if not alike or not isinstance(dropped, int | float) or not 0 <= dropped <= 1:
        raise InputError("run", f"step {row['step']}", "metrics.jsonl does not count the tokens of its experts")


def _are_counts(counts: Any) -> bool:
    return isinstance(counts, list) and counts != [] and all(type(n) is int and 0 <= n < 2**53 for n in counts)


def busiest(chosen: Sequence[int]) -> float:
    """Return the load of the busiest expert over the mean load."""
    return max(chosen) * len(chosen) / max(1, sum(chosen))


def picture(parts: Sequence[Stretch], run: str) -> Picture:
    """Draw the busiest expert's load over the mean in the course of a run, and the last stretch's loads by block."""
    blocks = list(parts[0].chosen)[:_DRAWN]
    curves = [Series(f"block {b}", [(float(p.last), busiest(p.chosen[b])) for p in parts], dots=True) for b in blocks]
    course = Lines(
        PlotAxis("step", "count"),
        PlotAxis("busiest expert's tokens over the mean; 1: even", "count", low=0.0),
        tuple(curves),
    )
    last = parts[-1].chosen
    bars = [
        Bar(f"block {b}", [(f"expert {e}", 100 * n / max(1, sum(last[b]))) for e, n in enumerate(last[b])], said)
        for b in blocks
        for said in [f"{busiest(last[b]):.2f} x the mean"]
        if len(last[b]) <= _DRAWN
    ]
    steps = f"steps {parts[-1].first} to {parts[-1].last}"
    panels = (course, Bars("% of the tokens", tuple(bars), head=f"Loads of experts, {steps}")) if bars else (course,)
    more = f"; the first {len(blocks)} of {len(last)} blocks" if len(last) > len(blocks) else ""
    return Picture(f"Balance of experts in {run}", panels, f"`phalanx report experts {run}`{more}")


_DRAWN = 8
"""The most blocks that are drawn, and experts of a bar."""


def balance(parts: Sequence[Stretch]) -> Table:
    """Tabulate the busiest expert's load over the mean, by layer and stretch; bars show the last stretch's loads."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("busiest / mean")
    for part in parts:
        table.add_column(f"{part.first}-{part.last}", justify="right")
    experts = len(next(iter(parts[-1].chosen.values())))
    if experts <= _WIDE:
        table.add_column("loads in the last")
    for block in parts[0].chosen:
        line = [Text(f"{busiest(part.chosen[block]):.2f}") for part in parts]
        bars = [_bars(parts[-1].chosen[block])] if experts <= _WIDE else []
        table.add_row(f"block {block}", *line, *bars)
    if any(part.dropped for part in parts):
        table.add_row("dropped", *(f"{part.dropped:.1%}" for part in parts))
    table.caption = "1 is even; a bar per expert, the highest is the busiest" if experts <= _WIDE else "1 is even"
    table.caption_justify = "left"
    return table


def _bars(chosen: Sequence[int]) -> Text:
    most = max(1, max(chosen))
    return Text("".join(_LEVELS[min(7, 8 * n // (most + 1))] if n else "·" for n in chosen))
