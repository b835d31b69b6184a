"""A parallelized module: what a training loop calls, and in which order.

    backward(loss, last)    a micro-batch; with the last of a step gradients are reduced over the replicas
    step(batches, loss)     all micro-batches of a step: the same loop, or the schedule of a pipeline (stages.py)
    clip, norm              of the whole gradient
    optimizer.step()        attached: reads the reduced gradients, spreads the new weights, makes buffers alike
    state_dict, save, load  the state, whatever the layout (state.py)

Collectives are issued by the engine (runtime/data_parallel/engine.py), by split layers, and for the state.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.runtime.any_module import state as states
from phalanx.runtime.any_module.agreement import gradient_norm, parameters_used, require_equal_calls
from phalanx.runtime.any_module.first_pass import has_values, prove
from phalanx.runtime.any_module.first_step import FirstStep
from phalanx.runtime.any_module.optimizer_probe import looks_beyond_elements
from phalanx.runtime.any_module.shown_gradients import GradientElsewhere, show
from phalanx.runtime.any_module.split_names import Cut, SplitNames
from phalanx.runtime.any_module.stages import Loss, ModuleStages
from phalanx.runtime.any_module.state import Buffers
from phalanx.runtime.any_module.units import cut_buckets, cut_chunks, require_calls
from phalanx.runtime.checkpoint.async_saver import agree_on_newest
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.process.rank import naming_collective
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.errors import InputError
from phalanx.spec.job import Precision
from phalanx.spec.optimizers import OPTIMIZERS
from phalanx.spec.strategy.spec import Strategy

_WHOLE_TENSORS = {"LBFGS", "Adafactor", *(row.torch for row in OPTIMIZERS.values() if row.whole)}
"""torch's optimizers that need unsharded tensors, because the update of an element depends on others."""


