"""A tensor plan of a module, from what its own gradients say.

Take a layer whose inputs are to be split, over as many ranks, and ask of each rank's inputs which rows of every
parameter around it they depend on:

    d (sum over the inputs of rank r, each with a drawn weight) / d parameter  =  0   outside of the rows of rank r

A parameter whose ranks have rows apart can be split with them: its runs of rows are its packed matrices, and their
lengths the counts (gate and up: two; q, k and v of grouped heads: three unequal ones; a depthwise convolution, a
state's decay: one). One that all ranks use, inside, has gradients to be summed. This is exact, whatever the code
between; it is asked in evaluation, of one batch. What else flows out of a layer is found in the graph of the same
pass: the module's outputs must depend on split rows through the layer that sums alone.

The plan is a proposal: `parallelize` proves it on its first batch (first_pass.py).
"""

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from phalanx.runtime.any_module.first_pass import (
    draw_constants,
    evaluation_mode,
    forked_random,
    has_values,
    tensors_in,
)
from phalanx.runtime.any_module.tensor_plan import Matrix, split_layers, tied_layers
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import World
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_REPLICATED = "replicated_with_grad_allreduce"
_ALIKE = 1e-2
"""How far sums may be off for rounding, in 16 bits too; the first batch is compared more finely (first_pass.py)."""
_PARENTS = 2
"""Number of parents above a layer in which its partners are searched for."""


def propose_tp_plan(
    module: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None, tp: int = 2
) -> dict[str, str]:
    """Return a plan of names (tensor_plan.py) that splits a module over `tp` ranks, found on one batch: `args` is
    what the module is called with, a tuple or one tensor. Each found block has a layer whose outputs are summed; all
    other layers stay whole, with a warning those that cannot run split. Raises InputError where nothing can be
    split."""
    if tp < 2:
        raise InputError("tp", tp, "splits nothing", "propose for 2 ranks or more")
    batch = (args if isinstance(args, tuple) else (args,)), dict(kwargs or {})
    try:
        inspect.signature(module.forward).bind(*batch[0], **batch[1])
    except TypeError as error:
        reason = f"is not what {type(module).__name__}.forward takes ({error})"
        raise InputError("args", None, reason, "give its inputs alone, without the targets of a loss") from None
    if not has_values(module):
        reason = "has no values under `phalanx observe`, and a plan follows from gradients"
        raise InputError("module", type(module).__name__, reason, "propose the plan outside, and write it down")
    plan: dict[str, str] = {}
    module = copy.deepcopy(module)
    draw_constants(module)  # behind a gate of zeros no gradient says anything
    with torch.enable_grad(), evaluation_mode(module), forked_random():
        inputs, outs = _inputs(module, *batch)
        taken = tied_layers(module) | {name for name, m in module.named_modules() if is_parametrized(m)}
        for name, x in inputs.items():
            styles = {} if name in taken else _block(module, name, x, outs, tp, taken)
            if styles:
                plan |= styles
                taken |= {key.removesuffix(".weight") for key in styles}
        for name, layer in module.named_modules():
            if (
                isinstance(layer, nn.MultiheadAttention)
                and layer.in_proj_weight is not None
                and not layer.num_heads % tp
            ):
                plan[name] = "attention_heads"
        plan |= _numbers(module, plan, tp)
        plan = _runnable(module, plan, batch, tp)
    if not plan:
        reason = f"has no layers that {tp} ranks could split, one after another, without sending in between"
        inside = "name the layers, with rowwise_inside and colwise_inside around a sum in between"
        raise InputError("tp_plan", type(module).__name__, reason, f"{inside}, or use dp, zero or pp")
    return _with_wildcards(module, plan)


