"""`phalanx.observe`: observe a Python function, in processes forked from this one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from phalanx.observation.program.processes import observe_program
from phalanx.observation.request import ObservationRequest
from phalanx.schedule.observation import Observation
from phalanx.spec.errors import InputError


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
    if isinstance(ranks, str):
        raise InputError("ranks", ranks, "is not a list of ranks", "None observes one of each class")
    request = ObservationRequest(
        world,
        ranks_per_node,
        dict(mesh or {}),
        None if ranks is None else tuple(ranks),
        every_micro_batch=every_micro_batch,
    )
    wants_mesh = bool(inspect.signature(step).parameters)

    def program() -> None:
        arguments: tuple[Any, ...] = ()
        if wants_mesh:
            shape = tuple(request.axes.values()) or (world,)
            arguments = (init_device_mesh("cuda", shape, mesh_dim_names=tuple(request.axes) or ("world",)),)
        one = step(*arguments)
        if callable(one):
            for _ in range(3):
                one()

    return observe_program(getattr(step, "__qualname__", repr(step)), program, request)
