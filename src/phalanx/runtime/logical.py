"""The state of training by layout-free names, as checkpoints hold it: single-process names, global shapes.

parameters.<fqn>              in the master type
optimizer.<fqn>.<state>       exp_avg, exp_avg_sq, momentum_buffer, ...; step
compression.<fqn>.kept        what was kept back of the gradient, summed over the ranks; split evenly on load
compression.<fqn>.q<rank>     PowerSGD's factor; compression.draws: how many reductions have drawn
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.runtime.data_parallel import DataParallel
from phalanx.runtime.transport import Call

OPTIONAL = "compression."
"""A checkpoint of another strategy lacks these: training then begins with nothing kept back."""


@torch.no_grad()
def gather(engine: DataParallel, masters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything whole: views of live state at stage 0, copies that all ranks gather together else."""
    state = {name: optimizer.state[master] for name, master in masters.items()}
    if engine.stage == 0:
        found = {f"parameters.{name}": master.detach() for name, master in masters.items()}
        found |= {f"optimizer.{n}.{key}": value for n, own in state.items() for key, value in own.items()}
        return found | _compression(engine)
    found = {}
    keys, counters = _kinds(engine, state)
    for flat in engine.buckets:
        assert flat.master is not None
        found |= {f"parameters.{n}": t for n, t in flat.views(engine.whole(flat.master)).items()}
        for key in keys:
            shard = torch.zeros_like(flat.master)
            for piece in flat.pieces():
                piece.of(shard).copy_(state[piece.parameter.fqn][key])
            found |= {f"optimizer.{n}.{key}": t for n, t in flat.views(engine.whole(shard)).items()}
    names = [p.fqn for flat in engine.buckets for p in flat.bucket.parameters]
    found |= {f"optimizer.{n}.{key}": torch.as_tensor(v).clone() for n in names for key, v in counters.items()}
    return found | _compression(engine)


def _kinds(engine: DataParallel, state: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """(States with a number for each element, counters). Asked of all ranks: one may hold no element of any
    parameter."""
    mine = {key: None if _per_element(value) else value for own in state.values() for key, value in own.items()}
    told = engine.comm.gather_objects(mine, engine.axis)
    kinds = {key: value for own in told for key, value in own.items()}
    return sorted(k for k, v in kinds.items() if v is None), {k: v for k, v in kinds.items() if v is not None}


def _per_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _compression(engine: DataParallel) -> dict[str, Tensor]:
    c, comm = engine.compressor, engine.comm
    if c is None:
        return {}
    found = {f"{OPTIONAL}draws": torch.tensor(c.draws)}
    axis = comm.mesh.gradient_axis
    for b in engine.buckets:
        kept = c.kept_back(b)
        if kept is not None:
            ranks = comm.ranks(axis)
            comm.start(Call("all_reduce", ranks, ranks.index(comm.world.rank), kept, kept)).wait()
            found |= {f"{OPTIONAL}{n}.kept": t for n, t in b.views(kept).items()}
        found |= {f"{OPTIONAL}{n}.q{q.shape[1]}": q.clone() for n, q in c.factors(b).items()}
    return found


@torch.no_grad()
def restore(
    engine: DataParallel, masters: dict[str, Tensor], optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Take over tensors of these names. At stage 0 they are the live ones already; weights follow masters."""
    if engine.stage:
        for piece, master, _ in engine.pieces():
            name = piece.parameter.fqn
            master.copy_(tensors[f"parameters.{name}"].flatten()[piece.start : piece.stop])
            for key, value in optimizer.state[masters[name]].items():
                given = tensors[f"optimizer.{name}.{key}"]
                value.copy_(given.flatten()[piece.start : piece.stop] if _per_element(value) else given)
        engine.updated()
    c = engine.compressor
    if c is None:
        return
    c.draws = int(tensors[f"{OPTIONAL}draws"])
    for b in engine.buckets:
        kept = c.kept_back(b)
        if kept is not None:
            for name, view in b.views(kept.zero_()).items():
                view.copy_(tensors[f"{OPTIONAL}{name}.kept"])
            c.put_back(b, kept.div_(engine.comm.size(engine.comm.mesh.gradient_axis)))
        for name, q in c.factors(b).items():
            q.copy_(tensors[f"{OPTIONAL}{name}.q{q.shape[1]}"])
