"""The training loop of one rank: batches in, steps, evaluation, checkpoints, metrics out.

It follows a Plan and does not know that a planner exists. Rank 0 writes `metrics.jsonl` (a line per step),
`recorded.json` (what was measured, to compare with the prediction) and `trace.json` (the timeline of one step on
every rank).
"""

import json
import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.nn.weight_files import is_run, open_weights
from phalanx.runtime.checkpoint.async_saver import Saver, agree_on_newest
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.timeline import COMPUTE, Span, StepTimes
from phalanx.runtime.data_parallel import replica_check
from phalanx.runtime.process.rank import StopFlag
from phalanx.runtime.tracing import timelines
from phalanx.runtime.tracing.instrument import instrument
from phalanx.runtime.tracing.timelines import passes
from phalanx.schedule.event import Event
from phalanx.spec.files.plan import Plan, write_json
from phalanx.spec.job import Train
from phalanx.training import metrics
from phalanx.training.compiled_blocks import compile_blocks
from phalanx.training.data import TokenSet, batches, take, validation_windows
from phalanx.training.expert_load import LoadWatch
from phalanx.training.metrics import Progress
from phalanx.training.out_of_memory import DeviceMemory, explain_shortage
from phalanx.training.tensorboard import scalars
from phalanx.training.training_step import StepResult, Training


