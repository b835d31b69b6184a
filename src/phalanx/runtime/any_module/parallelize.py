"""Data and tensor parallelism for any torch.nn.Module: the engine of `phalanx train` in a few lines of your loop.

    model = phalanx.parallelize(module, "zero=2")
    optimizer = model.attach(torch.optim.AdamW(model.parameters(), lr=3e-4))
    for batch in loader:                                  # the micro-batches of a step, this rank's share
        for i, (x, y) in enumerate(batch):
            model.backward(loss(model(x), y), last=i == len(batch) - 1)
        model.clip(1.0)
        optimizer.step()

Start it by torchrun or srun, or as a single process. All ranks have the same module, and run its units in the same
order.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.runtime.any_module.tensor_plan import gathered_over_tp, published_plan, split_layers
from phalanx.runtime.any_module.units import common_dtype, cut_buckets, find_units, require_spreadable
from phalanx.runtime.checkpoint.async_saver import Saver, agree_on_newest
from phalanx.runtime.checkpoint.boxes import full_part, share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.data_parallel import logical_state
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.world import World
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse

_WHOLE_TENSORS = ("LBFGS", "Adafactor", "Muon")
"""Optimizers of torch whose update of an element depends on others, so that they need unsharded tensors."""
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def parallelize(
    module: nn.Module,
    strategy: str | Strategy = "",
    *,
    precision: Precision | None = None,
    units: Sequence[nn.Module] | None = None,
    average: bool = True,
    transport: Literal["native", "p2p", "shm"] = "native",
    buffers: Literal["rank 0", "average"] = "rank 0",
    tp_plan: Mapping[str, str] | Literal["published"] | None = None,
    timeout_s: float = 300.0,
) -> Parallel:
    """Train a module data-parallel, and tensor-parallel by a plan of names, over the ranks of this run; all ranks
    together.

    strategy    one line, as on the command line: "zero=3", "dp=8,zero=2,shard=4,compression=int8"; dp defaults to the
                number of ranks
    precision   number types; by default they follow from the type of the module's parameters
    units       what ZeRO-3 gathers at once, and what ZeRO-1 and 2 wait for, in forward order: by default the
                members of the module's outermost ModuleLists and Sequentials. Units do not nest, and a unit's
                parameters are used in its own forward pass alone; what several share is gathered for the whole pass
    average     gradients are averaged over the replicas, as by DistributedDataParallel; else summed
    transport   of all collectives: torch's own, sends and receives, or shared memory (ranks of one host)
    buffers     at the end of a step they follow those of rank 0, or floating-point ones are averaged over all ranks
    tp_plan     with tp > 1, which layers are split and how (tensor_plan.py): {"layers.*.up": "colwise", ...};
                "published", the default, takes that of a Hugging Face model. All tp ranks of a replica get the same
                batch; heads per layer are the module's business: it must take their number from the layers' outputs

    Parameters and buffers become those of rank 0. Frozen parameters are not sharded. A parameter that gets no
    gradient is updated with a gradient of zeros. ZeRO-3 has no double backward, and allows activation checkpointing
    inside a unit, not around it. Raises InputError.
    """
    return spread(_world(timeout_s), module, strategy, precision, units, average, transport, buffers, tp_plan)


def spread(
    world: World,
    module: nn.Module,
    strategy: str | Strategy = "",
    precision: Precision | None = None,
    units: Sequence[nn.Module] | None = None,
    average: bool = True,
    transport: Literal["native", "p2p", "shm"] = "native",
    buffers: Literal["rank 0", "average"] = "rank 0",
    tp_plan: Mapping[str, str] | Literal["published"] | None = None,
) -> Parallel:
    """Do what `parallelize` does, in a world that has been joined."""
    s = _strategy(strategy, world)
    if buffers not in ("rank 0", "average"):
        raise InputError("buffers", buffers, "is not a choice", "use 'rank 0' or 'average'")
    if tp_plan is not None and s.tp == 1:
        raise InputError("tp_plan", None, "splits layers over the tp ranks, and tp is 1", "use a strategy with tp=2")
    require_spreadable(module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    precision = precision or Precision(common_dtype(trained))  # type: ignore[arg-type]
    if precision.compute == "float16":
        raise InputError(
            "precision.compute", "float16", "needs a loss scale, which only `phalanx train` has", "use bfloat16"
        )
    require_runnable(s, Job(s.dp, 1, precision))
    plan: Mapping[str, str] = {}
    if s.tp > 1:  # refused before anything is sent
        plan = published_plan(module) if tp_plan is None or tp_plan == "published" else tp_plan
    module.to(world.device)
    choices = [Choice(op, world.size, 0, transport) for op in _OPS] if transport != "native" else []
    comm = Comm(world, mesh(s), choices)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.contiguous()
            comm.broadcast(tensor.data, "world")
    dims = split_layers(module, plan, comm) if s.tp > 1 else {}
    return Parallel(module, trained, s, precision, comm, find_units(module, units), average, buffers, dims)


class Parallel(nn.Module):
    """A module that trains data-parallel. Call it like the module; `module` is the module itself.

    As of any nn.Module there are train, eval, modules, buffers; `parameters`, `state_dict` and `load_state_dict` are
    those of the training state below. It is moved, cast and frozen before it is parallelized, not after."""

    def __init__(
        self,
        module: nn.Module,
        trained: dict[str, nn.Parameter],
        strategy: Strategy,
        precision: Precision,
        comm: Comm,
        units: dict[str, nn.Module],
        average: bool,
        buffers: Literal["rank 0", "average"] = "rank 0",
        dims: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.strategy, self.comm = module, strategy, comm
        self.training = module.training
        self._buffers_follow, self._split_dims = buffers, dict(dims or {})
        self._share = 1 / strategy.dp if average else 1.0
        compute, master = DTYPES[precision.compute], DTYPES[precision.master_dtype]
        initial = {name: p.data for name, p in trained.items()}
        for name, p in trained.items():
            p.data = initial[name].to(compute)
        cut = cut_buckets(trained, units, strategy, precision)
        self._engine = DataParallel(module, cut, precision, comm, strategy, units)
        self._masters: dict[str, Tensor] = {}
        if strategy.effective_zero == 0:
            separate = master != compute
            self._masters = {n: initial[n].to(master, copy=True) if separate else p for n, p in trained.items()}
            self._gradients = dict(self._engine.gradients())
        else:
            self._engine.start(lambda piece: initial[piece.parameter.fqn].view(-1)[piece.start : piece.stop])
            self._gradients = {}
            for piece, own, gradient in self._engine.pieces():
                self._masters[piece.parameter.fqn], self._gradients[piece.parameter.fqn] = own, gradient
        self._weights = {
            n: p for n, p in trained.items() if strategy.effective_zero == 0 and self._masters[n] is not p
        }
        # Other names of the same parameters, as tied weights have in a state_dict.
        names = {id(p): n for n, p in trained.items()}
        everything = module.named_parameters(remove_duplicate=False)
        self._names = {n: names[id(p)] for n, p in everything if id(p) in names}
        self._empty = torch.zeros(0, dtype=master)  # what a rank without any element gives its optimizer
        self._micro_batch = -1  # none of this step yet
        self._complete = self._failed = self._allocating = False
        # The module's own state_dict reads weights, whose all-gather may be in flight.
        module.register_state_dict_pre_hook(lambda *_: self.synchronize())
        self._optimizer: torch.optim.Optimizer | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.comm.world.rank

    @property
    def replica(self) -> int:
        """The index of this rank's share of the data, of `strategy.dp`."""
        return self.comm.mesh.replica(self.rank)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def _apply(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a parallelized module is not moved or cast, for its memory is the engine's: do so before")

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse: what is trained was decided when the module was parallelized."""
        raise RuntimeError("parameters are frozen before a module is parallelized, not after")

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank updates, by the module's names: the parameters (or their masters) with zero=0, else
        its flat piece of each, in the master type. Parameters of which it holds nothing are left out."""
        start = f"{prefix}." if prefix else ""
        yield from ((start + name, p) for name, p in self._masters.items() or [("nothing", self._empty)])

    def parameters(self, recurse: bool = True) -> list[Tensor]:  # type: ignore[override]
        """Return the tensors of `named_parameters`, to make an optimizer for."""
        return [p for _, p in self.named_parameters()]

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make the steps of an optimizer use the reduced gradients and gather the new weights; return it. It must be
        made for `parameters()`, and with zero >= 1 treat every element by itself. Raises InputError."""
        known = {id(p) for p in self.parameters()}
        name = type(optimizer).__name__
        if self.strategy.effective_zero and name in _WHOLE_TENSORS:
            raise InputError(
                "optimizer", name, f"looks at whole tensors, and zero={self.strategy.zero} shards them", "use zero=0"
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held != known:
            what = "holds tensors that this model does not update" if held - known else "does not hold all parameters"
            raise InputError("optimizer", name, what, "make it for model.parameters()")
        if self._optimizer is not None:
            raise InputError("optimizer", name, "is the second one for this model", "attach one")
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        optimizer.register_step_post_hook(lambda *_: self._after_update())
        self._optimizer = optimizer
        return optimizer

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Run the backward pass of a micro-batch. After the `last` of a step, gradients are complete and reduced over
        the replicas, ready for `clip` and the optimizer. Raises RuntimeError if an earlier pass failed."""
        if self._optimizer is None:
            raise RuntimeError(
                "no optimizer is attached, so that no step would change a weight: "
                "optimizer = model.attach(torch.optim.AdamW(model.parameters(), lr=...))"
            )
        if self._failed:
            raise RuntimeError("an earlier backward pass failed half-way: ranks may be out of step; start again")
        self._failed = True
        engine = self._engine
        if self._micro_batch < 0 or self._complete:
            engine.begin()
            self._micro_batch, self._complete = -1, False
        self._micro_batch += 1
        engine.backward(self._micro_batch, last)
        self.comm.status.now(f"backward of micro-batch {self._micro_batch}")
        (loss * self._share if self._share != 1 else loss).backward()
        if last:
            engine.finish()
            self._complete = True
        else:
            engine.settle()
        self._failed = False

    @torch.no_grad()
    def norm(self) -> float:
        """Return the 2-norm of the gradient, over all ranks' shares; all ranks together."""
        self._require_complete("the norm of the gradient")
        if self._split_dims:
            return self._split_norm()
        square = self._engine.norm_square()
        if self.strategy.effective_zero:
            self.comm.all_reduce(square, "world", unit="metrics", phase="opt").wait()
        return float(square.sqrt())

    def _split_norm(self) -> float:
        """Return the norm where layers are split: of what all tp ranks hold, each counts its tp-th part."""
        s = self.strategy
        square = torch.zeros((), dtype=torch.float64, device=self.comm.world.device)
        for name, gradient in self._gradients.items():
            square += gradient.double().square().sum() / (1 if name in self._split_dims else s.tp)
        square /= s.dp_replicate if s.effective_zero else s.dp
        self.comm.all_reduce(square, "world", unit="metrics", phase="opt").wait()
        return float(square.sqrt())

    @torch.no_grad()
    def clip(self, most: float) -> float:
        """Scale the gradient to a norm of at most `most`; return the norm before. All ranks together."""
        norm = self.norm()
        self._engine.scale(min(1.0, most / (norm + 1e-6)))
        return norm

    def _require_complete(self, what: str) -> None:
        if not self._complete:
            raise RuntimeError(f"{what} is wanted before backward(loss, last=True) has ended the step")

    def synchronize(self) -> None:
        """Wait for the weights, before reading them outside of a forward pass: with zero=1 and 2 their all-gather may
        be in flight since the last update. (With zero=3 the module holds none; see `state_dict`.)"""
        if self.strategy.effective_zero in (1, 2):
            self._engine.wait_parameters(list(self._engine.parameters))

    @torch.no_grad()
    def _before_update(self) -> None:
        self._require_complete("an update")
        for name, p in self.module.named_parameters():
            if p.requires_grad and name not in self._engine.parameters:
                raise RuntimeError(f"{name} was frozen when the module was parallelized, and cannot be trained now")
        for name, master in self._masters.items():
            gradient = self._gradients[name]
            master.grad = gradient if gradient.dtype == master.dtype else gradient.to(master.dtype)

    @torch.no_grad()
    def _after_update(self) -> None:
        for master in self._masters.values():
            master.grad = None
        for name, weight in self._weights.items():
            weight.copy_(self._masters[name])
        if not self._allocating:
            self._engine.updated()
            self._make_buffers_alike()
        self._micro_batch, self._complete = -1, False

    def _make_buffers_alike(self) -> None:
        """Give every rank the buffers of rank 0, or the mean of floating-point ones, one collective for each type.
        Where ranks saw other batches, as in BatchNorm, they differ."""
        if self.strategy.world == 1:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            if buffer.numel():
                by_type.setdefault(buffer.dtype, []).append(buffer)
        for dtype, own in by_type.items():
            flat = torch.cat([buffer.reshape(-1) for buffer in own])
            flat = flat if dtype.is_floating_point else flat.to(torch.int64)
            averaged = self._buffers_follow == "average" and dtype.is_floating_point
            if not averaged and self.rank:
                flat.zero_()  # so that the sum is what rank 0 has
            self.comm.all_reduce(flat, "world", unit="buffers", phase="opt").wait()
            flat = flat / self.strategy.world if averaged else flat
            for buffer, new in zip(own, flat.split([b.numel() for b in own]), strict=True):
                buffer.copy_(new.view(buffer.shape))

    @torch.no_grad()
    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """Return the module's state_dict, unsharded, parameters in the master type; all ranks together."""
        engine = self._engine
        unsharded = dict(self._masters) if self.strategy.effective_zero == 0 else {}
        for b in engine.buckets if self.strategy.effective_zero else ():
            assert b.master is not None
            unsharded |= b.views(engine.gather_bucket(b, b.master))
        for name, dim in self._split_dims.items():
            if name in unsharded:
                unsharded[name] = gathered_over_tp(unsharded[name], dim, self.comm)
        result: dict[str, Tensor] = {} if destination is None else destination
        for name, t in self.module.state_dict().items():
            result[prefix + name] = (unsharded[self._names[name]] if name in self._names else t).detach().clone()
        return result

    def _own_part(self, name: str, t: Tensor) -> Tensor:
        """Return this tp rank's part of an unsharded tensor."""
        dim = self._split_dims.get(self._names.get(name, name))
        if dim is None:
            return t
        return t.chunk(self.strategy.tp, dim)[self.comm.mesh.place(self.rank)["tp"]]

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
        """Load an unsharded state_dict of the module. Raises InputError, before anything changes, if names or shapes
        are not the module's."""
        if not strict or assign:
            raise InputError("load_state_dict", None, "is always strict, and copies", "leave strict and assign out")
        own = self.module.state_dict()
        state = {name: self._own_part(name, t) for name, t in state.items()}
        for name in sorted(own.keys() ^ state.keys()):
            raise InputError("state_dict", name, "is missing" if name in own else "is not in the module")
        for name, t in own.items():
            if state[name].shape != t.shape:
                expected, actual = tuple(t.shape), tuple(state[name].shape)
                raise InputError("state_dict", name, f"has the shape {actual}, the module's is {expected}")
        for name in own.keys() - self._names.keys():
            own[name].copy_(state[name])
        if self.strategy.effective_zero == 0:
            for name, master in self._masters.items():
                master.copy_(state[name])
        for piece, master, _ in self._engine.pieces() if self.strategy.effective_zero else ():
            master.copy_(state[piece.parameter.fqn].reshape(-1)[piece.start : piece.stop])
        for name, weight in self._weights.items():
            weight.copy_(self._masters[name])
        self._engine.updated()

    def save(self, folder: str | Path, step: int, keep: int = 2) -> None:
        """Write a checkpoint of parameters, optimizer state, residuals of compression, frozen parameters and buffers;
        it can be loaded with any strategy. The newest `keep` are kept. All ranks together."""
        self._require_whole_layers()
        self._make_buffers_alike()
        saver = Saver(Path(folder), self.comm, keep)
        rest = (full_part(name, t.contiguous()) for name, t in self._rest().items())
        assert self._optimizer is not None
        mine = logical_state.owned(self._engine, self._masters, self._optimizer)
        saver.save(step, (*mine, *share(rest, self.rank, self.comm.world.size)), {})
        saver.wait()

    def load(self, folder: str | Path) -> int:
        """Load the newest intact checkpoint and return its step, 0 if there is none; all ranks together. Raises
        CheckpointError."""
        self._require_whole_layers()
        assert self._optimizer is not None
        step = agree_on_newest(Path(folder), self.comm)
        if step is None:
            return 0
        self._allocate_state()
        logical_state.load(self._engine, self._masters, self._optimizer, Path(folder), step, self._rest())
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._masters[name])
        return step

    def _require_whole_layers(self) -> None:
        if self._optimizer is None:
            raise RuntimeError("a checkpoint has the optimizer's state: attach an optimizer first")
        if self._split_dims:
            raise InputError("strategy.tp", self.strategy.tp, "has no checkpoints here", "save state_dict()")

    def _rest(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers, by their names in a checkpoint."""
        return {f"rest.{n}": t for n, t in self.module.state_dict().items() if n not in self._names}

    def _allocate_state(self) -> None:
        """Make the optimizer allocate its state, which most do in their first step, by a step that changes
        nothing. Ranks do so by themselves: one without any element has no state, whatever it steps."""
        optimizer = self._optimizer
        assert optimizer is not None
        if optimizer.state:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        self._engine.begin()
        self._complete = self._allocating = True
        optimizer.step()
        self._allocating = False
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _world(timeout_s: float) -> World:
    """Join the ranks of this run, unless the caller has done so."""
    if not dist.is_initialized():
        world = worlds.external() or worlds.ALONE
        worlds.join(world, timeout_s)
        if world.size > 1:
            atexit.register(worlds.leave)
        return world
    external = worlds.external()
    rank, size = dist.get_rank(), dist.get_world_size()
    return external if external and external.size == size else World(rank, size, rank, size)


def _strategy(strategy: str | Strategy, world: World) -> Strategy:
    """Return a strategy that the engine can run in this world. Raises InputError."""
    if isinstance(strategy, str):
        table = parse(strategy)
        split = table.get("tp", 1)
        fill = world.size // split if isinstance(split, int) and split > 0 else world.size
        parsed = make_strategy({"dp": max(fill, 1), **table})
        assert parsed is not None
        strategy = parsed
    train = "`phalanx train` does for a model that it knows"
    for name, alone, why, mend in (
        ("cp", 1, f"splits sequences inside attention, which {train}", "use dp and tp"),
        ("pp", 1, f"cuts a model into stages, which {train}", "use dp and tp, zero=3 where memory is short"),
        ("sp", False, f"splits the residual stream between layers, which {train}", "leave sp out"),
        ("ep", 1, f"sends tokens to experts, which {train}", "use dp and tp"),
        ("etp", 1, f"splits experts, which {train}", "use dp and tp"),
        ("recompute", "none", f"repeats layers, which {train}", "use torch.utils.checkpoint inside the units"),
    ):
        if getattr(strategy, name) != alone:
            raise InputError(f"strategy.{name}", getattr(strategy, name), why, mend)
    if strategy.tp > 1 and strategy.compression != "none":
        reason = "compresses gradients of whole layers, and tp splits them"
        raise InputError("strategy.compression", strategy.compression, reason, "leave one of them out")
    if strategy.world != world.size:
        raise InputError(
            "strategy", str(strategy), f"is for {strategy.world} ranks, but there are {world.size}", "leave dp out"
        )
    return strategy
