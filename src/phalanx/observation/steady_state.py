"""The steady state of a step: of many micro-batches that do the same, few are executed.

The passes of the first micro-batches of a kind and of the last one are executed and recorded; those between repeat
the record of the latest executed pass, provided that the one before it did the same.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from phalanx.observation.unobservable import Unsteady

P = TypeVar("P")


class SteadyState(Generic[P]):
    """The records of executed passes by key; `same` says whether two micro-batches' passes did the same."""

    def __init__(self, same: Callable[[P, P], bool]) -> None:
        self._same = same
        self._latest: dict[Hashable, tuple[P, ...]] = defaultdict(tuple)
        self._counts: dict[Hashable, int] = defaultdict(int)
        self._repeated: set[Hashable] = set()

    def executed(self, key: Hashable) -> int:
        """Return how many passes of a key were executed."""
        return self._counts[key]

    def add(self, key: Hashable, record: P, unchanged: Callable[[P, P], bool] | None = None) -> None:
        """Add the record of an executed pass. Raises Unsteady if earlier passes of the key were repeated and the new
        one is not `unchanged` from them."""
        latest = self._latest[key]
        if unchanged is not None and key in self._repeated and not unchanged(record, latest[-1]):
            raise Unsteady
        self._latest[key] = (*latest[-1:], record)
        self._counts[key] += 1

    def steady(self, key: Hashable) -> tuple[P, P] | None:
        """Return the two latest records of a key if they are the same, so that they represent all later passes."""
        match self._latest[key]:
            case (before, last) if self._same(before, last):
                return before, last
        return None

    def repeat(self, key: Hashable) -> tuple[P, P]:
        """Return the two records that represent a pass that is not executed. Raises Unsteady."""
        records = self.steady(key)
        if records is None:
            raise Unsteady("no two successive micro-batches do the same")
        self._repeated.add(key)
        return records
