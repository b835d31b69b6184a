"""The levels of ZeRO (Rajbhandari et al. 2020): what each shards over the ranks of a shard group.

The only place that knows what the number of a level means. When gradients reduce and parameters are gathered follows
from it, from the strategy and from the stack: schedule/gradients/sharding.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ZeroLevel:
    """What a level shards: booleans of one level, arrays of them of a column of levels (`level_columns`)."""

    number: Any
    state: Any
    """Masters and the optimizer's state."""
    gradients: Any
    """Gradients, from one micro-batch to the next."""
    parameters: Any
    """Parameters, which each pass of a unit gathers."""
    words: str

    def bytes_kept(self, state: float, gradients: float, parameters: float, ranks: Any) -> Any:
        """Return the bytes left on each of `ranks` of these bytes of the three kinds."""
        parts = ((state, self.state), (gradients, self.gradients), (parameters, self.parameters))
        return sum(size / ranks if sharded else size for size, sharded in parts)


ZERO_LEVELS = (
    ZeroLevel(0, False, False, False, "nothing"),
    ZeroLevel(1, True, False, False, "the optimizer's state"),
    ZeroLevel(2, True, True, False, "the optimizer's state and gradients"),
    ZeroLevel(3, True, True, True, "all of the state"),
)
"""A row a level, in the order of numbers. A level shards all that the one below it does."""

ALL_SHARDED = len(ZERO_LEVELS) - 1
"""The highest level."""


def _first(kind: str) -> int:
    """Return the lowest level that shards this kind."""
    return next(number for number, row in enumerate(ZERO_LEVELS) if getattr(row, kind))


_STATE, _GRADIENTS, _PARAMETERS = map(_first, ("state", "gradients", "parameters"))


def level_columns(levels: Any) -> ZeroLevel:
    """Return what each level of a column shards, as arrays of booleans."""
    return ZeroLevel(levels, levels >= _STATE, levels >= _GRADIENTS, levels >= _PARAMETERS, "")
