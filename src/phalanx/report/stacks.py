"""Stacks beside each other, and what conditions on a search cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from phalanx.planning.search.compare_stacks import OfStack
from phalanx.planning.search.condition_cost import ConditionCost
from phalanx.report.style import between_fields, seconds, size, table


def stacks(answers: Sequence[OfStack]) -> Table:
    """Tabulate the best strategy of every stack, the fastest first."""
    grid = table("stacks", "stack", "strategy", "step", "over the best", "MFU", "memory", left=("stack", "strategy"))
    least = answers[0].seconds
    for f in answers:
        if f.best is None:
            grid.add_row(f.row.name, f.reason, "", "", "", "")
            continue
        over = f"{f.seconds / least - 1:+.1%}" if f.seconds > least else ""
        grid.add_row(
            f.row.name, between_fields(f.best.strategy), seconds(f.seconds), over, f"{f.mfu:.1%}", size(f.best.bytes_)
        )
    grid.caption = "each by its own constants; phalanx plan --stack NAME has the rest"
    grid.caption_justify = "left"
    return grid


def costs(whole: ConditionCost, each: Sequence[ConditionCost]) -> Iterable[str]:
    """Yield a line on what all conditions cost, and one on what each costs on top of the others."""
    if whole.share is None or whole.seconds is None:
        yield f"{whole.text}: nothing fits without it either"
        return
    yield f"{whole.text} costs {whole.share:.1%}: without it {whole.without} takes {seconds(whole.seconds)}"
    known = [f"{c.text} {c.share:.1%}" for c in each if c.share is not None]
    left = [c.text for c in each if c.share is None]
    if known:
        more = f"; not asked for lack of time: {', '.join(left)}" if left else ""
        yield f"each on top of the others: {', '.join(known)}{more}"
