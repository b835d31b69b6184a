"""The first step of a parallelized module, compared with one process on the user's own batches.

While the step runs, every forward pass notes its arguments, and the gradient that the user's loss sends to what the
module returned. Afterwards the first rank of each replica sends its notes to rank 0, which has kept the whole module:
it runs the same passes one after another, backward from the same gradients, and compares every parameter's gradient
with the reduced one of all ranks, joined over shards, tp ranks and stages. During the step dropout is off. Unlike the
proof of a tensor plan (first_pass.py) this examines ZeRO, replicas and pipelines too; the price is the whole
module and one more step on rank 0.

It also examines whether a step depends on how sequences are divided into micro-batches and replicas. Gradients
averaged over micro-batches equal the large batch's where the loss is a mean over sequences. They do not where it has
negatives from the batch, statistics of the batch, or unequal numbers of targets: then every replica and every
accumulation trains something else, and no comparison of equal micro-batches shows it. So two micro-batches are run
apart and joined, and their gradients compared up to a factor, since losses are sums or means.
"""

import copy
import json
import math
import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.runtime.any_module.first_pass import largest_deviation, tensors_in
from phalanx.runtime.any_module.split_names import SplitNames
from phalanx.runtime.any_module.stages import Loss
from phalanx.runtime.any_module.tensor_comm import gather_parts
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPE_NAMES
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.spec import Strategy

REQUEST = "PHALANX_FIRST_STEP"
"""Variable by which `phalanx parity --program` asks for this: the file that takes the result, after which the program
ends."""
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The largest relative deviation that passes, as of `phalanx parity`; 16-bit types: `_COARSE`."""
_COARSE = 0.1


@dataclass(frozen=True)
class StepDeviation:
    """How far the gradients of a step are off one process: |g - g*|₂ / max(|g*|₂, 1e-3 x the mean norm), at most, and
    the parameter where; None where that is no number."""

    strategy: str
    dtype: str
    passes: int
    """Micro-batches of all replicas."""
    parameters: int
    zero_gradients: int
    """Parameters whose gradient is zero in one process."""
    grad_rel_max: float | None
    worst: str
    bound: float
    joined: float | None = None
    """How far the gradient of two micro-batches is off that of both as one batch; None where that is not known."""

    @property
    def looks_across(self) -> str:
        """The warning that two micro-batches do not give the gradient of one large batch; "" if they do, or if that
        is not known."""
        if self.joined is None or self.joined <= 1e3 * self.bound:
            return ""
        return (
            f"two micro-batches have another gradient as one batch, off by {self.joined:.1%}: the loss or the module "
            "looks across a batch (negatives in it, its statistics, a mean over unequal numbers of targets), so "
            "replicas and accumulation train something else than one process with the large batch"
        )

    @property
    def passed(self) -> bool:
        """Whether the deviation, a number, is within the bound."""
        return self.grad_rel_max is not None and self.grad_rel_max <= self.bound


class FirstStep:
    """Records the passes of a step on one rank; on rank 0 it has the whole module, from before parallelization."""

    def __init__(self, whole: nn.Module | None, trained: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.whole, self.dtype = whole, dtype
        if whole is not None:
            own = dict(whole.named_parameters())
            for name in trained:
                own[name].data = own[name].data.to(dtype)
        self._passes: list[tuple[Any, Any, list[Tensor]]] = []
        self._training: list[tuple[nn.Module, bool]] = []

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a forward pass and return its result; record it if it is part of training."""
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        self.begin(module)
        given = _detached(args), _detached(kwargs)
        out = module(*args, **kwargs)
        out = _aliased(out)
        begins: list[Tensor] = []
        for place, t in enumerate(t for t in tensors_in(out) if t.requires_grad):
            begins.append(torch.zeros_like(t))
            t.register_hook(lambda g, place=place: begins[place].copy_(g))
        self._passes.append((*given, begins))
        return out

    def begin(self, module: nn.Module) -> None:
        """Turn dropout off until the end of the step."""
        self._training = self._training or [(m, m.training) for m in module.modules()]
        without_dropout(module)

    def compare(
        self,
        comm: Comm,
        strategy: str,
        engine: DataParallel,
        split: SplitNames,
        step: tuple[Sequence[tuple[Tensor, Any]], Loss, float] | None = None,
    ) -> None:
        """Compare the reduced gradients, all ranks together. `step`: the micro-batches of a step that was not written
        as a loop, its loss, and the factor on a pipeline's gradients. Raises InputError with the parameter that is
        off."""
        for m, training in self._training:
            m.training = training
        gradients = {}
        for name, g in engine.gradients():
            cut = split.cuts.get(name)
            gradients[name] = g if split.unsplit or cut is None else cut.joined(gather_parts(g, comm))
        piped = step if comm.mesh.size("pp") > 1 else None
        mine = self._passes if piped is None else [(_detached((x,)), {}, target) for x, target in piped[0]]
        two = [_detached(batch) for batch in step[0][:2] if joinable(batch)] if step is not None else []
        first = all(comm.index(axis) == 0 for axis in ("tp", "pp"))
        of_replicas = comm.gather_objects(mine if first else [], "world")
        of_two = comm.gather_objects(two if first else [], "world")
        for stage in comm.gather_objects({n: g.cpu() for n, g in gradients.items()}, "pp"):
            gradients = {**stage, **gradients}
        result = None
        if self.whole is not None:
            passes = [each for notes in of_replicas for each in notes]
            truth = _one_process(self.whole, passes, None if piped is None else piped[1:])
            worst, share = largest_deviation(
                truth, lambda name: float((gradients[name].to(truth[name]).double() - truth[name].double()).norm())
            )
            bound = BOUNDS.get(self.dtype, _COARSE)
            what = DTYPE_NAMES.get(self.dtype, str(self.dtype))
            two = [batch for batches in of_two for batch in batches][:2]
            joined = joined_deviation(self.whole, two, step[1]) if step is not None and len(two) > 1 else None
            zero = sum(not bool(g.any()) for g in truth.values())
            number = share if math.isfinite(share) else None
            result = StepDeviation(strategy, what, len(passes), len(truth), zero, number, worst, bound, joined)
        deviation: StepDeviation = comm.gather_objects(result, "world")[0]
        _conclude(deviation, comm.world.rank)


