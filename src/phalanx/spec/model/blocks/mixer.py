"""The common fields of the sizes of every mechanism that a pattern can name."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from phalanx.spec.ranges import Name, Range, require_ranges

Heads = Annotated[int, Range(1, 10**5)]
"""A number of heads, or the width of one."""


@dataclass(frozen=True)
class MixerSizes:
    """Sizes of a mechanism, in counts of elements."""

    divided: ClassVar[tuple[str, ...]] = ()
    """Fields that tp divides over its ranks, each of which has at least one; without any, all compute all of it."""
    name: Name
    """The name that a pattern calls it by."""

    def __post_init__(self) -> None:
        require_ranges(self, self.path)

    @property
    def path(self) -> str:
        """The model's table that holds it, for messages."""
        return f"model.mixers.{self.name}"

    def of_rank(self, tp: int) -> Self:
        """Return the sizes of one of `tp` ranks."""
        sizes = {field: getattr(self, field) for field in self.divided}
        return replace(self, **{field: max(1, count // tp) for field, count in sizes.items() if count is not None})
