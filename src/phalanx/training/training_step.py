"""One training step, and all state it changes: weights, their masters, optimizer state.

The trainer, the parity examiner and the benchmarks all run this same step.

    micro-batches: forward, backward; gradients are reduced with the last one
    metrics:       one fused fp64 all-reduce: loss sum, target tokens, stop flag, flag of a rank whose loss or
                   gradient is not finite; sharded gradients: the square of their norm; expert loads
    finish:        gradients are sums over the global batch; divided by its token count, clipped
    optimizer:     on the masters; weights are cast down from them

Replicas that take steps alone (strategy.local) do all this among their own ranks. In the last of those steps they
also reduce loss, tokens and stop flag over dp_local, and the outer optimizer follows the inner one (outer.py).

How the model got onto its ranks is in parallelize.py. A step whose loss or gradient is not finite changes no weight:
its origin is searched for (nonfinite.py), the residuals of compression are dropped, and the step is skipped or ends
the run. fp16 gradients that overflow halve the loss scale (loss_scale.py).

`step` reads the metrics before it updates. On a GPU that would drain its queue, so `issue` leaves the decision to the
device: the gradients' factor is a tensor, and the optimizer's kernels do nothing where a flag says that the step is
not finite. The host reads the metrics of a step once it has issued the passes of the next one. If that step was
skipped, what follows from it on the host (loss scale, residuals) is done, and those passes are run again: whatever
either way changes or reports is the same.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.nn.weight_source import Weights
from phalanx.runtime.checkpoint import manifest
from phalanx.runtime.checkpoint.boxes import TensorPart, full_part
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import RunningPass
from phalanx.runtime.data_parallel import logical_state, replica_check
from phalanx.runtime.data_parallel.outer import OuterUpdate
from phalanx.runtime.tracing import host_values
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.actions import PipelineSchedule
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, units
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.compiled_blocks import uncompiled
from phalanx.training.expert_load import LayerLoad, Loads
from phalanx.training.loss_scale import LossScale, Numerics
from phalanx.training.nonfinite import origin
from phalanx.training.parallelize import parallelize_decoder

SKIPS_IN_A_ROW = 10
"""Number of consecutive non-finite steps that ends a run even if it skips them."""


@dataclass(frozen=True)
class StepResult:
    """Report of one step, the same on all ranks. `loss` in nats per token; `grad_norm` before clipping; `stop`: some
    rank was asked to stop; `skipped`: why the step changed no weight, "" if it did; `loads`: of each layer with
    experts; `skips`: steps skipped so far; `loss_scale`: after the step, of fp16 runs."""

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    skipped: str = ""
    loads: tuple[LayerLoad, ...] = ()
    skips: int = 0
    loss_scale: float | None = None


@dataclass(frozen=True)
class _Issued:
    """A step whose metrics the host has not read; `loss_scale` is that of its passes."""

    micro_batches: list[Tensor]
    divisor: float
    loss_scale: LossScale | None
    read: Callable[[], list[float]]


class Training:
    """The state of a run on one rank, and the steps that change it.

    It starts from `weights`, or from values drawn from `seed`. `nonfinite`: whether a step whose loss or gradient is
    not finite is skipped or ends the run. `schedule`: a pipeline schedule with its sends and receives, over the
    chunks of `strategy`, in place of the strategy's own. `balanced`: experts are chosen in turn, not by the router.
    """

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
        own = parallelize_decoder(spec, job, strategy, comm, self._run, seed, weights, schedule, balanced)
        self.view, self.inner = own.layers.view, own.layers.inner
        self.split, self.context = self.view.split, self.view.context
        self.tp, self.cp = own.layers.tp, own.layers.cp
        self.model, self.engine, self.copies, self.pipeline = own.model, own.engine, own.copies, own.pipeline
        self.weights, self.masters, self._gradients = own.weights, own.masters, own.gradients
        self.optimizer = own.optimizer
        self.outer = OuterUpdate(own.engine, own.masters, own.gradients, job.outer) if strategy.local else None
        self.alone = 0  # steps since replicas that take steps alone have synchronised
        self.loads = Loads(spec, own.model) if own.layers.ep is not None else None
        precision = job.precision
        # The ranks of tp have the same loss: one of those with the head reports it for all.
        self._counts = self.split.index == 0 and "head" in units(self.split.spec)
        # Masters of the gradients' type read them where they were reduced; others get a cast copy.
        self._same = precision.accumulate_dtype == precision.master_dtype
        self.loss_scale = LossScale() if precision.compute == "float16" else None
        self.skipped = 0  # steps that changed no weight
        self._in_a_row = 0  # consecutive skipped steps that no smaller loss scale explains
        self._issued: _Issued | None = None  # the step whose metrics the host has not read

    @property
    def synchronises(self) -> bool:
        """Whether replicas that take steps alone synchronise at the end of the running (or next) step."""
        return self.outer is not None and self.alone + 1 == self.strategy.local

    @property
    def sends(self) -> bool:
        """Whether the next step has the events that a plan predicts: with replicas that take steps alone, only the
        last step that sends changes."""
        return self.outer is None or self.alone == self.job.outer.last_sent(self.strategy.local)

    @property
    def current(self) -> RunningPass:
        """The pass that is running: its micro-batch and phase."""
        return self.pipeline.now

    def step(self, micro_batches: list[Tensor], lr: float, stop: bool = False) -> StepResult:
        """Train on this rank's micro-batches, each (micro_batch, seq + 1) int64 token ids on the device; with
        separate documents (2, micro_batch, seq + 1): ids, and positions inside their documents. With cp > 1 each rank
        has its part of the sequences, as `Context.cut` makes it (schedule/layers/context.py).

        Raises FloatingPointError, before any weight changes, if loss or gradient norm is not finite and the step may
        not be skipped; the message names the origin.
        """
        assert self._issued is None, "a step was issued and not settled"
        values, metrics, divisor = self._metrics(*self._local(micro_batches), stop)
        # The only time in a step that the host reads device memory.
        read = host_values.read(values, self._alike(values))
        result, factor = self._result(read, divisor)
        if read[3] or not math.isfinite(result.grad_norm):
            finite = math.isfinite(result.loss)
            why = self._skip(finite, self.loss_scale, micro_batches, 1 / divisor)
            if self.outer is not None:
                self._publish()
            self._count()
            return self._with_scale(result, why)
        clip = min(1.0, self.job.clip / (result.grad_norm + 1e-6)) if self.job.clip else 1.0
        self.engine.scale(factor * clip)
        self.comm.status.now("optimizer")
        self._update(lr)
        if self.loads is not None:
            self.loads.update(metrics)
        self._in_a_row = 0
        if self.loss_scale:
            self.loss_scale = self.loss_scale.after(overflow=False)
        self._count()
        return self._with_scale(result)

    def _count(self) -> None:
        self.alone = (self.alone + 1) % self.strategy.local if self.outer is not None else 0

    def issue(self, micro_batches: list[Tensor], lr: float, stop: bool = False) -> StepResult | None:
        """Issue a step without waiting for its metrics; return the report of the previously issued step, None if
        there is none. Arguments and errors as for `step`; an error concerns the previous step. Not for replicas that
        take steps alone: a stop that is read a step late would find them apart."""
        assert self.outer is None
        passed = self._local(micro_batches)
        earlier = self.settle()
        if earlier is not None and earlier.skipped:
            passed = self._local(micro_batches)  # with the loss scale and the residuals that follow from it
        values, metrics, divisor = self._metrics(*passed, stop)
        _, tokens, _, faulty, square = values[:5].unbind()
        factor = torch.full_like(tokens, self._numerator(divisor)).div_(tokens)
        norm = square.sqrt() * factor
        good = torch.isfinite(norm) & (faulty == 0)
        clip = (self.job.clip / (norm + 1e-6)).clamp_(max=1.0) if self.job.clip else 1.0
        self.engine.scale_by(factor * clip)
        self.comm.status.now("optimizer")
        self._update(lr, good.logical_not().to(torch.float32))
        if self.loads is not None:
            self.loads.update(torch.where(good, metrics, 0.0))
        later = host_values.later(values, self._alike(values))
        self._issued = _Issued(micro_batches, divisor, self.loss_scale, later)
        if self.loss_scale:  # so it goes on unless `settle` finds otherwise
            self.loss_scale = self.loss_scale.after(overflow=False)
        return earlier

    def settle(self) -> StepResult | None:
        """Read the report of the issued step and apply its consequences on the host; None if no step is issued.
        Raises FloatingPointError as `step` does."""
        issued, self._issued = self._issued, None
        if issued is None:
            return None
        read = issued.read()
        result, _ = self._result(read, issued.divisor)
        if not read[3] and math.isfinite(result.grad_norm):
            self._in_a_row = 0
            return self._with_scale(result)
        self.loss_scale = issued.loss_scale
        finite = math.isfinite(result.loss)
        why = self._skip(finite, issued.loss_scale, issued.micro_batches, 1 / issued.divisor)
        return self._with_scale(result, why)

    def _with_scale(self, result: StepResult, skipped: str = "") -> StepResult:
        scale = self.loss_scale.scale if self.loss_scale else None
        return replace(result, skipped=skipped, skips=self.skipped, loss_scale=scale)

    @property
    def _expected(self) -> int:
        """The number of target tokens that passes divide the loss by, before the loss scale."""
        return self.job.global_batch * self.job.seq // self.strategy.dp_local

    def _numerator(self, divisor: float) -> float:
        """Return the number that gradients are multiplied by before they are divided by the true number of target
        tokens: the divisor that passes applied to the loss, without the loss scale if gradients are compressed."""
        return float(self._expected) if self.engine.compressor else divisor

    def _alike(self, values: Tensor) -> list[float]:
        """Return placeholder metrics of a good step, which verification reads in place of real ones."""
        return [0.0, float(self._expected), 0.0, 0.0, 1.0, *[1.0] * (len(values) - 5)]

    def _local(self, micro_batches: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor, Tensor, float]:
        """Run all passes. Returns (the micro-batches, the loss summed here, (); this rank's part of the squared norm,
        (); its counts of experts, (n,); the divisor of the loss)."""
        divisor = self.loss_scale.divisor(self._expected) if self.loss_scale else float(self._expected)
        self.engine.unscale = divisor / self._expected
        if self.loads is not None:
            self.loads.begin()
        loss_sum = self._passes(micro_batches, 1 / divisor)
        square = self.engine.norm_square() if self.copies is None else self.copies.norm_square()
        size = self.loads.size if self.loads is not None else 0
        counts = torch.zeros(size, dtype=torch.float64, device=self.comm.world.device)
        if self.loads is not None:
            self.loads.end(counts)
        return micro_batches, loss_sum, square, counts, divisor

    def _metrics(
        self,
        micro_batches: list[Tensor],
        loss_sum: Tensor,
        square: Tensor,
        counts: Tensor,
        divisor: float,
        stop: bool,
    ) -> tuple[Tensor, Tensor, float]:
        """Reduce the metrics over the ranks that step together. Returns (metrics, fp64: loss sum, target tokens,
        stop, not finite, squared norm, *counts; the counts of experts; divisor). With replicas that take steps alone,
        loss sum, target tokens and stop flag of all replicas come last, estimated from this one unless they
        synchronise."""
        parts = self.strategy.gradients_differ_by_rank  # ranks have different gradients: the norm is a sum over them
        metrics = torch.zeros(4 + parts + len(counts), dtype=torch.float64, device=self.comm.world.device)
        if self._counts:
            metrics[0] = loss_sum
            metrics[1] = sum(map(self._targets, micro_batches))
        metrics[2] = float(stop)
        metrics[3] = ~torch.isfinite(loss_sum + square)
        if parts:
            metrics[4] = square
        metrics[4 + parts :] = counts
        self.comm.all_reduce(metrics, self.comm.mesh.step_axis, unit="metrics", phase="opt").wait()
        values = metrics if parts else torch.cat([metrics[:4], square[None], metrics[4:]])
        if self.outer is not None:
            everyone = metrics[:3].clone()
            if self.synchronises:
                self.comm.all_reduce(everyone, "dp_local", unit="metrics", phase="opt").wait()
            else:
                everyone[:2].mul_(self.strategy.dp_local)
                everyone[2] = 0.0
            values = torch.cat([values, everyone])
        return values, metrics[4 + parts :], divisor

    def _result(self, read: list[float], divisor: float) -> tuple[StepResult, float]:
        """Return (the report of a step from its metrics; the factor of its gradients, before clipping)."""
        loss, tokens, stops, _, square, *load_sums = read
        factor = self._numerator(divisor) / tokens
        norm = math.sqrt(square) * factor if square >= 0 else math.nan
        if self.outer is not None:
            *load_sums, loss, everyone, stops = load_sums
        spread = self.loads.read(load_sums, int(tokens)) if self.loads is not None else ()
        if self.outer is not None:
            tokens = everyone
        return StepResult(loss / tokens, norm, int(tokens), stops > 0, loads=spread), factor

    def _passes(self, micro_batches: list[Tensor], seed: float) -> Tensor:
        """Run all forward and backward passes, from gradient `seed` of each loss, and reduce the gradients. Returns
        the sum of the losses, (), fp64."""
        loss_sum = self.pipeline.step(micro_batches, seed)
        if self.copies is not None:
            self.copies.reduce()
        return loss_sum

    def _skip(self, loss_is_finite: bool, scale: LossScale | None, micro_batches: list[Tensor], seed: float) -> str:
        """Skip a step that was not finite at a loss scale, on all ranks together, and return the reason. Raises
        FloatingPointError if it may not be skipped."""
        if scale and loss_is_finite and scale.scale > 1:
            self.loss_scale = scale.after(overflow=True)
            now = self.loss_scale.scale
            why = f"gradients overflow float16 at the loss scale {scale.scale:.0f}; it is {now:.0f} now"
        else:
            again = partial(self._passes, micro_batches, seed)
            with uncompiled(self.model):
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
        """The number of target tokens of a micro-batch."""
        if self.job.batch_rows == 3:
            return int((batch[1] if self.cp is not None else batch[2, :, 1:]).ge(0).sum())
        return batch.shape[-2] * (self.context.tokens if self.cp is not None else batch.shape[-1] - 1)

    def _run(self, batch: Tensor, x: Tensor | None, chunk: int) -> Tensor:
        """Run a micro-batch through a chunk of the model. Returns the stream, or from the last chunk the loss summed
        over the targets."""
        if self.cp is not None:
            tokens, targets, *_ = batch
            positions = None if self.cp.packed else batch[2:]
            return self.model(tokens, targets, positions=positions, x=x, chunk=chunk)  # type: ignore[no-any-return]
        if batch.dim() == 2:
            return self.model(batch[:, :-1], batch[:, 1:], x=x, chunk=chunk)  # type: ignore[no-any-return]
        tokens, positions = batch[:2, :, :-1]
        targets = batch[0 if len(batch) == 2 else 2, :, 1:]
        return self.model(tokens, targets, positions=positions, x=x, chunk=chunk)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update(self, lr: float, skip: Tensor | None = None) -> None:
        """Step the optimizer, cast the weights down from their masters and start to gather them. `skip`, () fp32, on
        the device: where it is 1, masters and optimizer state stay unchanged."""
        self.comm.recorder.compute("optimizer", "opt", "", None, self.job.precision.master_dtype)
        for name, master in self.masters.items():
            gradient = self._gradients[name]
            master.grad = gradient if self._same else gradient.to(master.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]  # read by torch's fused kernels
        self.optimizer.step()
        for master in self.masters.values():  # a cast copy, or a view that autograd must not add to
            master.grad = None
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Bring replicas together that took steps alone, where this step does; cast the weights down from their
        masters and start to gather them."""
        if self.outer is not None:
            self.outer.after(self.alone)
        for name, weight in self.weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])
        self.engine.updated()

    @torch.no_grad()
    def evaluate(self, batches: list[Tensor], passes: int) -> tuple[float, int]:
        """Return (loss summed over target tokens, their number), over the sequences of all replicas; `batches` are
        this replica's. `passes`: the largest number of batches of any replica, since at ZeRO-3, and where replicas
        hold experts of each other, every rank takes part in every pass."""
        total = torch.zeros(2, dtype=torch.float64, device=self.comm.world.device)
        for batch in batches:
            total[0] += self._evaluate(batch)
            total[1] += self._targets(batch)
        if self.engine.sharding.parameters or self.strategy.ep > 1:
            # The smallest batch possible; ranks that share sequences, or the stream of a pipeline, need a full row.
            shape: tuple[int, ...] = (1, 2)
            if self.cp is not None or self.strategy.pp > 1 or self.strategy.ep > 1:
                shape = self.context.shape(1, self.job.batch_rows)
            filler = torch.zeros(shape, dtype=torch.int64, device=self.comm.world.device)
            for _ in range(passes - len(batches)):
                self._evaluate(filler)
        if not self._counts:
            total.zero_()
        self.comm.all_reduce(total, "world", unit="evaluation", phase="opt").wait()
        loss, tokens = total.tolist()
        return loss, int(tokens)

    def _evaluate(self, batch: Tensor) -> Tensor:
        shape = stages.stream(self.spec, self.job, self.strategy, batch.shape[-2])
        with uncompiled(self.model):
            return self.pipeline.evaluate(batch, [shape] * (self.pipeline.schedule.chunks - 1))

    def compare_replicas(self) -> None:
        """Compare the tensors that several ranks hold, all ranks together. Raises ReplicasDiffer if bits differ."""
        replica_check.compare(self.engine, self.masters, self.split)

    def owned(self) -> Iterator[TensorPart]:
        """Yield the parts of a checkpoint written by this rank; all ranks together
        (runtime/data_parallel/logical_state.py)."""
        return logical_state.owned_parts(self.engine, self.masters, self.optimizer, self.split, self._outer_state)

    @property
    def _outer_state(self) -> dict[str, dict[str, Tensor]]:
        return {} if self.outer is None else self.outer.state

    def gradients(self) -> dict[str, Tensor]:
        """Gather the gradient of every logical parameter, by name; all ranks together."""
        return logical_state.gradients(self.engine, self.split)

    def numerics(self) -> dict[str, Any]:
        """Numbers for a checkpoint's manifest."""
        return asdict(Numerics(self.skipped, self.loss_scale))

    @torch.no_grad()
    def load(self, folder: Path, step: int) -> None:
        """Resume from the checkpoint of `step`; all ranks together. Raises CheckpointError."""
        about = manifest.open_manifest(folder, step)
        known = {f.name: about[f.name] for f in fields(Numerics) if f.name in about}
        saved = build(Numerics, known, "checkpoint")
        self.skipped = saved.skipped
        if self.loss_scale and saved.loss_scale:
            self.loss_scale = saved.loss_scale
        rest = [full_part(name, t) for name, t in logical_state.buffers(self.model).items()]
        logical_state.load(
            self.engine, self.masters, self.optimizer, folder, step, rest, self.split, self._outer_state
        )
        if self.outer is not None:
            self.outer.loaded(step)
        for name, weight in self.weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])
