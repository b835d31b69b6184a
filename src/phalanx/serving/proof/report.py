"""Tables of a proof of generation: its steps, and what each sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from phalanx.report.verify import columns_of
from phalanx.schedule.event import Event


def steps(rows: Sequence[tuple[str, int, int, Sequence[Event]]]) -> Table:
    """Tabulate steps of generation from (name, requests, tokens, events)."""
    table = columns_of("step", "requests", "tokens", "passes", "collectives", "FLOP")
    for name, requests, tokens, events in rows:
        sent = sum(bool(e.axis) for e in events)
        flops = sum(e.flops for e in events)
        table.add_row(name, f"{requests:,}", f"{tokens:,}", f"{len(events) - sent:,}", f"{sent:,}", f"{flops:,}")
    return table


def traffic(totals: Mapping[str, Mapping[tuple[str, str], tuple[int, int]]]) -> Table:
    """Tabulate the collectives of steps of generation on one rank, by step: (operation, axis) -> (number, bytes)."""
    table = columns_of("collectives, predicted", *(f"{name}, bytes" for name in totals))
    for op, axis in dict.fromkeys(key for of in totals.values() for key in of):
        cells = (of.get((op, axis)) for of in totals.values())
        table.add_row(f"{op} over {axis}", *(f"{c[0]:,}: {c[1]:,}" if c else "" for c in cells))
    return table
