"""What the ranks of a parallelized module agree on in a step: the units that they called, the parameters that got a
gradient, and the norm of the gradient. Each is a small collective that all ranks issue together.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.tracing import host_values
from phalanx.spec.strategy.spec import Strategy


def require_equal_calls(engine: DataParallel, comm: Comm) -> None:
    """Require that ranks have called the same units, whose parameters they gathered together. The host waits for the
    forward pass, because a backward pass would not end. Raises RuntimeError."""
    gathered, axis = engine.gathered, comm.mesh.gradient_axis
    if gathered is None or comm.size(axis) == 1:
        return
    most = host_values.to_device([gathered.called, -gathered.called], comm.world.device)
    comm.all_reduce(most, axis, unit="calls", phase="B", reduction="max").wait()
    (alike,) = host_values.read((most.sum(0, keepdim=True) == 0).long(), [1])
    if not alike:
        raise RuntimeError(
            "ranks have called different units, and with zero=3 each would compute with parts of another one's "
            "parameters: name units=[...] that all ranks call, or use zero=2"
        )


def parameters_used(engine: DataParallel, comm: Comm) -> set[str]:
    """Return the parameters that got a gradient in this step on any rank."""
    names, axis = list(engine.parameters), comm.mesh.gradient_axis
    used = {name for b in engine.buckets for name in b.touched}
    if comm.size(axis) == 1:
        return used
    flags = [int(name in used) for name in names]
    anywhere = host_values.to_device(flags, comm.world.device)
    comm.all_reduce(anywhere, axis, unit="used", phase="opt", reduction="max").wait()
    return {name for name, flag in zip(names, host_values.read(anywhere, flags), strict=True) if flag}


def gradient_norm(
    engine: DataParallel, comm: Comm, s: Strategy, gradients: Mapping[str, Tensor], split: Collection[str]
) -> float:
    """Return the 2-norm of the gradient over all ranks' shares. `gradients`: this rank's, by parameter; `split`: the
    parameters that are split over tp, of which each rank has a part of its own."""
    if s.tp > 1:
        square = _split_square(engine, comm, s, gradients, split)
    else:
        square = engine.norm_square()
        if s.gradients_differ_by_rank:
            over = "world" if engine.sharding.state else "pp"
            comm.all_reduce(square, over, unit="metrics", phase="opt").wait()
    return float(square.sqrt())


def _split_square(
    engine: DataParallel, comm: Comm, s: Strategy, gradients: Mapping[str, Tensor], split: Collection[str]
) -> Tensor:
    """Return the squared norm of split layers, (), fp64; of a tensor that is whole on every tp rank, each counts its
    share."""
    square = torch.zeros((), dtype=torch.float64, device=comm.world.device)
    for name, gradient in gradients.items():
        square += gradient.double().square().sum() / (1 if name in split else s.tp)
    square /= s.dp_replicate if engine.sharding.state else s.dp
    comm.all_reduce(square, "world", unit="metrics", phase="opt").wait()
    return square