class Parallel(nn.Module):
    """A module that trains in parallel. Call it like the module; `module` is this rank's part: the module itself, or
    in a pipeline a Sequential of this rank's children.

    It has train, eval, modules and buffers as any nn.Module; `parameters`, `state_dict` and `load_state_dict` concern
    the training state below. It is moved and cast before it is parallelized, not after; `requires_grad_` concerns all
    that it trains.

    `cuts`: the cut of each tensor that is split over tp; `cut`: the children of each chunk of a pipeline, and the
    entire module without memory; `unsplit`: the module before it was split and its plan, which is proved on the first
    batch (first_pass.py); `first_step`: what compares the first step with one process (first_step.py)."""

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        precision: Precision,
        comm: Comm,
        units: dict[str, nn.Module],
        average: bool,
        buffers: Buffers = "rank 0",
        cuts: Mapping[str, Cut] | None = None,
        cut: tuple[tuple[tuple[str, ...], ...], nn.Module] | None = None,
        unsplit: tuple[nn.Module, Mapping[str, str]] | None = None,
        first_step: FirstStep | None = None,
    ) -> None:
        super().__init__()
        self.module, self.strategy, self.comm = module, strategy, comm
        self.training = module.training
        self._buffers_follow = buffers
        self._share = 1 / strategy.dp if average else 1.0
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if hooked := [name for name, p in trained.items() if getattr(p, "_post_accumulate_grad_hooks", None)]:
            said = "a hook on an accumulated gradient sees what one rank has of one micro-batch, before any sum"
            warnings.warn(f"{hooked[0]}: {said}: change gradients by the loss, or by model.clip", stacklevel=3)
        compute, master = DTYPES[precision.compute], DTYPES[precision.master_dtype]
        place = comm.mesh.place(comm.world.rank)
        shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        split = SplitNames(strategy.tp, place["tp"], dict(cuts or {}), shapes)
        initial = {name: p.data for name, p in trained.items()}
        for name, p in trained.items():
            p.data = initial[name].to(compute)
        for p in unsplit[0].parameters() if unsplit is not None else ():
            p.data = p.data.to(compute) if p.requires_grad else p.data
        # In a list, so that it is no submodule.
        self._unsplit = [] if unsplit is None else [unsplit]
        self._first_step = [] if first_step is None else [first_step]
        if cut is None:
            filled, of_chunks = cut_buckets(trained, units, strategy, precision), None
        else:
            ranks = rank_of(strategy)
            local = [names for names, rank in zip(cut[0], ranks, strict=True) if rank == place["pp"]]
            filled, of_chunks = cut_chunks(trained, units, strategy, precision, local)
        engine = DataParallel(module, filled, precision, comm, strategy, units, of_chunks)
        if engine.sharding.state:
            require_calls(units)
        masters, self._gradients = states.start_masters(engine, trained, initial, master)
        whole = None if cut is None else cut[1]
        self._state = states.state_of(module, comm, strategy, engine, master, masters, trained, split, whole)
        self._engine, self._masters = engine, masters
        children = {n: m for n, m in module.named_children()} if cut is not None else {}
        # Not registered as submodules: the children belong to `module`, and the skeleton must not count.
        self._stages = (
            None if cut is None else ModuleStages(comm, strategy, cut[0], children, cut[1], engine, compute)
        )
        self._empty = torch.zeros(0, dtype=master)  # the optimizer's only tensor on a rank without elements
        self._used = set(masters)  # parameters that got a gradient in this step, on any rank
        self._micro_batch = -1  # no micro-batch of this step yet
        self._shows = has_values(module)  # gradients, to whom reads `.grad`
        self._complete = self._failed = self._allocating = False
        # The module's own state_dict reads weights, whose all-gather may be in flight.
        module.register_state_dict_pre_hook(lambda *_: self.synchronize())
        self._optimizer: torch.optim.Optimizer | None = None
        # What `step` was called with, while it runs.
        self._given: tuple[Sequence[tuple[Tensor, Any]], Loss, float] | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.comm.world.rank

    @property
    def replica(self) -> int:
        """The index, below `replicas`, of this rank's share of the data."""
        return self.comm.mesh.replica(self.rank)

    @property
    def replicas(self) -> int:
        """The number of shares of the data."""
        return self.strategy.dp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Raises RuntimeError in a pipeline, where a rank has only part of the module; InputError if
        splitting it over tp has changed its function."""
        if self._stages is not None:
            raise RuntimeError("a rank of a pipeline has a part of the module: use model.step or model.evaluate")
        if self._unsplit:
            whole, plan = self._unsplit.pop()
            prove(whole, plan, self.comm, args, kwargs)
        with self._naming_collective():
            if self._first_step and any(p.requires_grad for p in self._engine.parameters.values()):
                return self._first_step[0].note(self.module, args, kwargs)
            return self.module(*args, **kwargs)

    def _naming_collective(self) -> AbstractContextManager[None]:
        remedy = "all ranks run the same number of micro-batches"
        if self._engine.gathered is not None:
            remedy += " and, with zero=3, call the same units equally often"
        return naming_collective(self.comm.world, remedy)

    def _apply(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a parallelized module is not moved or cast, for its memory is the engine's: do so before")

    def __deepcopy__(self, _: Any) -> Any:
        raise RuntimeError(
            "a parallelized module is not copied, for its memory is the engine's: copy the module before it is "
            "parallelized, as an average of weights, and load or follow model.state_dict()"
        )

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Let passes through this module give its trained parameters no gradient, as a discriminator's get none from
        its generator's loss; or again. Which are trained was fixed when the module was parallelized. Raises
        RuntimeError inside a step."""
        if self._micro_batch >= 0 and not self._complete:
            raise RuntimeError(
                "parameters are frozen between steps: backward(loss, last=True) has not ended this one"
            )
        for p in self._engine.parameters.values():
            p.requires_grad_(requires_grad)
        return self

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank updates, by the module's names: the parameters (or their masters) with
        zero=0, else its flat piece of each, in the master type. Parameters without a piece on this rank are left
        out."""
        start = f"{prefix}." if prefix else ""
        yield from ((start + name, p) for name, p in self._masters.items() or [("nothing", self._empty)])

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:  # type: ignore[override]
        """Yield the tensors of `named_parameters`, to make an optimizer for."""
        return (p for _, p in self.named_parameters())

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make the steps of an optimizer use the reduced gradients and gather the new weights; return it. It must be
        made for `parameters()`, and with zero >= 1 treat every element by itself. Raises InputError."""
        known = {id(p) for p in self.parameters()}
        name = type(optimizer).__name__
        flat = self._engine.sharding.state
        divided = flat or self.strategy.tp > 1
        if divided and (name in _WHOLE_TENSORS or looks_beyond_elements(optimizer, self.comm.world.device, flat)):
            what = f"zero={self.strategy.zero}" if self._engine.sharding.state else f"tp={self.strategy.tp}"
            reason = f"looks at whole tensors, and {what} divides them"
            raise InputError("optimizer", name, reason, "use zero=0 and tp=1")
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
        if self._stages is not None:
            raise RuntimeError("a pipeline runs forward and backward passes in its own order: use model.step")
        self._may_begin()
        self._failed = True
        engine = self._engine
        if self._micro_batch < 0 or self._complete:
            engine.begin()
            self._micro_batch, self._complete = -1, False
        self._micro_batch += 1
        with self._naming_collective():
            require_equal_calls(engine, self.comm)
            engine.backward(self._micro_batch, last)
            self.comm.status.now(f"backward of micro-batch {self._micro_batch}")
            (loss * self._share if self._share != 1 else loss).backward()
            if last:
                engine.finish()
                self._agree_on_gradients()
            else:
                engine.settle()
        if last:
            self._complete = True
            self._compare_first_step()
            self._show_gradients()
        self._failed = False

    def step(self, micro_batches: Sequence[tuple[Tensor, Any]], loss: Loss) -> float:
        """Run forward and backward passes of this replica's micro-batches of a step, (input, target) each; after it
        gradients are complete, as after `backward(loss, last=True)`. `loss(output, target)` returns a scalar, and the
        gradient is that of their sum, averaged over the replicas. All ranks of a pipeline get the same micro-batches,
        of one shape, in tensors. Returns the sum of the losses of this replica."""
        if not len(micro_batches):
            raise InputError("micro_batches", None, "has none", "a step needs at least one")
        if self._stages is None:
            total, self._given = 0.0, (micro_batches, loss, self._share)
            for i, (x, target) in enumerate(micro_batches):
                value = loss(self(x), target)
                self.backward(value, last=i == len(micro_batches) - 1)
                total += float(value.detach())
            self._given = None
            return total
        self._may_begin()
        self._stages.require(micro_batches)  # before anything is sent, so that the caller may retry
        self._failed = True
        for first in self._first_step:
            first.begin(self.module)
        total = float(self._stages.step(micro_batches, loss, self._share))
        self._agree_on_gradients()
        self._micro_batch, self._complete, self._failed = len(micro_batches) - 1, True, False
        self._given = micro_batches, loss, self._share
        self._compare_first_step()
        self._show_gradients()
        self._given = None
        return total

    def _agree_on_gradients(self) -> None:
        """Find the parameters that got a gradient on any rank: the optimizer leaves the others alone, as those whose
        gradient is None. Compression may still send what it kept back of any."""
        if self.strategy.compressor is None:
            self._used = parameters_used(self._engine, self.comm)

    def _show_gradients(self) -> None:
        if not self._shows:
            return
        divided = self._engine.sharding.state or self.strategy.gradients_differ_by_rank or self.strategy.tp > 1
        show(self._masters, self._gradients, self._engine.parameters, self._used, divided)

    def _compare_first_step(self) -> None:
        """Compare the first step with one process, where that is asked for."""
        if self._first_step:
            first = self._first_step.pop()
            first.compare(self.comm, str(self.strategy), self._engine, self._state.split, self._given)

    @torch.no_grad()
    def evaluate(self, x: Tensor, target: Any, loss: Loss) -> float:
        """Return the loss of one batch, without gradients; all ranks of a replica together, with zero=3 all ranks."""
        if self._stages is None:
            return float(loss(self(x), target))
        return float(self._stages.evaluate(x, target, loss))

    def _may_begin(self) -> None:
        if self._optimizer is None:
            raise RuntimeError(
                "no optimizer is attached, so that no step would change a weight: "
                "optimizer = model.attach(torch.optim.AdamW(model.parameters(), lr=...))"
            )
        if self._failed:
            raise RuntimeError("an earlier backward pass failed half-way: ranks may be out of step; start again")
        if self._complete and any(master.grad is not None for master in self._masters.values()):
            raise RuntimeError(
                "the gradients of the last step were neither used by optimizer.step() nor dropped by "
                "optimizer.zero_grad(): of a step of several micro-batches only the last has last=True"
            )

    @torch.no_grad()
    def norm(self) -> float:
        """Return the 2-norm of the gradient, over all ranks' shares; all ranks together."""
        self._require_complete("the norm of the gradient")
        return gradient_norm(self._engine, self.comm, self.strategy, self._gradients, self._state.split.cuts)

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
        if self._engine.sharding.updates_gather:
            self._engine.wait_parameters(list(self._engine.parameters))

    @torch.no_grad()
    def _before_update(self) -> None:
        self._require_complete("an update")
        for name, p in self.module.named_parameters():
            if p.requires_grad and name not in self._engine.parameters:
                raise RuntimeError(f"{name} was frozen when the module was parallelized, and cannot be trained now")
        for name, master in self._masters.items():
            if name in self._used and (isinstance(master.grad, GradientElsewhere) or not self._shows):
                master.grad = self._gradients[name].to(master.dtype)

    @torch.no_grad()
    def _after_update(self) -> None:
        for tensor in (*self._masters.values(), *self._engine.parameters.values()):
            tensor.grad = None
        self._state.weights_follow()
        if not self._allocating:
            self._engine.updated()
            states.make_buffers_alike(self._state, self._buffers_follow)
        self._micro_batch, self._complete = -1, False

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """Return the entire module's state_dict, unsharded, parameters in the master type; all ranks together."""
        result: dict[str, Tensor] = {} if destination is None else destination
        for name, t in states.state_dict(self._state).items():
            result[prefix + name] = t
        return result

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
        """Load an unsharded state_dict of the entire module. Raises InputError, before anything changes, if names or
        shapes are not the module's."""
        if not strict or assign:
            raise InputError("load_state_dict", None, "is always strict, and copies", "leave strict and assign out")
        states.load_state_dict(self._state, state)
        self._unsplit_follows()

    def save(self, folder: str | Path, step: int, keep: int = 2) -> None:
        """Write a checkpoint of parameters, optimizer state, residuals of compression, frozen parameters and buffers;
        it can be loaded with any strategy. The newest `keep` are kept. All ranks together."""
        optimizer = self._attached()
        states.make_buffers_alike(self._state, self._buffers_follow)
        states.save(self._state, optimizer, Path(folder), step, keep)

    def load(self, folder: str | Path) -> int:
        """Load the newest intact checkpoint and return its step, 0 if there is none; all ranks together. Raises
        CheckpointError."""
        optimizer = self._attached()
        step = agree_on_newest(Path(folder), self.comm)
        if step is None:
            return 0
        self._allocate_state()
        states.load(self._state, optimizer, Path(folder), step)
        self._unsplit_follows()
        return step

    def _unsplit_follows(self) -> None:
        """Load the state into the unsplit module too, if a comparison with it is still to come."""
        for whole in [unsplit for unsplit, _ in self._unsplit] + [first.whole for first in self._first_step]:
            state = self.state_dict()  # all ranks together, also where only rank 0 has the module
            if whole is not None:
                whole.load_state_dict(state)

    def _attached(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise RuntimeError("a checkpoint has the optimizer's state: attach an optimizer first")
        return self._optimizer

    def _allocate_state(self) -> None:
        """Make the optimizer allocate its state, which most do in their first step, by a step that changes nothing.
        Ranks do so independently: one without any element has no state."""
        optimizer = self._optimizer
        assert optimizer is not None
        self._used = {name for name, master in self._masters.items() if not optimizer.state.get(master)}
        if not self._used:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        self._engine.begin()
        self._complete = self._allocating = True
        self._show_gradients()
        optimizer.step()
        self._allocating = False
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
