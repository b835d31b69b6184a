"""A plan of names, proved on the user's first batch: the split module against the whole one.

A plan says how matrices are split, and knows nothing of what the module does with them: a matrix that packs several
(gate and up, or q, k and v) and is cut in equal parts computes another function, without an error; a norm inside a
split block gets a part of its gradient. So before the first step a copy of the whole module and a split one run the
batch, without dropout and from the same random state, forward, and backward from equal gradients of the outputs.
Outputs and the gradient of every parameter are compared. Where outputs differ, the first module is named that is
called with equal inputs and returns other outputs; else the parameter whose gradient differs most.

Gates that start at zero (adaLN-Zero, LoRA, LayerScale) hide what is behind them: outputs do not depend on it, and its
gradients are zero, right or wrong. So parameters that are constant get drawn values for the proof.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from phalanx.runtime.any_module.split_names import Cut
from phalanx.runtime.any_module.tensor_comm import gather_parts
from phalanx.runtime.any_module.tensor_plan import split_layers
from phalanx.runtime.comm.communicator import Comm
from phalanx.spec.errors import InputError

_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The largest difference as a share of a norm: sums are taken in another order. Other types: 0.1."""
_FLOOR = 1e-3
"""Norms count as at least this share of the mean norm, so that gradients of zero may differ by rounding."""
_SMALL = 0.1
"""Constants below this are drawn anew: a block behind a LayerScale of 1e-6 shows no error."""

Call = tuple[list[Tensor], list[Tensor]]
"""(The tensors among a module's arguments, the tensors that it returned)."""


@dataclass(frozen=True)
class FirstPass:
    """The first call of every module by its name, innermost first, and the gradient of every parameter."""

    calls: Mapping[str, Call]
    gradients: Mapping[str, Tensor]


def prove(whole: nn.Module, plan: Mapping[str, str], comm: Comm, args: Any, kwargs: Mapping[str, Any]) -> float:
    """Run a whole module and its split copy on a batch, all tp ranks together; constant parameters of `whole` are
    drawn. Returns the largest difference of an output or a gradient. Raises InputError beyond the bound."""
    draw_constants(whole)
    split = copy.deepcopy(whole)
    cuts = split_layers(split, plan, comm)
    expected = one_pass(whole, args, kwargs)
    try:
        actual = one_pass(split, args, kwargs)
    except (RuntimeError, ValueError) as error:
        raise _does_not_run(whole, split, cuts, error) from error
    forward = _require_outputs(split, expected.calls, actual.calls, cuts)
    return max(forward, _require_gradients(expected.gradients, actual.gradients, cuts, comm))


@torch.no_grad()
def draw_constants(module: nn.Module) -> None:
    """Give trained parameters whose elements are all equal values of usual size, alike on all ranks: matrices
    N(0, 1 / columns), others near their constant, near 1/2 if that is small."""
    draw = torch.Generator().manual_seed(0)
    for p in module.parameters():
        if not p.requires_grad or not p.numel() or bool((p != p.flatten()[0]).any()):
            continue
        noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
        constant = float(p.flatten()[0])
        small = abs(constant) < _SMALL
        values = noise * (len(p) / p.numel()) ** 0.5 if p.dim() > 1 else noise / 5 + (0.5 if small else constant)
        p.copy_(values.to(p))


def _does_not_run(whole: nn.Module, split: nn.Module, cuts: Mapping[str, Cut], error: Exception) -> InputError:
    """Explain why a split module does not run: usually it still has the whole module's number of heads or channels,
    or computes a size from the width of its input."""
    every = _numbers_above(split, cuts)
    heads = [name for name in every if _number(whole, name) == _number(split, name)]
    blocks = sorted({name.rpartition(".")[0] for name in every})
    divided = "the input of a split block is as wide as the whole: keep sizes as numbers, computed before the split, "
    divided += f'or let views follow the width of a rank: "{blocks[0] if blocks else ""}": "local_width"'
    undivided = (
        f'divide what the ranks divide: "{heads[0]}": "divided"' if heads else 'see "divided" in tensor_plan.py'
    )
    remedy = divided if len(heads) < len(every) and not any("head" in name for name in heads) else undivided
    return InputError("tp_plan", None, f"makes a module that does not run: {str(error).splitlines()[0]}", remedy)


def _number(module: nn.Module, name: str) -> Any:
    owner, _, key = name.rpartition(".")
    return getattr(module.get_submodule(owner), key)