def require_comparable(s: Strategy, buffers: str) -> None:
    """Refuse options under which one process does not compute the same gradients. Raises InputError."""
    if s.compression != "none":
        raise InputError("strategy.compression", s.compression, "equals no step of one process", "leave it out")
    if buffers == "synchronise":
        reason = "takes statistics over replicas, whose batches one process runs one after another"
        raise InputError("buffers", buffers, reason, "compare with another choice")


def without_dropout(module: nn.Module) -> None:
    """Put a module in evaluation mode, except norms with statistics of the batch."""
    for m in module.modules():
        m.training = m.training and isinstance(m, _NormBase)


def _conclude(deviation: StepDeviation, rank: int) -> None:
    """Write the result where `phalanx parity` waits for it, and end the program; otherwise warn of a deviation.
    Raises InputError beyond the bound."""
    file = os.environ.get(REQUEST)
    if file:
        if rank == 0:
            write_json(Path(file), asdict(deviation))
        raise SystemExit(0)
    if not deviation.passed:
        off = deviation.grad_rel_max
        differs = "is no number, here or in" if off is None else f"differs by {off:.1e} from that of"
        reason = f"its gradient {differs} one process"
        raise InputError("strategy", deviation.strategy, f"{deviation.worst}: {reason} in the first step")
    if deviation.looks_across and rank == 0:
        warnings.warn(deviation.looks_across, stacklevel=2)


def _one_process(
    whole: nn.Module, passes: Sequence[tuple[Any, Any, Any]], loss: tuple[Loss, float] | None
) -> dict[str, Tensor]:
    """Run all passes in one process; return the gradients by name."""
    without_dropout(whole)
    parameters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    for args, kwargs, end in passes:
        out = whole(*args, **kwargs)
        if loss is not None:
            (loss[0](out, end) * loss[1]).backward()
            continue
        outs = [t for t in tensors_in(out) if t.requires_grad]
        torch.autograd.backward(outs, [g.to(t) for g, t in zip(end, outs, strict=True)])
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}


def _aliased(out: Any) -> Any:
    """Return what a module returned with an alias in place of each tensor: its gradient is what the caller sends, and
    not what also comes from other outputs, as logits returned along with a loss have."""
    if isinstance(out, Tensor):
        return out.view_as(out)
    if isinstance(out, tuple | list):
        parts = [_aliased(item) for item in out]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    if isinstance(out, MutableMapping):
        aliases = copy.copy(out)
        for key, item in out.items():
            aliases[key] = _aliased(item)
        return aliases
    return out


def _detached(value: Any) -> Any:
    """Copy the arguments of a module, with detached tensors, so that later changes do not show."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        parts = [_detached(item) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return value


def read_deviation(file: Path) -> StepDeviation | None:
    """Read the result of a program's first step; None if it wrote none."""
    return StepDeviation(**json.loads(file.read_text())) if file.exists() else None


def joined_deviation(whole: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Loss) -> float | None:
    """Return how far the gradient of two micro-batches, (input, target) each, is from that of both as one batch, as a
    share of its norm; None where they cannot be joined along their first dim."""
    try:
        apart, joined = _summed_gradient(whole, batches, loss), _summed_gradient(whole, [_joined(batches)], loss)
    except Exception:  # a stranger's loss and module, on a batch that they were not written for
        return None
    square, norm = float(joined.dot(joined)), float(apart.norm())
    if not square or not norm:
        return None
    return float((apart - joined * (float(apart.dot(joined)) / square)).norm()) / norm


def joinable(batch: Any) -> bool:
    """Whether a batch is made of tensors with a first dim."""
    try:
        _joined([batch])
    except TypeError:
        return False
    return True


def _summed_gradient(whole: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Loss) -> Tensor:
    """Return the sum of the gradients of some batches, flat, in fp64."""
    trained = [p for p in whole.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64, device=trained[0].device)
    for x, target in batches:
        grads = torch.autograd.grad(loss(whole(x), target), trained, allow_unused=True)
        flat = [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(trained, grads, strict=True)]
        total += torch.cat(flat).double()
    return total


def _joined(values: Sequence[Any]) -> Any:
    """Join inputs or targets of several batches along their first dim. Raises TypeError for one without."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    if isinstance(first, tuple | list):
        joined = [_joined(parts) for parts in zip(*values, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if isinstance(first, Mapping):
        return {key: _joined([value[key] for value in values]) for key in first}
    if first is None:
        return None
    raise TypeError(f"{type(first).__name__} cannot be joined")
