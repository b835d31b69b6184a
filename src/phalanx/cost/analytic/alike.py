"""Sharing of prices between strategies with equal blocks: many strategies of a search differ only in fields that do
not affect a block (replicas, virtual stages, schedules, micro-batches of a step, ZeRO), so that one price serves all.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.rank_layout import LayoutColumns

_PRICED_APART = {
    *("pp", "virtual", "dp", "zero", "shards", "micro_batches", "dp_stride", "pp_stride"),
    *("bubble", "in_flight", "in_flight_last", "v_shaped", "compressed", "changes"),
    *("full", "selective", "group", "first_blocks", "most_blocks", "last_blocks", "most_place"),
}
WITHOUT_EXPERTS = frozenset(_PRICED_APART | {"ep", "etp"})
"""Fields of a layout that a micro-batch's passes through attention, a dense MLP or the head do not depend on."""
IRRELEVANT_TO_EXPERTS = frozenset(_PRICED_APART | {"ulysses", "tp_stride", "cp_stride"})
"""Fields of a layout that the products of a rank's experts do not depend on."""
MOST_UNGROUPED = 2048
"""Maximum number of rows that are priced without grouping."""
_SINGLE = (float, int, str)
"""Common field types, tested first, since a search does so a hundred thousand times."""
T = TypeVar("T")


def price_distinct_rows(
    price: Callable[[LayoutColumns], T], layout: LayoutColumns, unseen: frozenset[str], *others: Any
) -> T:
    """Return `price(layout)`, computed once for all rows that differ only in the fields `unseen`, which `price` does
    not read. All rows are priced if `others`, which `price` reads too, have columns of their own."""
    columns = [c for f in fields(layout) if f.name not in unseen for c in _columns(getattr(layout, f.name))]
    rows = max((len(column) for column in columns), default=0)
    if rows < MOST_UNGROUPED or any(_columns(other) for other in others):
        return price(layout)
    code = np.zeros(rows, dtype=np.uint64)
    for column in columns:
        code ^= np.asarray(column, dtype=np.float64).view(np.uint64)
        code *= np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing (Knuth 1998, section 6.4)
        code ^= code >> np.uint64(29)
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    if 2 * len(first) > rows or any(np.any(column[first[place]] != column) for column in columns):
        return price(layout)
    return take_rows(price(take_rows(layout, first)), place)  # type: ignore[no-any-return]


def take_rows(part: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Select rows of a column, or of the columns of a tuple or dataclass; numbers stay."""
    if isinstance(part, np.ndarray):
        return part[rows] if part.ndim else part
    if isinstance(part, _SINGLE):
        return part
    if isinstance(part, tuple):
        return tuple(take_rows(each, rows) for each in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: take_rows(getattr(part, f.name), rows) for f in fields(part)})
    return part


def _columns(part: Any) -> list[Column]:
    """Return the columns in a value, a tuple or a dataclass; numbers are left out."""
    if isinstance(part, np.ndarray):
        return [part] if part.ndim else []
    if isinstance(part, _SINGLE):
        return []
    if isinstance(part, tuple):
        return [column for each in part for column in _columns(each)]
    if is_dataclass(part) and not isinstance(part, type):
        return [column for f in fields(part) for column in _columns(getattr(part, f.name))]
    return []