def _numbers_above(split: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of the numbers in the modules that contain the layers of these parameters; numbers called
    heads come first."""
    modules = dict(split.named_modules())
    owners = sorted({name.rpartition(".")[0].rpartition(".")[0] for name in names})
    numbers = [
        (o, k) for o in owners for k, v in vars(modules.get(o, nn.Module())).items() if type(v) is int and v > 1
    ]
    ranked = sorted((("head" not in key, owner, key) for owner, key in numbers if key != "head_dim"))
    return [f"{owner}.{key}" if owner else key for _, owner, key in ranked]


def _require_outputs(
    split: nn.Module, expected: Mapping[str, Call], actual: Mapping[str, Call], cuts: Mapping[str, Cut]
) -> float:
    """Require equal outputs of the module; return their difference. Raises InputError."""
    difference = _difference(expected[""][1], actual[""][1])
    if difference <= _bound(expected[""][1]):
        return difference
    layers = {name.rpartition(".")[0] for name in cuts}
    inside = (
        n for n in actual if n in expected and not any(n == layer or n.startswith(f"{layer}.") for layer in layers)
    )
    culprit = next(
        (n for n in inside if _equal(expected[n][0], actual[n][0]) and not _equal(expected[n][1], actual[n][1])), ""
    )
    within = sorted(layer for layer in layers if not culprit or layer.startswith(f"{culprit}."))
    numbers = _numbers_above(split, [name for name in cuts if name.rpartition(".")[0] in within])
    heads = f'; a number of heads as "{numbers[0]}": "divided"' if numbers else ""
    raise InputError(
        "tp_plan",
        ", ".join(within[:4]) + (", ..." if len(within) > 4 else ""),
        f"makes {culprit or 'the module'} compute another function than unsplit: its output differs by "
        f"{_difference(expected[culprit][1], actual[culprit][1]):.1e} of its norm",
        "a matrix that packs several (gate and up; q, k and v) is cut by their counts, as colwise:2 or "
        f"colwise:64,16,16{heads}; else leave these out of the plan",
    )


def _require_gradients(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], cuts: Mapping[str, Cut], comm: Comm
) -> float:
    """Require equal gradients of all parameters on all ranks; return the largest difference. Raises InputError."""

    def error(name: str) -> float:
        parts = gather_parts(actual[name], comm)
        wholes = [cuts[name].joined(parts)] if name in cuts else parts
        return float(torch.stack([(expected[name].double() - each.double()).norm() for each in wholes]).max())

    culprit, worst = largest_deviation(expected, error)
    if culprit and not worst <= _bound([expected[culprit]]):
        remedy = (
            "give it a style (per_channel, or replicated_with_grad_allreduce), or leave its block out of the plan"
        )
        reason = f"its gradient differs by {worst:.1e} of its norm from that of the unsplit module"
        raise InputError("tp_plan", culprit, reason, remedy)
    return worst


def largest_deviation(truth: Mapping[str, Tensor], error: Callable[[str], float]) -> tuple[str, float]:
    """Return (the parameter whose gradient is farthest off, how far), "" and 0 if none is: the norm of its `error` as
    a share of the true gradient's norm, or of `_FLOOR` times the mean norm if that is more."""
    norms = {name: float(g.double().norm()) for name, g in truth.items()}
    floor = _FLOOR * math.sqrt(sum(n * n for n in norms.values()) / max(len(norms), 1))
    worst, most = "", 0.0
    for name in truth:
        off = error(name)
        share = off / max(norms[name], floor) if off else 0.0
        if not math.isnan(most) and not share <= most:  # also where it is no number, which is then the worst
            worst, most = name, share
    return worst, most


def one_pass(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> FirstPass:
    """Run a module forward without dropout, and backward from the same drawn gradients of its outputs wherever it
    runs. Its parameters get no gradient."""
    calls: dict[str, Call] = {}

    def record(name: str) -> Callable[..., None]:
        def after(_: nn.Module, given: Any, named: Any, out: Any) -> None:
            kept = [[t.detach().clone() for t in tensors_in(each)] for each in ((given, named), out)]
            calls.setdefault(name, (kept[0], kept[1]))

        return after

    hooks = [m.register_forward_hook(record(n), with_kwargs=True) for n, m in module.named_modules()]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    try:
        with torch.enable_grad(), evaluation_mode(module), forked_random():
            outs = [t for t in tensors_in(module(*args, **kwargs)) if t.requires_grad]
            draw = torch.Generator().manual_seed(0)
            begin = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t) for t in outs]
            computed = torch.autograd.grad(outs, list(trained.values()), begin, allow_unused=True) if outs else ()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = {
        name: torch.zeros_like(p) if g is None else g.contiguous()
        for (name, p), g in zip(trained.items(), computed, strict=bool(outs))
    }
    return FirstPass(calls, gradients)


def has_values(module: nn.Module) -> bool:
    """Whether parameters have content, as under `phalanx observe` they have not: nothing can be proved by them."""
    return not any(is_fake(p) for p in module.parameters())


def forked_random() -> AbstractContextManager[None]:
    """Leave the random states of the host and of this rank's GPU as they were, and other GPUs alone."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode: no dropout, no statistics of batches."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of a module, nested in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def _bound(tensors: list[Tensor]) -> float:
    return min((_BOUNDS.get(t.dtype, 0.1) for t in tensors if t.is_floating_point()), default=0.1)


def _equal(expected: list[Tensor], actual: list[Tensor]) -> bool:
    """Whether tensors are equal within the bound; pairs of unequal shapes, as caches of split heads, do not count."""
    return _difference(expected, actual) <= _bound(expected)


def _difference(expected: list[Tensor], actual: list[Tensor]) -> float:
    pairs = [
        (a.double(), b.double())
        for a, b in zip(expected, actual, strict=False)
        if a.shape == b.shape and a.is_floating_point()
    ]
    norm = math.sqrt(sum(float(a.square().sum()) for a, _ in pairs))
    error = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    return error / norm if norm else error
