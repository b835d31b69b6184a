"""Table of the memory of a strategy's fullest rank, by kind of occupant."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.strategy.spec import Strategy


def sheet(s: Strategy, terms: Mapping[str, float], needed: float, usable: int) -> Sheet:
    """Tabulate bytes by term. `needed`: bytes reserved; `usable`: usable bytes of the device."""
    rows = [(name, value, value / usable) for name, value in terms.items() if value]
    rest = needed - sum(terms.values())
    rows += [("reserved beyond the peak", rest, rest / usable)] if rest > 1 else []
    rows.append(("in all", needed, needed / usable))
    fits = "fits tightly" if 0.95 * usable < needed <= usable else "fits" if needed <= usable else "does not fit"
    title = f"memory of {s}: {fits}, {needed / 2**30:.1f} of {usable / 2**30:.1f} GiB usable"
    return Sheet(title, columns("what", ("takes", "bytes"), ("of the device", "share")), rows, "of the fullest rank")
