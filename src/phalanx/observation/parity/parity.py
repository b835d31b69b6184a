"""Parity: training with any strategy equals training in one process, the oracle.

Rank 0 trains two models in parallel from the same weights on the same sequences: its share of the examined
strategy, and the full job alone. After every step losses, gradient norms and gradients are compared. Adam hides a
wrong gradient scale and clipping a wrong norm, so SGD runs too and the gradients themselves are compared.

Near-ties of a router are cases in which a strategy may correctly choose other experts than one process does. In fp32
the scores of a token's k-th and next best expert may differ by less than two orders of summation do. Then a
strategy may choose the other one, and every later number differs. Such a flip is visible in the expert loads. It
counts as a near-tie if the choices of at least as many tokens of that layer change when their scores change by
`BOUND`; otherwise it is an error like any other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.nn.experts import routing
from phalanx.nn.experts.moe import MoE
from phalanx.observation.parity.outer_oracle import OuterOracle
from phalanx.progress import in_progress
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.job import Job, Precision, Train
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import OptimizerName
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.data import Batches, WholeDocuments, batches
from phalanx.training.expert_load import LayerLoad
from phalanx.training.trainer import learning_rate
from phalanx.training.training_step import StepResult, Training

BOUND = 1e-5
"""Relative change of a score; the bound of fp32 gradients."""
_TRIALS = 16


def near_ties(p: Tensor, x: Experts, balance: Tensor | None) -> int:
    """Return the number of tokens that choose other experts when their scores p, (tokens, experts), change by up to
    `BOUND`."""
    generator = torch.Generator(p.device).manual_seed(0)
    chosen = routing.choose(p, x, balance).sort(-1).values
    differ = torch.zeros(len(p), dtype=torch.bool, device=p.device)
    for _ in range(_TRIALS):
        noise = torch.randint(0, 2, p.shape, generator=generator, device=p.device).mul_(2).sub_(1)
        other = routing.choose(p * (1 + BOUND * noise.to(p.dtype)), x, balance).sort(-1).values
        differ |= (other != chosen).any(-1)
    return int(differ.sum())


def first_flip(
    ours: Sequence[LayerLoad],
    truth: Sequence[LayerLoad],
    seen: Mapping[int, Sequence[tuple[Tensor, Tensor | None]]],
    x: Experts,
) -> str:
    """Describe the near-ties that explain the first layer whose loads differ; "" if all loads agree, or near-ties do
    not explain it. `seen`: (scores, balance biases) of every pass, by block, as one process had them."""
    for a, b in zip(ours, truth, strict=True):
        if a.chosen == b.chosen:
            continue
        moved = sum(abs(m - n) for m, n in zip(a.chosen, b.chosen, strict=True)) // 2
        ties = sum(near_ties(p, x, balance) for p, balance in seen[b.block])
        if moved > ties:
            return ""
        choices = "1 choice" if moved == 1 else f"{moved} choices"
        return f"{choices} in block {b.block}, where {ties} tokens hang on less than {BOUND:g} of a score"
    return ""


BOUNDS: dict[str, float] = {"float64": 1e-9, "float32": 1e-5}
"""The largest relative deviation that passes, by compute type."""
_ORACLE_TOKENS = 4096  # per micro-batch of the oracle, so that it splits its batch differently from most strategies


@dataclass(frozen=True)
class Deviation:
    """The largest relative deviations of loss and gradients, and the place of the `worst` gradient. `near_tie`: why
    only `steps` steps could be compared (near-ties), "" if all were."""

    optimizer: str
    loss_rel_max: float
    grad_rel_max: float
    worst: str
    steps: int = 0
    near_tie: str = ""


def gradient_errors(ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield (name, |g - g*|₂ / max(|g*|₂, 1e-3 x global norm / sqrt(number of tensors))) of every logical tensor."""
    norms = {name: float(torch.linalg.vector_norm(g.double())) for name, g in oracle.items()}
    floor = 1e-3 * float(np.linalg.norm(list(norms.values()))) / len(norms) ** 0.5
    for name, g in oracle.items():
        difference = float(torch.linalg.vector_norm(ours[name].double() - g.double()))
        yield name, difference / max(norms[name], floor) if difference else 0.0


def rounding_alone(gradients: dict[str, Tensor]) -> set[str]:
    """Return the tensors whose gradient is zero but for rounding, as a key's bias before a softmax. AdamW changes
    them by that rounding divided by eps, which differs from one order of summation to another."""
    norms = {name: float(torch.linalg.vector_norm(g.double())) for name, g in gradients.items()}
    whole = float(np.linalg.norm(list(norms.values())))
    return {name for name, g in gradients.items() if norms[name] < 100 * torch.finfo(g.dtype).eps * whole}


