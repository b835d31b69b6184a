"""`phalanx.observe`: observe a Python function, in processes forked from this one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from phalanx.observation.program.processes import observe_program
from phalanx.schedule.observation import Observation
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import MOST_RANKS


def observe(
    step: Callable[..., Any],
    *,
    world: int,
    mesh: Mapping[str, int] | None = None,
    ranks: Sequence[int] | None = None,
    ranks_per_node: int = 8,
    every_micro_batch: bool = False,
) -> Observation:
    """Observe a training step of the program `step` at `world` ranks, on fake tensors.

    `step` builds its model and optimizer and takes at least two steps, as a training script does; or it builds them
    and returns a function that takes one step. It is called once for every observed rank, with the DeviceMesh of
    `mesh` (axis: size, outermost first) if it has a parameter for it. `ranks`: the ranks to observe; None observes
    one of each class. `every_micro_batch`: execute also micro-batches of a pipeline that repeat others. Ranks run in
    forked processes, so this process does not change.

    Raises Unobservable if no step was taken, or an operation has no meaning on fake tensors; InputError for an
    invalid world, a mesh of another size, and ranks outside the world.
    """
    axes = dict(mesh or {})
    _require_world(world, ranks_per_node, axes, ranks)
    wants_mesh = bool(inspect.signature(step).parameters)

    def program() -> None:
        arguments: tuple[Any, ...] = ()
        if wants_mesh:
            shape = tuple(axes.values()) or (world,)
            arguments = (init_device_mesh("cuda", shape, mesh_dim_names=tuple(axes) or ("world",)),)
        one = step(*arguments)
        if callable(one):
            for _ in range(3):
                one()

    name = getattr(step, "__qualname__", repr(step))
    return observe_program(name, program, world, ranks_per_node, axes, ranks, every_micro_batch=every_micro_batch)


def _require_world(world: int, per_node: int, axes: Mapping[str, int], ranks: Sequence[int] | None) -> None:
    sizes: dict[str, object] = {
        "world": world,
        "ranks_per_node": per_node,
        **{f"mesh[{axis!r}]": size for axis, size in axes.items()},
    }
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= MOST_RANKS:
            raise InputError(name, size, f"is no number of ranks, from 1 to {MOST_RANKS:,}")
    if axes and math.prod(axes.values()) != world:
        raise InputError("mesh", axes, f"has {math.prod(axes.values()):,} ranks", f"world is {world:,}")
    if ranks is not None and (isinstance(ranks, str) or not ranks):
        raise InputError("ranks", ranks, "is no list of ranks", "None observes one of each class")
    for rank in ranks or ():
        if type(rank) is not int or rank not in range(world):
            raise InputError("ranks", rank, "is no rank", f"the world has ranks 0 to {world - 1:,}")
