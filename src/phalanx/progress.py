"""How far a loop is: lines that say how many of its items are done, how fast, and how long the others will take."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_QUIET_S = 2.0  # a loop that takes longer shows progress


def in_progress(items: Iterable[T], what: str, say: Callable[[str], None], total: int | None = None) -> Iterator[T]:
    """Yield the items; where they take long, `say` every few seconds how many are done, how fast, and where their
    number is known, a bar and the time left."""
    start = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last > _QUIET_S:
            last = time.monotonic()
            say(progress_line(done, what, last - start, total))


def progress_line(done: int, what: str, seconds: float, total: int | None) -> str:
    """Write how far `total` items are: `[#####---------------] 120 of 480 schedules proved, 20/s, 18 s left ...`."""
    rate = done / seconds
    speed = f"{rate:,.0f}/s" if rate >= 2 else f"{seconds / done:.1f} s each"
    if total is None:
        return f"{done:,} {what} in {seconds:.0f} s, {speed} ..."
    full = min(20 * done // max(total, 1), 20)
    left = f"{max(total - done, 0) / rate:.0f} s left"
    return f"[{'#' * full}{'-' * (20 - full)}] {done:,} of {total:,} {what}, {speed}, {left} ..."