def _runnable(module: nn.Module, plan: dict[str, str], batch: tuple[Any, Any], tp: int) -> dict[str, str]:
    """Return a plan whose blocks all run. A block that does not, though its number of heads is divided, gets the
    style `local_width`, or if that does not help is left out. Raises InputError if other parts do not run."""
    error = _fault(module, plan, batch, tp)
    owners = [key.rpartition(".")[0] for key, style in plan.items() if style == "divided"] if error else []
    kinds: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = {}  # blocks of alike names and styles
    for name in [f"{owner}." if owner else "" for owner in owners]:
        styles = frozenset((key.removeprefix(name), style) for key, style in plan.items() if key.startswith(name))
        kinds.setdefault((_wildcard(name), styles), []).append(name)
    for (kind, _), within in kinds.items():
        own = tuple(within)
        alone = {key: style for key, style in plan.items() if key.startswith(own)}
        if not (fault := _fault(module, alone, batch, tp)):
            continue
        if followed := _following(module, alone, own, batch, tp):
            plan |= followed
        else:
            text = (
                f"stays whole: split, it does not run ({fault}), or computes something else. Its forward pass takes "
                "sizes from where the split does not reach: keep the size of a head as a number of the module"
            )
            label = kind if [other for other, _ in kinds].count(kind) == 1 else " and ".join(own)
            warnings.warn(f"{label.removesuffix('.') or 'the module'} {text}", stacklevel=3)
            plan = {key: style for key, style in plan.items() if key not in alone}
    if error and plan and (error := _fault(module, plan, batch, tp)):
        raise InputError(
            "tp_plan", type(module).__name__, f"splits into what does not run: {error}", "name the layers"
        )
    return plan


def _following(
    module: nn.Module, alone: dict[str, str], within: tuple[str, ...], batch: tuple[Any, Any], tp: int
) -> dict[str, str]:
    """Return the styles of alike blocks, the beginnings of whose names are `within`, with which they follow the width
    of a rank; empty where they do not run with these either, or compute something else."""
    follow = {name.removesuffix("."): "local_width" for name in within}
    shapes = {key: p.shape for key, p in module.named_parameters()}
    summed = {key: shapes[f"{key}.weight"][1] for key, style in alone.items() if style == "rowwise"}
    widths = {
        f"{name}{key}": "divided"
        for name in within
        for key, value in vars(module.get_submodule(name.removesuffix("."))).items()
        if type(value) is int and value in [n for row, n in summed.items() if row.startswith(name)]
    }
    for numbers in ({}, widths):
        plan = alone | follow | numbers
        if not _fault(module, plan, batch, tp):
            first = {key: style for key, style in plan.items() if f"{key}.".startswith(within[0])}
            return plan if _sums_alike(module, first, batch, tp) else {}
    return {}


def _sums_alike(module: nn.Module, plan: dict[str, str], batch: tuple[Any, Any], tp: int) -> bool:
    """Whether the outputs that ranks' parts of the rowwise layers return sum up to the unsplit layers' outputs."""
    layers = [name for name, style in plan.items() if style == "rowwise"]

    def returned(part: nn.Module) -> Tensor:
        outs: list[Tensor] = []
        for name in layers:
            layer = part.get_submodule(name)
            layer.register_parameter("bias", None)  # of copies: a bias is added once, not once a rank
            layer.register_forward_hook(lambda _, __, out: outs.append(out.detach().double()))
        with torch.no_grad():
            part(*batch[0], **batch[1])
        return torch.cat([y.reshape(-1) for y in outs])

    parts = []
    for rank in range(tp):
        split = copy.deepcopy(module)
        split_layers(split, plan, Comm(World(rank, tp, rank, tp), mesh(Strategy(tp=tp)), null=True))
        parts.append(returned(split))
    truth = returned(copy.deepcopy(module))
    return float((sum(parts, -truth)).norm()) <= _ALIKE * float(truth.norm())