def learning_rate(train: Train, peak: float, step: int) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then a cosine from `peak` down to min_lr_ratio x
    peak (Loshchilov & Hutter 2017)."""
    if step < train.warmup:
        return peak * (step + 1) / train.warmup
    done = (step - train.warmup) / max(1, train.steps - train.warmup)
    low = train.min_lr_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


class Trainer:
    """One rank's run of a plan. `resume`: continue from the newest checkpoint of the run folder, if it has one."""

    def __init__(self, plan: Plan, tokens: TokenSet, folder: Path, comm: Comm, resume: bool) -> None:
        self.plan, self.tokens, self.folder, self.comm = plan, tokens, folder, comm
        job, train, strategy = plan.job, plan.train, plan.strategy
        self.first = comm.world.rank == 0
        self.replica = comm.mesh.replica(comm.world.rank)
        self.batches = batches(tokens.training(), tokens.training_starts, job, train.seed)
        saved = agree_on_newest(folder / "checkpoint", comm) if resume else None
        weights = None
        if train.weights and saved is None:
            comm.status.now("reading of the initial weights")
            source = Path(train.weights)
            step = agree_on_newest(source / "checkpoint", comm, set_aside=False) if is_run(source) else None
            weights = open_weights(source, plan.model, step)
        try:
            self.training = Training(plan.model, job, strategy, comm, train.seed, train.nonfinite, weights)
        except torch.OutOfMemoryError as error:
            raise explain_shortage(plan, comm.world.rank, _memory(comm.world.device, 0)) from error
        self.peak_lr = train.scaled_lr(job.global_batch)
        self.start = saved or 0
        self.saver = Saver(folder / "checkpoint", comm, train.keep)
        if saved is not None:
            comm.status.now("reading of the checkpoint")
            self.training.load(folder / "checkpoint", saved)
        self.memory = 0
        self.events: tuple[Event, ...] = ()
        self._ahead: tuple[int, list[Tensor]] | None = None
        # The host reads the metrics of a step one step later.
        self.late = comm.world.device.type == "cuda" and not strategy.local
        self._issued: tuple[int, float] | None = None  # the step that it has not read yet, and its lr
        self._clock = self._ended = 0.0
        self.step_times: list[float] = []
        self.parts: list[tuple[float, float, float]] = []  # compute, exposed, hidden communication, seconds
        # The first step is instrumented and the second still warms up, so the third is traced; of replicas that take
        # steps alone, steps that synchronise.
        self.traced = min(self.start + max(2, 2 * strategy.local - 1), train.steps - 1)
        self.trace_written = False
        self.saved = self.start
        self.watch = LoadWatch(plan.model) if plan.model.experts else None

    def run(self, stop: StopFlag) -> bool:
        """Train to the end or until `stop` is set; return whether it was. A checkpoint holds the last step. Raises
        FloatingPointError with the step whose loss or gradients are not finite and their origin, and ReplicasDiffer
        with the step after which replicas hold different bits."""
        try:
            interrupted, last_loss = self._steps(stop)
        except Exception:
            self.saver.finish()  # the checkpoint under way is of an earlier, good step
            raise
        self._await_saved()
        record = self.folder / "recorded.json"
        # A run resumed after its last step measured nothing: keep the existing record.
        fullest = max(self.comm.gather_objects(self.memory, "pp"))  # pipeline stages differ in memory
        if self.first and (self.saved > self.start or not record.exists()):
            self._write_record(record, last_loss, interrupted, fullest)
        self.comm.barrier()
        return interrupted

    def _steps(self, stop: StopFlag) -> tuple[bool, float | None]:
        """Run the steps. Returns (whether a stop was requested, the last loss on held-out sequences)."""
        train, steps = self.plan.train, self.plan.train.steps
        interrupted = False
        last_loss = None
        tokens = self.plan.job.global_batch * self.plan.job.seq
        progress = Progress(steps, self.start, tokens, sys.stderr) if self.first else None
        board = (
            scalars(self.folder / "tensorboard", self.start) if self.first and train.tensorboard else nullcontext()
        )
        with metrics.lines_after(self.folder, self.start, self.first) as lines, board as show:
            for step in range(self.start, steps):
                self.saver.check()
                rows = self._within_memory(step, stop)
                interrupted = any([row.pop("stop") for row in rows])
                if interrupted and self._issued is not None:
                    rows.append(self._settled())
                    rows[-1].pop("stop")
                for row in rows:
                    if "skipped_because" in row and progress is not None:
                        progress.say(f"step {row['step']} skipped: {row['skipped_because']}")
                    if (unbalanced := row.pop("unbalanced", "")) and progress is not None:
                        progress.say(unbalanced)
                done, last = step + 1, step + 1 == steps
                if train.check_sync and done % train.check_sync == 0:
                    self._compare_replicas(done)  # before a wrong state is saved
                # A stopped run may be killed soon: no evaluation then.
                if not interrupted and (last or (train.eval_every and done % train.eval_every == 0)):
                    last_loss = self._evaluate()
                    if last_loss is not None and not math.isfinite(last_loss):
                        last_loss = None
                        if progress is not None:
                            progress.say(f"step {done}: the loss on held-out sequences is not finite")
                    if last_loss is not None:
                        rows[-1]["eval_loss"] = last_loss
                for row in rows:
                    if lines is not None and progress is not None:
                        self.comm.status.now("writing of metrics.jsonl")
                        lines.write(json.dumps(row) + "\n")
                        lines.flush()
                        progress.step(row)
                    if show is not None:
                        show(row)
                # After its metrics line: else a run resumed from here would have a gap in its metrics.
                if last or interrupted or (train.save_every and done % train.save_every == 0):
                    self._save(done)
                if interrupted:
                    break
        if progress is not None:
            progress.close()
        return interrupted, last_loss

    def _within_memory(self, step: int, stop: StopFlag) -> list[dict[str, Any]]:
        """Run `_step`, explaining a failure for lack of GPU memory. Raises OutOfMemory."""
        before = _allocated(self.comm.world.device)
        try:
            return self._step(step, stop)
        except torch.OutOfMemoryError as error:
            raise explain_shortage(
                self.plan, self.comm.world.rank, _memory(self.comm.world.device, before)
            ) from error

    def _step(self, step: int, stop: StopFlag) -> list[dict[str, Any]]:
        """Run step number `step` (from 0) and return the new lines of metrics.jsonl: on a CPU its own; on a GPU that
        of the previous step, and its own only if something (evaluation, a checkpoint) is due after it."""
        plan, world = self.plan, self.comm.world
        lr = learning_rate(plan.train, self.peak_lr, step)
        recorder, timeline = self.comm.recorder, self.comm.timeline
        traced = timeline.possible and step == self.traced
        instrumented = not self.events and self.training.sends
        self.comm.status.now("reading of the batch")
        if self.late and not instrumented:
            return self._late_step(step, stop, lr)
        timeline.begin()
        began = time.perf_counter()
        inputs = self._inputs(step)
        timeline.passes.append(Span("loading", COMPUTE, began, time.perf_counter(), {"op": "loading"}))
        try:
            # The first step of a process is slow anyway, so it is the instrumented one (or the first not skipped; of
            # replicas that take steps alone, the first that synchronises).
            if instrumented:
                with instrument(self.training.model.units(), recorder, lambda: self.training.current) as tracker:
                    result = self.training.step(inputs, lr, bool(stop))
                self.memory = tracker.peak
                self.events = () if result.skipped else tuple(recorder.events)
                if self.events and plan.train.compile == "blocks":
                    compile_blocks(self.training.model)
                if world.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(world.device)
            else:
                recorder.clear()
                with self._watching_passes() if traced else nullcontext():
                    result = self.training.step(inputs, lr, bool(stop))
        except FloatingPointError as error:
            raise self._of_step(step, error) from None
        seconds, times = timeline.end(), timeline.times()
        if result.skipped:
            self.traced = min(max(self.traced, step + 2), plan.train.steps - 1)
        elif not instrumented:
            self.step_times.append(seconds)
            if times is not None:
                self.parts.append((times.compute_s, times.exposed_communication_s, times.hidden_communication_s))
                if traced:
                    self._write_trace(step)
        between, self._ended = began - (self._ended or began), time.perf_counter()
        return [self._row(step, result, lr, seconds, times) | {"between_s": between}]

    def _late_step(self, step: int, stop: StopFlag, lr: float) -> list[dict[str, Any]]:
        """Issue a step; return the line of the previous one, and of this one where something is due after it."""
        before, inputs = self._issued, self._inputs(step)
        if before is None:
            self._clock = time.perf_counter()
        self.comm.recorder.clear()
        try:
            result = self.training.issue(inputs, lr, bool(stop))
        except FloatingPointError as error:
            raise self._of_step(step if before is None else before[0], error) from None
        self._issued = step, lr
        rows = [self._described(*before, result)] if before is not None and result is not None else []
        train, done = self.plan.train, step + 1
        every = (train.check_sync, train.eval_every, train.save_every)
        if done == train.steps or any(n and done % n == 0 for n in every):
            rows.append(self._settled())
        return rows

    def _settled(self) -> dict[str, Any]:
        """Wait for the issued step, and describe it."""
        assert self._issued is not None
        step, lr = self._issued
        self._issued = None
        try:
            result = self.training.settle()
        except FloatingPointError as error:
            raise self._of_step(step, error) from None
        assert result is not None
        return self._described(step, lr, result)

    def _described(self, step: int, lr: float, result: StepResult) -> dict[str, Any]:
        """Return the line of an issued step, timed from the previous line."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if self.comm.world.device.type == "cuda":
            self.memory = torch.cuda.max_memory_allocated(self.comm.world.device)
        if not result.skipped:
            self.step_times.append(seconds)
        return self._row(step, result, lr, seconds, None)

    def _of_step(self, step: int, error: FloatingPointError) -> FloatingPointError:
        self.comm.status.now(f"step {step + 1}")  # overwrite the status set by the search for the origin
        return FloatingPointError(str(error))

    def _watching_passes(self) -> AbstractContextManager[None]:
        training = self.training
        return passes(training.model.units(), training.optimizer, self.comm.timeline, lambda: training.current)

    def _write_trace(self, step: int) -> None:
        """Write the timelines of all ranks of the step that has just ended into one file; all ranks together."""
        self.comm.status.now("writing the timeline")
        comm, rank = self.comm, self.comm.world.rank
        mine = timelines.rank_timeline(rank, comm.mesh.coordinates(rank), comm.timeline.spans())
        everyone = comm.gather_objects(mine, "world")
        if self.first:
            about = {"run": self.plan.train.name, "strategy": str(self.plan.strategy), "step": step + 1}
            timelines.write(self.folder / "trace.json", everyone, about)
        self.trace_written = True

    def _compare_replicas(self, step: int) -> None:
        self.comm.status.now("comparison of the replicas")
        try:
            self.training.compare_replicas()
        except replica_check.ReplicasDiffer as error:
            raise replica_check.ReplicasDiffer(f"after step {step} {error}") from None

    def _inputs(self, step: int) -> list[Tensor]:
        """Return this rank's micro-batches of a step on the device; on a GPU, start to copy the next step's."""
        strategy, device = self.plan.strategy, self.comm.world.device

        def send(step: int) -> list[Tensor]:
            share = self.batches.share(step, self.replica, strategy.dp, strategy.micro_batch)
            return [_to_device(self.training.context.cut(batch), device) for batch in share]

        here = self._ahead[1] if self._ahead and self._ahead[0] == step else send(step)
        if device.type == "cuda":
            self._ahead = (step + 1, send(step + 1))
        return here

    def _row(
        self, step: int, result: StepResult, lr: float, seconds: float, times: StepTimes | None
    ) -> dict[str, Any]:
        """Return a step's line of metrics.jsonl, including `stop` and `unbalanced`, which the loop removes."""
        row = metrics.line(self.plan, step, result, lr, seconds, times, self.memory)
        if self.watch:
            row["unbalanced"] = self.watch.step(result.loads)
        return row | {"stop": result.stop}

    def _evaluate(self) -> float | None:
        """Return the loss on held-out sequences in nats per token, None if there are none; all ranks together."""
        plan, world = self.plan, self.comm.world
        self.comm.status.now("evaluation")
        limit = plan.train.eval_batches * plan.job.global_batch
        every = validation_windows(self.tokens.validation(), plan.job.seq, limit)
        starts = every[self.replica :: plan.strategy.dp]
        held_out, size = self.tokens.validation(), plan.strategy.micro_batch
        documents = self.tokens.validation_starts() if plan.job.separate else None
        parts = [take(held_out, starts[i : i + size], plan.job.seq, documents) for i in range(0, len(starts), size)]
        if plan.job.batch_rows == 3:  # every target of these windows counts
            parts = [np.concatenate([part, part[:1]]) for part in parts]
        parts = [self.training.context.cut(part) for part in parts]
        most = -(-len(every) // plan.strategy.dp)  # of any replica
        passes = -(-most // size)
        loss, tokens = self.training.evaluate([_to_device(part, world.device) for part in parts], passes)
        return loss / tokens if tokens else None

    def _await_saved(self) -> None:
        self.comm.status.now(f"waiting for the checkpoint of step {self.saved}")
        self.saver.wait()

    def _save(self, step: int) -> None:
        self._await_saved()
        self.comm.status.now(f"writing the checkpoint of step {step}")
        self.saver.save(step, self.training.owned(), self.training.numerics())
        self.saved = step

    def _write_record(self, path: Path, last_loss: float | None, interrupted: bool, fullest: int) -> None:
        """Write this process's measurements, for comparison with the prediction."""
        self.comm.status.now("writing of recorded.json")
        record = {
            "version": 1,
            "interrupted": interrupted,
            "first_step": self.start + 1,
            "last_step": self.saved,
            "eval_loss": last_loss,
            "step_time_s": median(self.step_times) if self.step_times else None,
            "best_step_time_s": min(self.step_times, default=None),
            "memory_bytes": fullest,
            "timeline": self._timeline(),
            "events": [asdict(event) for event in self.events],
        }
        write_json(path, record)

    def _timeline(self) -> dict[str, Any] | None:
        """Return this rank's medians over the steps after the first, None if no step was timed."""
        if not self.parts:
            return None
        compute, exposed, hidden = (median(column) for column in zip(*self.parts, strict=True))
        return {
            "compute_s": compute,
            "exposed_communication_s": exposed,
            "hidden_communication_s": hidden,
            "overlap": hidden / (exposed + hidden) if exposed + hidden else None,
            "traced_step": self.traced + 1 if self.trace_written else None,
        }


def _allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _memory(device: torch.device, before: int) -> DeviceMemory:
    """A GPU's memory now; `before`: bytes of tensors when the step began."""
    of = torch.cuda
    reserved, total = of.memory_reserved(device), of.get_device_properties(device).total_memory
    return DeviceMemory(before, of.max_memory_allocated(device), reserved, of.memory_allocated(device), total)


def _to_device(batch: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(batch)
    if device.type == "cuda":  # pinned, so that the copy overlaps with the device's work
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