def examine(
    spec: ModelSpec,
    job: Job,
    strategy: Strategy,
    train: Train,
    comm: Comm,
    optimizer: OptimizerName,
    dtype: Literal["float64", "float32"],
    steps: int,
    say: Callable[[str], None] = lambda _: None,
) -> Deviation | None:
    """Train `steps` steps on all ranks with the strategy, and on rank 0 in one process too; return the largest
    deviations on rank 0, None elsewhere. `say`: prints a line of progress."""
    job = replace(job, precision=Precision(compute=dtype), optimizer=replace(job.optimizer, name=optimizer))
    ours = Training(spec, job, strategy, comm, train.seed)
    first = comm.world.rank == 0
    # Of replicas that take steps alone, one process trains each, on its share of the sequences.
    own = replace(job, global_batch=job.global_batch // strategy.dp_local)
    alone = Strategy(micro_batch=_oracle_micro_batch(own))
    oracles = [
        Training(spec, own, alone, Comm(ALONE, mesh(alone)), train.seed) for _ in range(strategy.dp_local * first)
    ]
    outer = OuterOracle(oracles, job.outer, strategy) if first and strategy.local else None
    batches = random_batches(spec, job, train.seed, steps=4)
    replica = comm.mesh.replica(comm.world.rank)
    device = comm.world.device
    loss_max, grad_max, worst = 0.0, 0.0, ""
    ties = _NearTies(oracles) if dtype == "float32" and spec.experts and spec.experts.chooser == "tokens" else None
    for step in in_progress(range(steps), f"steps under {optimizer} compared", say, steps):
        lr = learning_rate(train, train.lr, step)
        share = batches.share(step, replica, strategy.dp, strategy.micro_batch)
        result = ours.step([torch.from_numpy(ours.context.cut(b)).to(device) for b in share], lr)
        gradients = ours.gradients()
        truth = None
        together = strategy.local > 0 and (step + 1) % strategy.local == 0
        for index, one in enumerate(oracles):
            share = batches.share(step, index, strategy.dp_local, alone.micro_batch)
            result_of = one.step([torch.from_numpy(b).to(device) for b in share], lr)
            truth = result_of if truth is None else replace(truth, loss=truth.loss + together * result_of.loss)
        if truth is not None and together:
            truth = replace(truth, loss=truth.loss / strategy.dp_local)
        changes = outer.after(step % strategy.local) if outer is not None else {}
        if ties is not None and (why := ties.explain(comm, result, truth)):
            return Deviation(optimizer, loss_max, grad_max, worst, step, f"step {step + 1}: {why}") if first else None
        if truth is None:
            continue
        loss_max = max(loss_max, abs(result.loss / truth.loss - 1))
        exact = dict(oracles[0].engine.gradients())
        rounded = rounding_alone(exact) if changes and optimizer == "adamw" else set()
        truths = {n: x for n, x in {**exact, **changes}.items() if n not in changes or n not in rounded}
        errors = dict(gradient_errors(gradients, truths))
        errors["gradient norm"] = abs(result.grad_norm / truth.grad_norm - 1)
        name = max(errors, key=lambda n: errors[n])
        if errors[name] > grad_max:
            grad_max, worst = errors[name], f"{name} at step {step + 1}"
    return Deviation(optimizer, loss_max, grad_max, worst, steps) if first else None


class _NearTies:
    """Records the router scores of the first oracle, which explain why the strategy may choose other experts."""

    def __init__(self, oracles: Sequence[Training]) -> None:
        self._layers: dict[int, MoE] = {}
        for name, block in oracles[0].model.blocks.items() if oracles else ():
            for layer in block.children():
                if isinstance(layer, MoE):
                    self._layers[int(name)] = layer
                    layer.noted = []

    def explain(self, comm: Comm, ours: StepResult, truth: StepResult | None) -> str:
        """Return why the latest step may differ from the oracle's, "" if it may not. All ranks must call this."""
        why = ""
        if truth is not None:
            seen = {block: layer.noted or [] for block, layer in self._layers.items()}
            why = first_flip(ours.loads, truth.loads, seen, next(iter(self._layers.values())).x)
            for layer in self._layers.values():
                layer.noted = []
        return str(comm.gather_objects(why, "world")[0])


def random_batches(spec: ModelSpec, job: Job, seed: int, steps: int) -> Batches | WholeDocuments:
    """Draw random tokens for `steps` steps, with document boundaries if the job separates documents. Later steps
    repeat them in another order."""
    size = (job.global_batch + 2) * (job.seq + 1) * steps
    tokens = np.random.default_rng(seed).integers(spec.vocab, size=size)
    starts = np.flatnonzero(np.random.default_rng(seed + 1).random(size) < 2 / job.seq)
    return batches(tokens, lambda: starts, job, seed)


def _oracle_micro_batch(job: Job) -> int:
    fits = [m for m in range(1, job.global_batch + 1) if job.global_batch % m == 0 and m * job.seq <= _ORACLE_TOKENS]
    return max(fits, default=1)