def _fault(module: nn.Module, plan: Mapping[str, str], batch: tuple[Any, Any], tp: int) -> str:
    """Run the first rank's part of a module, alone and without sending; return why it does not run, or ""."""
    split, alone = copy.deepcopy(module), Comm(World(0, tp, 0, tp), mesh(Strategy(tp=tp)), null=True)
    try:
        split_layers(split, plan, alone)
        with torch.no_grad():
            split(*batch[0], **batch[1])
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def _inputs(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the input of every layer that could sum its outputs, in the order of their calls, and the module's
    outputs; layers that are called several times are left out."""
    inputs: dict[str, Tensor] = {}
    twice: set[str] = set()

    def before(name: str, given: Any) -> None:
        if name in inputs:
            twice.add(name)
        inputs[name] = given[0]

    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: before(name, given))
        for name, layer in module.named_modules()
        if isinstance(layer, Matrix) and getattr(layer, "groups", 1) == 1
    ]
    try:
        outs = [t for t in tensors_in(module(*args, **kwargs)) if t.requires_grad]
    finally:
        for hook in hooks:
            hook.remove()
    return {name: x for name, x in inputs.items() if name not in twice and x.requires_grad}, outs


def _block(module: nn.Module, name: str, x: Tensor, outs: list[Tensor], tp: int, taken: set[str]) -> dict[str, str]:
    """Return the styles of a layer whose outputs are summed, and of its partners; empty if it has none."""
    layer, parent = module.get_submodule(name), name
    outputs = 1 if isinstance(layer, _ConvTransposeNd) else 0
    if not isinstance(layer, Matrix) or layer.weight.shape[1 - outputs] % tp:
        return {}
    dim = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.dim()
    for _ in range(_PARENTS):
        parent = parent.rpartition(".")[0]
        own = f"{parent}." if parent else ""
        near = {
            key: p
            for key, p in module.named_parameters()
            if key.startswith(own) and not key.startswith(f"{name}.") and p.requires_grad and p.dim() and p.numel()
        }
        styles = _partners(module, near, x, dim, tp, taken) if near else {}
        if any(style.startswith("colwise") for style in styles.values()):
            owners = {key: key if key in styles else key.rpartition(".")[0] for key in near}
            split = [near[key] for key, owner in owners.items() if styles.get(owner, "") not in ("", _REPLICATED)]
            return {} if _leaks(outs, layer, split) else styles | {name: "rowwise"}
        if not parent:
            break
    return {}


def _partners(
    module: nn.Module, near: Mapping[str, Tensor], x: Tensor, dim: int, tp: int, taken: set[str]
) -> dict[str, str]:
    """Return the styles of the layers and parameters whose rows each determine one rank's part of x along a dim."""
    draw = torch.Generator().manual_seed(0)
    used: dict[str, list[Tensor]] = {key: [] for key in near}
    for part in x.chunk(tp, dim):
        begin = torch.randn(part.shape, generator=draw, dtype=torch.float64).to(part)
        grads = torch.autograd.grad(part, list(near.values()), begin, retain_graph=True, allow_unused=True)
        for (key, p), g in zip(near.items(), grads, strict=True):
            rows = _rows(module, key)
            some = torch.zeros_like(p, dtype=torch.bool) if g is None else g != 0
            used[key].append(some.transpose(0, rows).reshape(p.shape[rows], -1).any(1).cpu())
    styles: dict[str, str] = {}
    whole: list[str] = []
    for key, ranks in used.items():
        owner = key.rpartition(".")[0]
        if not any(rows.any() for rows in ranks):
            continue  # it is not used before x
        counts = _counts(ranks)
        if counts is None:
            whole.append(key)
            continue
        layer = module.get_submodule(owner)
        entry, style = _entry(layer, owner, key)
        if entry is None or owner in taken:
            return {}
        said = (
            style
            if len(counts) == 1 or style not in ("colwise", "per_channel")
            else f"{style}:{_write_counts(counts)}"
        )
        if styles.setdefault(entry, said) != said:
            return {}
    split = [near[f"{name}.weight"] for name, style in styles.items() if style.startswith("colwise")]
    inside = _inside(whole, near, x, split) if split else []
    # A matrix among them would send to its inputs a part of their gradient from each rank.
    if inside is None or any(isinstance(module.get_submodule(k.rpartition(".")[0]), Matrix) for k in inside):
        return {}
    return styles | dict.fromkeys(inside, _REPLICATED)


def _rows(module: nn.Module, key: str) -> int:
    """The dim of a parameter that holds outputs or channels."""
    owner, _, _ = key.rpartition(".")
    layer, p = module.get_submodule(owner), module.get_parameter(key)
    if isinstance(layer, _ConvTransposeNd) and p.dim() > 1:
        return 1
    if isinstance(layer, Matrix):
        return 0
    return next((i for i, n in enumerate(p.shape) if n > 1), 0)


def _entry(layer: nn.Module, owner: str, key: str) -> tuple[str | None, str]:
    """Return the plan's entry (a layer or the parameter) and style that split a parameter by its rows; None and "" if
    no style does."""
    if isinstance(layer, nn.Linear) or (isinstance(layer, _ConvNd) and layer.groups == 1):
        return owner, "colwise"
    if isinstance(layer, _ConvNd | nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.PReLU):
        return owner, "per_channel"
    if type(layer).__module__.startswith("torch.nn"):
        return None, ""
    return key, "per_channel"


def _counts(ranks: list[Tensor]) -> tuple[int, ...] | None:
    """Return the sizes of the matrices that are packed in a parameter. `ranks`: for each rank, which rows (rows,) it
    uses. None if ranks share rows, or do not use them in order."""
    table = torch.stack(ranks).int()  # (tp, rows)
    if int(table.sum(0).max()) > 1 or not all(rows.any() for rows in ranks):
        return None
    owner = torch.where(table.any(0), table.argmax(0), -1).tolist()
    # Rows that no rank uses (zero by chance, as behind a ReLU) go with the row before.
    last = next((rank for rank in owner if rank >= 0), 0)
    for row, rank in enumerate(owner):
        last = owner[row] = rank if rank >= 0 else last
    starts = [0, *(row for row, (a, b) in enumerate(pairwise(owner), 1) if a != b), len(owner)]
    runs = [(owner[a], b - a) for a, b in pairwise(starts)]
    tp = len(ranks)
    if len(runs) % tp:
        return None
    counts = []
    for at in range(0, len(runs), tp):
        group = runs[at : at + tp]
        if [rank for rank, _ in group] != list(range(tp)) or len({rows for _, rows in group}) > 1:
            return None
        counts.append(group[0][1] * tp)
    return tuple(counts)


def _write_counts(counts: tuple[int, ...]) -> str:
    return str(len(counts)) if len(set(counts)) == 1 else ",".join(map(str, counts))


def _inside(whole: list[str], near: Mapping[str, Tensor], x: Tensor, split: list[Tensor]) -> list[str] | None:
    """Return the parameters among `whole`, which all ranks use, that act on the outputs of the split layers; None if
    x also depends on other tensors in between, of whose gradient each rank would have a part."""
    names, known = {id(near[key]): key for key in whole}, {id(p) for p in near.values()}
    # The inputs of a split layer are whole, and get the sum of all gradients.
    leaves = dict.fromkeys(_leaves_behind([x], split))
    if not known.issuperset(leaves):
        return None
    return [names[leaf] for leaf in leaves if leaf in names]


def _leaves_behind(outs: Sequence[Tensor], stops: Sequence[Tensor]) -> Iterator[int]:
    """Yield the ids of the parameters on which `outs` depend, without operations on `stops` and what is behind
    them."""
    barriers = {id(p) for p in stops}
    stack, met = [t.grad_fn for t in outs], set()
    while stack:
        node = stack.pop()
        if node is None or node in met:
            continue
        met.add(node)
        leaves = [id(leaf) for leaf in _leaves(node)]
        if barriers.isdisjoint(leaves):
            yield from leaves
            stack += [after for after, _ in node.next_functions]


def _leaves(node: Any) -> Iterator[Tensor]:
    """Yield the parameters that an operation of a graph takes, transposed ones too."""
    for after, _ in node.next_functions:
        if hasattr(after, "variable"):
            yield after.variable
        elif after is not None and type(after).__name__ in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
            yield from (further.variable for further, _ in after.next_functions if hasattr(further, "variable"))


def _leaks(outs: list[Tensor], layer: nn.Module, split: Sequence[Tensor]) -> bool:
    """Whether the module's outputs depend on split rows other than through the layer that sums."""
    return not {id(p) for p in split}.isdisjoint(_leaves_behind(outs, [layer.weight]))  # type: ignore[list-item]


def _numbers(module: nn.Module, plan: Mapping[str, str], tp: int) -> dict[str, str]:
    """Return entries for the numbers of heads of split layers."""
    above = [name.rpartition(".")[0] for name, style in plan.items() if style == "rowwise"]
    near = {*above, *(name.rpartition(".")[0] for name in above)}

    def widths(owner: nn.Module) -> set[int]:  # which are no number of heads, though they may be called h
        return {m.in_features for m in owner.modules() if isinstance(m, nn.Linear)}  # a head may have one output

    return {
        f"{name}.{key}" if name else key: "divided"
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if name in near and type(value) is int and key in _HEADS and value % tp == 0 and value not in widths(layer)
    }


_HEADS = (
    *("h", "nh", "nhead", "q_heads", "num_q_heads"),
    *("heads", "n_heads", "num_heads", "n_head", "nheads", "num_attention_heads"),
    *("kv_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads"),
)
"""Common names of numbers of heads."""


def _with_wildcards(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Write `*` for the numbers in names if all names of that form have the same style."""
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    names += [f"{n}.{key}" if n else key for n, part in module.named_modules() for key in vars(part)]
    like: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        like.setdefault(_wildcard(name), []).append(name)
    result: dict[str, str] = {}
    for name, style in plan.items():
        alike = {plan.get(other) for other in like[_wildcard(name)]} == {style}
        result[_wildcard(name) if alike else name] = style
    return result


def _wildcard(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)
