"""How evenly tokens were spread over experts in the course of a run: a line per layer, a column per some steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

STRETCHES = 8
_LEVELS = "▁▂▃▄▅▆▇█"
_WIDE = 32
"""Experts that are drawn one by one; more are not."""


@dataclass(frozen=True)
class Stretch:
    """Some steps of a run: of each layer how many tokens have chosen each expert, and what was dropped of all."""

    first: int
    last: int
    chosen: Mapping[str, Sequence[int]]
    dropped: float


def stretches(rows: Sequence[Mapping[str, Any]]) -> list[Stretch]:
    """A run's lines of metrics.jsonl with experts, in up to `STRETCHES` parts of as many steps."""
    counted = [row for row in rows if "expert_tokens" in row]
    if not counted:
        return []
    size = -(-len(counted) // STRETCHES)
    found = []
    for at in range(0, len(counted), size):
        part = counted[at : at + size]
        chosen = {
            block: [sum(of) for of in zip(*(row["expert_tokens"][block] for row in part), strict=True)]
            for block in part[0]["expert_tokens"]
        }
        dropped = sum(row["expert_dropped"] for row in part) / len(part)
        found.append(Stretch(part[0]["step"], part[-1]["step"], chosen, dropped))
    return found


def busiest(chosen: Sequence[int]) -> float:
    """The load of the busiest expert, over the mean."""
    return max(chosen) * len(chosen) / max(1, sum(chosen))


def balance(found: Sequence[Stretch]) -> Table:
    """Of every layer the busiest expert's load over the mean, by stretch; and the last one's loads of its experts."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("busiest / mean")
    for part in found:
        table.add_column(f"{part.first}-{part.last}", justify="right")
    experts = len(next(iter(found[-1].chosen.values())))
    if experts <= _WIDE:
        table.add_column("loads in the last")
    for block in found[0].chosen:
        line = [Text(f"{busiest(part.chosen[block]):.2f}") for part in found]
        bars = [_bars(found[-1].chosen[block])] if experts <= _WIDE else []
        table.add_row(f"block {block}", *line, *bars)
    if any(part.dropped for part in found):
        table.add_row("dropped", *(f"{part.dropped:.1%}" for part in found))
    table.caption = "1 is even; a bar per expert, the highest is the busiest" if experts <= _WIDE else "1 is even"
    table.caption_justify = "left"
    return table


def _bars(chosen: Sequence[int]) -> Text:
    most = max(1, max(chosen))
    return Text("".join(_LEVELS[min(7, 8 * n // (most + 1))] if n else "·" for n in chosen))
