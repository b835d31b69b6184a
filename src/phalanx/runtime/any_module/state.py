"""The state of a parallelized module, whatever its layout: its unsharded state_dict, and checkpoints.

    state_dict    gathered over the shards of ZeRO, the tp ranks of split layers, the stages of a pipeline
    checkpoint    parameters and optimizer state as runtime/data_parallel/logical_state.py names them; frozen
                  parameters and buffers as rest.<name>. Names and shapes are the whole module's: any layout reads it

All of it is called by all ranks together.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from phalanx.runtime.any_module.split_names import SplitNames
from phalanx.runtime.any_module.tensor_comm import gather_parts
from phalanx.runtime.checkpoint.async_saver import Saver
from phalanx.runtime.checkpoint.boxes import TensorPart, full_part, share
from phalanx.runtime.checkpoint.container import Reader
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel import logical_state
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

Buffers = Literal["rank 0", "average", "synchronise"]
"""How ranks with different batches arrive at equal buffers."""


@dataclass(frozen=True)
class ModuleState:
    """A rank's part of a module, and how it is cut.

    `masters`: the tensors that this rank updates, by name; `weights`: parameters separate from their masters;
    `names`: canonical name of every alias of a trained parameter; `whole`: in a pipeline the state_dict of the entire
    module, without memory (else empty); `trained`: its trained names."""

    module: nn.Module
    comm: Comm
    strategy: Strategy
    engine: DataParallel
    master_dtype: torch.dtype
    masters: dict[str, Tensor]
    weights: dict[str, Tensor]
    names: dict[str, str]
    split: SplitNames
    whole: Mapping[str, Tensor]
    trained: Collection[str]

    @property
    def alike(self) -> str:
        """Axis of the ranks that hold the same part of the module."""
        grid = self.comm.mesh
        if not self.split.unsplit:
            return grid.name("dp_replicate", "dp_shard", "cp")
        return "world" if self.strategy.pp == 1 else grid.name("dp_replicate", "dp_shard", "cp", "tp")

    def weights_follow(self) -> None:
        """Copy the masters into the weights that are separate tensors."""
        for name, weight in self.weights.items():
            weight.copy_(self.masters[name])

    def place(self, name: str) -> str:
        """Return the name that the plan and the engine use for a tensor of the state_dict."""
        return self.names.get(name, name)


def start_masters(
    engine: DataParallel, trained: Mapping[str, nn.Parameter], initial: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Start the tensors that this rank updates, in the master type, from the initial values; return them, and where
    their reduced gradients will be, by parameter."""
    if not engine.sharding.state:
        separate = {n: initial[n].to(dtype, copy=True) if p.dtype != dtype else p for n, p in trained.items()}
        return separate, dict(engine.gradients())
    engine.start(lambda piece: initial[piece.parameter.fqn].view(-1)[piece.start : piece.stop])
    masters: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for piece, own, gradient in engine.pieces():
        masters[piece.parameter.fqn], gradients[piece.parameter.fqn] = own, gradient
    return masters, gradients


def state_of(
    module: nn.Module,
    comm: Comm,
    strategy: Strategy,
    engine: DataParallel,
    master: torch.dtype,
    masters: dict[str, Tensor],
    trained: Mapping[str, nn.Parameter],
    split: SplitNames,
    whole: nn.Module | None,
) -> ModuleState:
    """Return the state of a rank's module. `whole`: in a pipeline the entire module, without memory."""
    own_masters: dict[str, Tensor] = {}
    if not engine.sharding.state:
        own_masters = {n: p for n, p in trained.items() if masters[n] is not p}
    # Aliases of the same parameters, as tied weights have in a state_dict.
    by_id = {id(p): n for n, p in trained.items()}
    aliases = module.named_parameters(remove_duplicate=False)
    names = {n: by_id[id(p)] for n, p in aliases if id(p) in by_id}
    if whole is None:
        return ModuleState(module, comm, strategy, engine, master, masters, own_masters, names, split, {}, names)
    anywhere = whole.named_parameters(remove_duplicate=False)
    everywhere = frozenset(n for n, p in anywhere if p.requires_grad)
    tensors = dict(whole.state_dict())
    return ModuleState(
        module, comm, strategy, engine, master, masters, own_masters, names, split, tensors, everywhere
    )


@torch.no_grad()
def state_dict(state: ModuleState) -> dict[str, Tensor]:
    """Return the entire module's state_dict, unsharded, parameters in the master type; all ranks together."""
    engine, comm = state.engine, state.comm
    unsharded = {} if state.engine.sharding.state else dict(state.masters)
    for b in engine.buckets if engine.sharding.state else ():
        unsharded |= b.views(engine.gather_bucket(b, b.master))
    own: dict[str, Tensor] = {}
    for name, t in state.module.state_dict().items():
        known = state.place(name)
        full = unsharded.get(known, t)
        cut = state.split.cuts.get(known)
        own[name] = (full if cut is None else cut.joined(gather_parts(full, comm))).detach().clone()
    if not state.whole:
        return own
    return {name: _from_its_stage(state, name, like, own.get(name)) for name, like in state.whole.items()}


