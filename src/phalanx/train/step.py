"""One training step, and everything it changes: weights, their masters, optimizer state.

The trainer, the parity examiner and the benchmarks all run this same step.

    micro-batches: forward, backward (gradients leave with the last one)
    metrics:       one fused fp64 all-reduce: loss sum, target tokens, stop flag, faulty-loss flag
    finish:        gradients are sums over the global batch; divided by its token count, clipped
    optimizer:     on the masters; weights are cast down from them
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.nn.decoder import Decoder
from phalanx.nn.initial import create, draw
from phalanx.runtime.comm import DTYPES, Comm
from phalanx.runtime.data_parallel import DataParallel
from phalanx.schedule.buckets import gradient_buckets
from phalanx.spec.job import Job, Optimizer
from phalanx.spec.model import ModelSpec, parameters
from phalanx.spec.strategy import Strategy


@dataclass(frozen=True)
class StepResult:
    """`loss` in nats per token; `grad_norm` before clipping; `stop`: some rank was asked to stop."""

    loss: float
    grad_norm: float
    tokens: int
    stop: bool


class Training:
    """The state of a run on one rank."""

    def __init__(self, spec: ModelSpec, job: Job, strategy: Strategy, comm: Comm, seed: int) -> None:
        self.spec, self.job, self.comm = spec, job, comm
        precision = job.precision
        device = comm.world.device
        self.model: Decoder = create(spec, DTYPES[precision.compute], device)
        own = dict(self.model.named_parameters())
        separate = precision.master_dtype != precision.compute
        self.masters: dict[str, Tensor] = {}
        for p in parameters(spec):
            values = torch.from_numpy(draw(spec, p, seed, 0, p.numel)).view(p.shape)
            with torch.no_grad():
                own[p.fqn].copy_(values)
            self.masters[p.fqn] = (
                values.to(device, DTYPES[precision.master_dtype], copy=True) if separate else own[p.fqn]
            )
        self.weights = own
        self.engine = DataParallel(self.model, gradient_buckets(spec, job, strategy.bucket_bytes), precision, comm)
        self.optimizer = make_optimizer(job.optimizer, self.masters)
        self._gradients = dict(self.engine.gradients())
        # A master of the gradients' own type reads them where they were reduced; another gets a cast copy.
        self._same = precision.accumulate_dtype == precision.master_dtype
        self.current = 0  # micro-batch under way

    def step(self, micro_batches: list[Tensor], lr: float, stop: bool = False) -> StepResult:
        """Train on this rank's micro-batches, each (micro_batch, seq + 1) token ids on the device.

        Raises FloatingPointError, before any weight changes, where loss or gradient norm is not finite.
        """
        job, comm = self.job, self.comm
        expected = job.global_batch * job.seq
        metrics = torch.zeros(4, dtype=torch.float64, device=comm.world.device)
        self.engine.begin()
        for i, batch in enumerate(micro_batches):
            self.current = i
            self.engine.micro_batch(i, last=i == len(micro_batches) - 1)
            comm.status.now(f"forward of micro-batch {i}")
            loss = self.model(batch[:, :-1], batch[:, 1:])
            metrics[0] += loss.detach()
            metrics[1] += batch.shape[0] * (batch.shape[1] - 1)
            comm.status.now(f"backward of micro-batch {i}")
            (loss / expected).backward()
            del loss
        self.engine.finish()
        metrics[2] = float(stop)
        metrics[3] = ~torch.isfinite(metrics[0])
        comm.all_reduce(metrics, "world", unit="metrics", phase="opt").wait()
        loss_sum, tokens, stops, faulty, norm = _read(torch.cat([metrics, self.engine.gradient_norm()[None]]))
        # The loss was divided by the expected number of target tokens; make it the true one.
        factor = expected / tokens
        norm *= factor
        if faulty or not math.isfinite(norm):
            raise FloatingPointError(f"loss {loss_sum / tokens} and gradient norm {norm} are not both finite")
        clip = min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0
        self.engine.scale(factor * clip)
        comm.status.now("optimizer")
        self._update(lr)
        return StepResult(loss_sum / tokens, norm, int(tokens), stops > 0)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        for name, master in self.masters.items():
            gradient = self._gradients[name]
            master.grad = gradient if self._same else gradient.to(master.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for name, weight in self.weights.items():
            master = self.masters[name]
            if not self._same or master is not weight:
                # A cast copy, or a view that the weight's own gradient must not add to: gone after its use.
                master.grad = None
            if master is not weight:
                weight.copy_(master)

    @torch.no_grad()
    def evaluate(self, batches: list[Tensor]) -> tuple[float, int]:
        """(Loss summed over target tokens, their number) of this rank's sequences, reduced over the world."""
        total = torch.zeros(2, dtype=torch.float64, device=self.comm.world.device)
        for batch in batches:
            total[0] += self.model(batch[:, :-1], batch[:, 1:])
            total[1] += batch.shape[0] * (batch.shape[1] - 1)
        self.comm.all_reduce(total, "world", unit="evaluation", phase="opt").wait()
        loss, tokens = total.tolist()
        return loss, int(tokens)

    def logical_tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds, by its layout-free name; views of live state, to save or to fill."""
        found = {f"parameters.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state[master].items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    @torch.no_grad()
    def loaded(self) -> None:
        """After masters were filled from a checkpoint: the weights follow."""
        for name, weight in self.weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])


def _read(metrics: Tensor) -> list[float]:
    """The step's one read of device memory by the host (verification replaces it)."""
    return metrics.tolist()  # type: ignore[no-any-return]


def make_optimizer(given: Optimizer, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum betas[0], fused; weight decay on matrices and embeddings only.

    State is made here and not in the first step, so that a checkpoint can fill it and memory is the same in
    every step. Masters of another type than the gradients get theirs cast at the update.
    """
    matrices = [m for m in masters.values() if m.ndim > 1]
    vectors = [m for m in masters.values() if m.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": given.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    optimizer: torch.optim.Optimizer
    if given.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=given.betas[0], fused=True)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=given.betas, eps=given.eps, fused=True)
    for master in masters.values():
        state = optimizer.state[master]
        if given.name == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
        elif given.betas[0]:
            state["momentum_buffer"] = torch.zeros_like(master, requires_grad=False)
    return optimizer
