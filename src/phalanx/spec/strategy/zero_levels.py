"""The levels of ZeRO (Rajbhandari et al. 2020): the state that each shards over the ranks of a shard group. This is
the only place that defines the meaning of a level's number. When gradients reduce and parameters are gathered follows
from it, from the strategy and from the stack: schedule/gradients/sharding.py.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ZeroLevel:
    """State sharded by a level: booleans for one level, arrays of them for a column of levels (`level_columns`)."""

    number: Any
    state: Any
    """Whether masters and the optimizer's state are sharded."""
    gradients: Any
    """Whether gradients are sharded between micro-batches."""
    parameters: Any
    """Whether parameters are sharded, and gathered for each pass of a unit."""
    words: str

    def bytes_kept(self, state: float, gradients: float, parameters: float, ranks: Any) -> Any:
        """Return the bytes per rank, over `ranks` ranks, given the unsharded bytes of the three kinds."""
        parts = ((state, self.state), (gradients, self.gradients), (parameters, self.parameters))
        return sum(size / ranks if sharded else size for size, sharded in parts)


ZERO_LEVELS = (
    ZeroLevel(0, False, False, False, "nothing"),
    ZeroLevel(1, True, False, False, "the optimizer's state"),
    ZeroLevel(2, True, True, False, "the optimizer's state and gradients"),
    ZeroLevel(3, True, True, True, "all of the state"),
)
"""One row per level, by number. A level shards everything that the one below it does."""

ALL_SHARDED = len(ZERO_LEVELS) - 1
"""The highest level."""


def _first(kind: str) -> int:
    """Return the lowest level that shards this kind."""
    return next(number for number, row in enumerate(ZERO_LEVELS) if getattr(row, kind))


_STATE, _GRADIENTS, _PARAMETERS = map(_first, ("state", "gradients", "parameters"))


def level_columns(levels: Any) -> ZeroLevel:
    """Return the state sharded by each level of a column, as arrays of booleans."""
    return ZeroLevel(levels, levels >= _STATE, levels >= _GRADIENTS, levels >= _PARAMETERS, "")