def _from_its_stage(state: ModuleState, name: str, like: Tensor, own: Tensor | None) -> Tensor:
    """Return a tensor that one pipeline stage has (`own`, else None) on all stages, by a sum in which the others add
    zeros."""
    dtype = state.master_dtype if name in state.trained else like.dtype
    carried = dtype if dtype.is_floating_point else torch.int64
    zeros = torch.zeros(like.shape, dtype=carried, device=state.comm.world.device)
    sent = zeros if own is None else own.to(carried).contiguous()
    state.comm.all_reduce(sent, "pp", unit="state", phase="opt").wait()
    return sent.to(dtype)


@torch.no_grad()
def load_state_dict(state: ModuleState, tensors: Mapping[str, Tensor]) -> None:
    """Load an unsharded state_dict of the entire module. Raises InputError, before anything changes, if names or
    shapes are not the module's."""
    current = state.module.state_dict()
    expected = state.whole or current
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise InputError("state_dict", name, "is missing" if name in expected else "is not in the module")
    for name, t in expected.items():
        shape = tuple(t.shape) if state.whole else state.split.shape(state.place(name))
        if tuple(tensors[name].shape) != shape:
            actual = tuple(tensors[name].shape)
            raise InputError("state_dict", name, f"has the shape {actual}, the module's is {shape}")
    mine = {name: state.split.part(state.place(name), tensors[name]) for name in current}
    for name in current.keys() - state.names.keys():
        current[name].copy_(mine[name])
    if not state.engine.sharding.state:
        for name, master in state.masters.items():
            master.copy_(mine[name])
    for piece, master, _ in state.engine.pieces() if state.engine.sharding.state else ():
        master.copy_(mine[piece.parameter.fqn].reshape(-1)[piece.start : piece.stop])
    state.weights_follow()
    state.engine.updated()


def save(state: ModuleState, optimizer: torch.optim.Optimizer, folder: Path, step: int, keep: int) -> None:
    """Write a checkpoint; all ranks together."""
    saver = Saver(folder, state.comm, keep)
    mine = logical_state.owned_parts(state.engine, state.masters, optimizer, _boxes(state))
    rest = share(_rest(state, copies=False), state.comm.index(state.alike), state.comm.size(state.alike))
    saver.save(step, (*mine, *rest), {})
    saver.wait()


@torch.no_grad()
def load(state: ModuleState, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    """Load the checkpoint of a step, into an optimizer whose state is allocated; all ranks together."""
    # A parameter that has never got a gradient has no state.
    labels = (name for name in Reader(folder, step).contents if name.startswith("optimizer."))
    known = {name.removeprefix("optimizer.").rpartition(".")[0] for name in labels}
    for name in state.masters.keys() - known if known else ():
        optimizer.state.pop(state.masters[name], None)
    rest = _rest(state, copies=True)
    logical_state.load(state.engine, state.masters, optimizer, folder, step, rest, _boxes(state))
    state.weights_follow()


def _boxes(state: ModuleState) -> SplitNames | None:
    return None if state.split.unsplit else state.split


def _rest(state: ModuleState, copies: bool) -> Iterator[TensorPart]:
    """Yield frozen parameters and buffers; without `copies`, except tensors that an earlier tp rank also holds."""
    for name, t in state.module.state_dict().items():
        if name in state.names:
            continue
        t = t if copies else t.contiguous()
        if state.split.unsplit:
            yield full_part(f"rest.{name}", t)
            continue
        flat, at = t.detach().view(-1), 0
        for box in state.split.boxes_of(name):
            if copies or not state.split.index % box.copies:
                within = (box.offsets, box.sizes)
                yield TensorPart(f"rest.{name}", box.parameter.shape, 0, flat[at : at + box.numel], within)
            at += box.numel


def make_buffers_alike(state: ModuleState, mode: Buffers) -> None:
    """Give the ranks that hold the same part of a module the buffers of the first of them, or the mean of
    floating-point ones, one collective for each type. They differ where ranks saw different batches, as in BatchNorm;
    synchronised statistics are equal already, and other buffers follow the first rank."""
    ranks = state.comm.size(state.alike)
    if ranks == 1:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for buffer in state.module.buffers():
        if buffer.numel():
            by_type.setdefault(buffer.dtype, []).append(buffer)
    for dtype, own in by_type.items():
        flat = torch.cat([buffer.reshape(-1) for buffer in own])
        flat = flat if dtype.is_floating_point else flat.to(torch.int64)
        averaged = mode == "average" and dtype.is_floating_point
        if not averaged and state.comm.index(state.alike):
            flat.zero_()  # so that the sum is what the first rank has
        state.comm.all_reduce(flat, state.alike, unit="buffers", phase="opt").wait()
        flat = flat / ranks if averaged else flat
        for buffer, new in zip(own, flat.split([b.numel() for b in own]), strict=True):
            buffer.copy_(new.view(buffer.shape))
