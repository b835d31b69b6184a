"""The question of an observation: at which world size, which ranks, which step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import MOST_RANKS


@dataclass(frozen=True)
class ObservationRequest:
    """The ranks and the step of a program to observe. `axes`: named mesh axes with their sizes, outermost first;
    `ranks`: those to observe, None for one of each class; `step`: the number of the step, of which the first
    initialises lazily; `every_micro_batch`: execute also micro-batches of a pipeline that repeat others; `branches`:
    "file:line" of a question to a tensor whose answer depends on data, and the answer.

    Making one raises InputError for an invalid world, axes of another size, and ranks outside the world.
    """

    world: int
    per_node: int = 8
    axes: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] | None = None
    step: int = 2
    every_micro_batch: bool = False
    branches: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {"world": self.world, "ranks_per_node": self.per_node}
        for name, size in (sizes | {f"mesh[{axis!r}]": n for axis, n in self.axes.items()}).items():
            if type(size) is not int or not 1 <= size <= MOST_RANKS:
                raise InputError(name, size, f"is not a number of ranks, from 1 to {MOST_RANKS:,}")
        ranks = math.prod(self.axes.values())
        if self.axes and ranks != self.world:
            raise InputError("mesh", dict(self.axes), f"has {ranks:,} ranks", f"world is {self.world:,}")
        if self.ranks is not None and not self.ranks:
            raise InputError("ranks", self.ranks, "is not a list of ranks", "None observes one of each class")
        for rank in self.ranks or ():
            if type(rank) is not int or rank not in range(self.world):
                raise InputError("ranks", rank, "is not a rank", f"the world has ranks 0 to {self.world - 1:,}")
        if self.step < 1:
            raise InputError("step", self.step, "is not a step", "2 is the first without lazy initialisation")
