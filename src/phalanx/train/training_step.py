"""One training step, and everything it changes: weights, their masters, optimizer state.

The trainer, the parity examiner and the benchmarks all run this same step.

    micro-batches: forward, backward (gradients leave with the last one)
    metrics:       one fused fp64 all-reduce: loss sum, target tokens, stop flag, flag of a rank whose loss or
                   gradient is not finite; sharded gradients: the square of their norm; loads of experts
    finish:        gradients are sums over the global batch; divided by its token count, clipped
    optimizer:     on the masters; weights are cast down from them

A step whose loss or gradient is not finite changes no weight: it is looked into (nonfinite.py), and skipped or the
end of the run; what compression had kept back is dropped with it. fp16 gradients that overflow halve the loss scale
(loss_scale.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.nn.decoder import Decoder
from phalanx.nn.init import create, fill_buffers, initial, of_rank
from phalanx.nn.optimizers import SGD, AdamW
from phalanx.nn.weight_source import Weights
from phalanx.runtime.autograd.deferred_weight_grads import DeferredGradients
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.checkpoint import manifest
from phalanx.runtime.checkpoint.boxes import Part
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.comm.recorder import Now
from phalanx.runtime.data_parallel import logical_state, replica_check
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.data_parallel.shared_gradients import Copies
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.pipeline import Pipeline
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.runtime.observe import host_values
from phalanx.schedule.gradients.buckets import buckets, of_chunks, reduction_slots
from phalanx.schedule.layers.context import context
from phalanx.schedule.layers.routing import depends_on_other_tokens
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.schedules import PipelineSchedule, last_weight_grad_at, splits
from phalanx.spec.job import Job, Optimizer
from phalanx.spec.model.spec import ModelSpec, parameters, units
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split
from phalanx.train.expert_load import LayerLoad, Loads
from phalanx.train.loss_scale import LossScale
from phalanx.train.nonfinite import origin

SKIPS_IN_A_ROW = 10
"""So many steps that are not finite, one after the other, end a run that skips them."""


@dataclass(frozen=True)
class StepResult:
    """`loss` in nats per token; `grad_norm` before clipping; `stop`: some rank was asked to stop; `skipped`: why the
    step has changed nothing, empty where it has; `loads`: of each layer's experts."""

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    skipped: str = ""
    loads: tuple[LayerLoad, ...] = ()


