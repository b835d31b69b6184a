"""`phalanx.observe`: observe a Python function, in processes forked from this one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from phalanx.schedule.observation import Observation, check_world
from phalanx.verify.observation.processes import observe_program


def observe(
    step: Callable[..., Any],
    *,
    world: int,
    mesh: Mapping[str, int] | None = None,
    ranks: Sequence[int] | None = None,
    ranks_per_node: int = 8,
    every_micro_batch: bool = False,
) -> Observation:
    """Observe what `step` does in a training step at `world` ranks, on tensors without content.

    `step` builds its model and optimizer and takes at least two steps, as a training script does; or it builds them
    and returns a function that takes one step. It is called once for every observed rank, with the
    DeviceMesh of `mesh` (axis: size, outermost first) if it has a parameter for it. `ranks`: which to observe; None
    observes one of each class. `every_micro_batch`: run also those of a pipeline that do the same. Processes are
    forked for the ranks, so nothing here changes.

    Raises InputError for a world that is none, and Unobservable where no step was taken, or where an operation has no
    meaning without content.
    """
    check_world(world, ranks_per_node)
    axes = dict(mesh or {})
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