class Training:
    """The state of a run on one rank. It begins with `weights`, or else with those that `seed` draws. `nonfinite`:
    what becomes of a step whose loss or gradient is not finite. `schedule`: a pipeline's, with sends and receives,
    over the chunks of `strategy`, in place of its own. `balanced`: experts are chosen in turn."""

    def __init__(
        self,
        spec: ModelSpec,
        job: Job,
        strategy: Strategy,
        comm: Comm,
        seed: int,
        nonfinite: Literal["stop", "skip"] = "stop",
        weights: Weights | None = None,
        schedule: PipelineSchedule | None = None,
        balanced: bool = False,
    ) -> None:
        self.spec, self.job, self.strategy, self.comm, self.nonfinite = spec, job, strategy, comm, nonfinite
        precision = job.precision
        device = comm.world.device
        stage = strategy.effective_zero
        self.inner = LayerComm(comm)
        place = comm.mesh.place(comm.world.rank)
        whole, spec = spec, stages.stage(spec, strategy, place["pp"])
        self.split = Split.of(spec, strategy, place["tp"], comm.index("ep"), comm.index("etp"))
        self.tp = TensorParallel(self.inner, self.split) if strategy.tp > 1 else None
        held = self.split.local
        self.context = context(strategy, comm.mesh, comm.world.rank, job.seq)
        self.cp = ContextParallel(self.inner, self.context, job.documents == "packed") if strategy.cp > 1 else None
        ep = ExpertParallel(self.inner, held.experts, strategy.ep, strategy.etp, balanced) if held.experts else None
        tokens = SequenceTokens(self.inner, self.tp, self.context)
        self.model: Decoder = create(held, DTYPES[precision.compute], device, stage < 3, self.tp, self.cp, ep, tokens)
        self.model.recompute(strategy.recompute_of, self.inner)
        if job.documents == "packed":
            self.model.prepare(job.seq)  # memory is the same in every step
        if held.experts and depends_on_other_tokens(held.experts, strategy):
            tokens.prepare((strategy.micro_batch, self.context.tokens), device)
        if weights is not None:
            fill_buffers(self.model, weights)
        self.weights: dict[str, Tensor] = dict(self.model.named_parameters()) if stage == 0 else {}
        separate = precision.master_dtype != precision.compute
        self.masters: dict[str, Tensor] = {}
        first = of_rank(initial(whole, seed, weights), self.split)
        for p in parameters(held) if stage == 0 else ():
            values = first(p, 0, p.numel).view(p.shape)
            with torch.no_grad():
                self.weights[p.fqn].copy_(values)
            self.masters[p.fqn] = (
                values.to(device, DTYPES[precision.master_dtype], copy=True) if separate else self.weights[p.fqn]
            )
        schedule = schedule or stages.schedule(strategy, strategy.accumulation(job))
        own = stages.held_chunks(strategy, place["pp"])
        done = [own.index(chunk) for chunk in last_weight_grad_at(schedule.actions[place["pp"]])]
        cut = buckets(spec, job, strategy)
        self.engine = DataParallel(
            self.model,
            cut,
            precision,
            comm,
            strategy,
            self.model.units(),
            of_chunks(cut, spec, done, stage >= 2),
            reduction_slots(spec, cut, strategy),
        )
        self.engine.start(lambda piece: first(piece.parameter, piece.start, piece.stop))
        self.copies = Copies(self.engine, self.split) if strategy.pp > 1 or not self.split.whole else None
        shape, dtype = stages.stream(spec, job, strategy), DTYPES[precision.compute]
        parts = strategy.pp > 1 or splits(schedule)
        put_off = DeferredGradients(self.model.units(), self.inner) if parts else None
        self.pipeline = Pipeline(
            comm, self.inner, schedule, place["pp"], shape, dtype, self.engine, self._run, put_off
        )
        self.loads = Loads(self.spec, self.model) if ep is not None else None
        self._gradients = dict(self.engine.gradients()) if stage == 0 else {}
        if stage:
            for piece, master, gradient in self.engine.pieces():
                self.masters[piece.parameter.fqn], self._gradients[piece.parameter.fqn] = master, gradient
        matrices = {p.fqn for p in parameters(held) if len(p.shape) > 1}
        self.optimizer = make_optimizer(job.optimizer, self.masters, matrices)
        self._counts = self.split.index == 0 and "head" in units(spec)  # tp ranks have the same: one says it for all
        # A master of the gradients' own type reads them where they were reduced; another gets a cast copy.
        self._same = precision.accumulate_dtype == precision.master_dtype
        self.loss_scale = LossScale() if precision.compute == "float16" else None
        self.skipped = 0  # steps that have changed no weight
        self._in_a_row = 0  # of them, the last ones, that no loss scale mends

    @property
    def current(self) -> Now:
        """What runs."""
        return self.pipeline.now

    def step(self, micro_batches: list[Tensor], lr: float, stop: bool = False) -> StepResult:
        """Train on this rank's micro-batches, each (micro_batch, seq + 1) token ids on the device; of separate
        documents (2, micro_batch, seq + 1): ids, and their places in their documents. Over cp ranks each has its part
        of them (schedule/context_parallel.py).

        Raises FloatingPointError, before any weight changes, where loss or gradient norm is not finite and the step
        is not to be skipped; it says where that began.
        """
        job, comm = self.job, self.comm
        expected = job.global_batch * job.seq
        parts = self.strategy.gradients_differ_by_rank  # gradients: each rank has some
        divisor = self.loss_scale.divisor(expected) if self.loss_scale else float(expected)
        self.engine.unscale = divisor / expected
        loads = self.loads
        if loads is not None:
            loads.begin()
        loss_sum = self._passes(micro_batches, 1 / divisor)
        square_here = self.engine.norm_square() if self.copies is None else self.copies.norm_square()
        counted = loads.size if loads is not None else 0
        metrics = torch.zeros(4 + parts + counted, dtype=torch.float64, device=comm.world.device)
        if loads is not None:
            loads.end(metrics[4 + parts :])
        if self._counts:
            metrics[0] = loss_sum
            metrics[1] = sum(map(self._targets, micro_batches))
        metrics[2] = float(stop)
        metrics[3] = ~torch.isfinite(loss_sum + square_here)
        if parts:
            metrics[4] = square_here
        comm.all_reduce(metrics, "world", unit="metrics", phase="opt").wait()
        # The step's one read of device memory by the host.
        read = metrics if parts else torch.cat([metrics[:4], square_here[None], metrics[4:]])
        alike = [0.0, float(expected), 0.0, 0.0, 1.0, *[1.0] * counted]
        loss, tokens, stops, faulty, square, *told_loads = host_values.read(read, alike)
        # The loss was divided by something else than the true number of target tokens.
        factor = (expected if self.engine.compressor else divisor) / tokens
        norm = math.sqrt(square) * factor if square >= 0 else math.nan
        spread = loads.read(told_loads, int(tokens)) if loads is not None else ()
        told = StepResult(loss / tokens, norm, int(tokens), stops > 0, loads=spread)
        if faulty or not math.isfinite(norm):
            return replace(told, skipped=self._skip(math.isfinite(loss), micro_batches, 1 / divisor))
        clip = min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0
        self.engine.scale(factor * clip)
        comm.status.now("optimizer")
        self._update(lr)
        if loads is not None:
            loads.update(metrics[4 + parts :])
        self._in_a_row = 0
        if self.loss_scale:
            self.loss_scale = self.loss_scale.after(overflow=False)
        return told

    def _passes(self, micro_batches: list[Tensor], seed: float) -> Tensor:
        """Forward and backward passes from gradient `seed` of the loss; gradients are reduced. The sum of the losses,
        (), fp64."""
        loss_sum = self.pipeline.step(micro_batches, seed)
        if self.copies is not None:
            self.copies.add_up()
        return loss_sum

    def _skip(self, loss_is_finite: bool, micro_batches: list[Tensor], seed: float) -> str:
        """Leave out the step that did not come out finite, all ranks alike, and say why. Raises FloatingPointError
        where that may not be."""
        scale = self.loss_scale
        if scale and loss_is_finite and scale.scale > 1:
            self.loss_scale = scale.after(overflow=True)
            now = self.loss_scale.scale
            why = f"gradients overflow float16 at the loss scale {scale.scale:.0f}; it is {now:.0f} now"
        else:
            again = partial(self._passes, micro_batches, seed)
            why = origin(
                self.engine, self.model.units(), units(self.spec), lambda: self.pipeline.now.micro_batch, again
            )
            self._in_a_row += 1
            if scale and loss_is_finite:
                raise FloatingPointError(f"at the loss scale {scale.scale:.0f}, the smallest: {why}")
            if self.nonfinite == "stop":
                raise FloatingPointError(why)
            if self._in_a_row == SKIPS_IN_A_ROW:
                raise FloatingPointError(f"{why}; {SKIPS_IN_A_ROW} steps in a row were not finite")
        if self.engine.compressor is not None:
            self.engine.compressor.forget()
        self.skipped += 1
        return why

    def _targets(self, batch: Tensor) -> int:
        """How many a micro-batch has."""
        return batch.shape[-2] * (self.context.tokens if self.cp is not None else batch.shape[-1] - 1)

    def _run(self, batch: Tensor, x: Tensor | None, chunk: int) -> Tensor:
        """A micro-batch through a chunk of the model: the stream, or the loss summed over the targets."""
        if self.cp is not None:
            tokens, targets, *_ = batch
            places = None if self.cp.packed else batch[2:]
            return self.model(tokens, targets, positions=places, x=x, chunk=chunk)  # type: ignore[no-any-return]
        if batch.dim() == 2:
            return self.model(batch[:, :-1], batch[:, 1:], x=x, chunk=chunk)  # type: ignore[no-any-return]
        tokens, places = batch[:, :, :-1]
        return self.model(tokens, batch[0, :, 1:], positions=places, x=x, chunk=chunk)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        self.comm.recorder.compute("optimizer", "opt", "", None, self.job.precision.master_dtype)
        for name, master in self.masters.items():
            gradient = self._gradients[name]
            master.grad = gradient if self._same else gradient.to(master.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for master in self.masters.values():  # a cast copy, or a view that the next gradient must not add to
            master.grad = None
        for name, weight in self.weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])
        self.engine.updated()

    @torch.no_grad()
    def evaluate(self, batches: list[Tensor], passes: int) -> tuple[float, int]:
        """(Loss summed over target tokens, their number) of this replica's sequences, reduced over the world.
        `passes`: the most batches that any has, for at stage 3 every rank takes part in every pass."""
        total = torch.zeros(2, dtype=torch.float64, device=self.comm.world.device)
        for batch in batches:
            total[0] += self._evaluate(batch)
            total[1] += self._targets(batch)
        if self.engine.zero == 3:
            # As little as can be; of a pipeline, and of ranks that share sequences, a whole one.
            shape = (1, 2)
            if self.cp is not None or self.strategy.pp > 1:
                shape = self.context.shape(1, self.job.documents == "separate")
            nothing = torch.zeros(shape, dtype=torch.int64, device=self.comm.world.device)
            for _ in range(passes - len(batches)):
                self._evaluate(nothing)
        if not self._counts:
            total.zero_()
        self.comm.all_reduce(total, "world", unit="evaluation", phase="opt").wait()
        loss, tokens = total.tolist()
        return loss, int(tokens)

    def _evaluate(self, batch: Tensor) -> Tensor:
        return self.pipeline.evaluate(batch, stages.stream(self.spec, self.job, self.strategy, batch.shape[-2]))

    def compare_replicas(self) -> None:
        """Raises ReplicasDiffer where ranks that must hold the same bits do not; all ranks together."""
        replica_check.compare(self.engine, self.masters, self.split)

    def owned(self) -> Iterator[Part]:
        """What this rank writes of a checkpoint; all ranks together (runtime/logical.py)."""
        return logical_state.owned(self.engine, self.masters, self.optimizer, self.split)

    def gradients(self) -> dict[str, Tensor]:
        """Every logical parameter's gradient; all ranks together."""
        return logical_state.gradients(self.engine, self.split)

    def numerics(self) -> dict[str, Any]:
        """What a checkpoint says beside its tensors: steps skipped so far, and of an fp16 run its loss scale."""
        return {"skipped": self.skipped, "loss_scale": asdict(self.loss_scale) if self.loss_scale else None}

    @torch.no_grad()
    def load(self, folder: Path, step: int) -> None:
        """Go on from a checkpoint; all ranks together. Raises CheckpointError."""
        about = manifest.about(folder, step)
        self.skipped = about.get("skipped", 0)
        if self.loss_scale and about.get("loss_scale"):
            self.loss_scale = LossScale(**about["loss_scale"])
        rest = logical_state.buffers(self.model)
        logical_state.load(self.engine, self.masters, self.optimizer, folder, step, rest, split=self.split)
        for name, weight in self.weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])


def make_optimizer(given: Optimizer, masters: dict[str, Tensor], decayed: Collection[str]) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum betas[0], fused; weight decay on `decayed` only (matrices, embeddings).

    State is made here and not in the first step, so that a checkpoint can fill it and memory is the same in
    every step. Masters of another type than the gradients get theirs cast at the update.
    """
    matrices = [m for name, m in masters.items() if name in decayed]
    vectors = [m for name, m in masters.items() if name not in decayed]
    groups = [{"params": matrices, "weight_decay": given.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]] or groups[:1]  # of many ranks one may have padding alone
    optimizer: torch.optim.Optimizer
    if given.name == "sgd":
        optimizer = SGD(groups, lr=0.0, momentum=given.betas[0], fused=True)
    else:
        optimizer = AdamW(groups, lr=0.0, betas=given.betas, eps=given.eps, fused=True)
    for master in masters.values():
        state = optimizer.state[master]
        if given.name == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
        elif given.betas[0]:
            state["momentum_buffer"] = torch.zeros_like(master, requires_grad=False)
    return optimizer
