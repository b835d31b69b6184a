"""Tensor parallelism of any module by a plan of names: which linear layers split their outputs, which their inputs.

    colwise                 rows of W, (out / tp, in), and of b. Backward, the gradient of the input is summed
    rowwise                 columns of W, (out, in / tp). Forward, outputs are summed, then b is added once
    colwise_gather_output   colwise, whose outputs are gathered: a head whose logits all ranks need
    embedding_rowwise       rows of an embedding, (vocab / tp, hidden): each rank looks up its own, outputs are summed
    replicated_with_grad_allreduce
                            parameters that all ranks hold and use on their own heads: their gradients are summed

A plan maps names of layers to these words; `*` matches one number or name (`layers.*.mlp.up_proj`). The plans that
Hugging Face models publish (`base_model_tp_plan` of a config, `_tp_plan` of a model) are of this form. Layers:
Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.comm.communicator import Comm
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.spec import Parameter
from phalanx.spec.strategy.split import ParameterBox

STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce")
_SAME = {"colwise_rep": "colwise_gather_output"}  # its older name


@dataclass(frozen=True)
class SplitNames:
    """Tensors of a module split by a plan, on tp rank `index`: `dims` has the dim of each split tensor, `shapes` the
    shape of this rank's part of every tensor."""

    tp: int
    index: int
    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def unsplit(self) -> bool:
        """Whether no tensor is split."""
        return self.tp == 1

    def box(self, fqn: str) -> ParameterBox:
        """Return this rank's box of the whole tensor."""
        own, dim = self.shapes[fqn], self.dims.get(fqn)
        whole = tuple(n * self.tp if i == dim else n for i, n in enumerate(own))
        offsets = tuple(n * self.index if i == dim else 0 for i, n in enumerate(own))
        return ParameterBox(Parameter(fqn, whole, "column", ""), own, offsets, own, 1 if dim is not None else self.tp)

    def part(self, fqn: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        dim = self.dims.get(fqn)
        return whole if dim is None else whole.chunk(self.tp, dim)[self.index]


def published_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan that a Hugging Face model publishes. Raises InputError for a module without one."""
    plan: dict[str, str] = {}
    for name, part in module.named_modules():
        own = getattr(getattr(part, "config", None), "base_model_tp_plan", None)
        if own and getattr(part, "base_model", None) is part and not plan:
            plan |= {f"{name}.{key}" if name else key: style for key, style in own.items()}
    plan |= dict(getattr(module, "_tp_plan", None) or {})
    tied = _tied(module)
    plan = {key: style for key, style in plan.items() if not any(_matching(key).fullmatch(name) for name in tied)}
    if not plan:
        reason = "has no published plan (base_model_tp_plan)"
        raise InputError("tp_plan", None, f"{type(module).__name__} {reason}", 'give one: {"mlp.up": "colwise", ...}')
    return plan


def split_layers(module: nn.Module, plan: Mapping[str, str], comm: Comm) -> dict[str, int]:
    """Split the layers that a plan names over the tp ranks; return the dim in which each split parameter is split.

    Raises InputError for a name that no layer has, a style that is not known, and sizes that do not divide."""
    tp, index = comm.mesh.size("tp"), comm.mesh.place(comm.world.rank)["tp"]
    layers = dict(module.named_modules())
    parameters, tied = dict(module.named_parameters()), _tied(module)
    dims: dict[str, int] = {}
    # Layers and parameters of each entry of the plan.
    for pattern, word in plan.items():
        style = _SAME.get(word, word)
        if style not in STYLES:
            raise InputError(f"tp_plan.{pattern}", word, "is not a style here", nearest(word, STYLES))
        matching = _matching(pattern)
        names = [name for name in layers if matching.fullmatch(name)]
        alone = [name for name in parameters if matching.fullmatch(name)]
        if not names and not alone:
            layer_names = [name for name in layers if name]  # the module itself has none
            hint = nearest(pattern, layer_names) if layer_names else 'name the module itself: ""'
            raise InputError(f"tp_plan.{pattern}", word, "is the name of no layer", hint)
        # Replicated: only gradients are summed.
        if style == "replicated_with_grad_allreduce":
            replicas = [p for name in names for p in layers[name].parameters()] + [parameters[name] for name in alone]
            for p in replicas:
                p.register_hook(lambda g: _sum(g, comm, "B"))
            continue
        for name in names:
            # Check the layer before it is changed.
            layer = layers[name]
            kind = nn.Embedding if style == "embedding_rowwise" else nn.Linear
            if not isinstance(layer, kind):
                reason = f"splits nn.{kind.__name__}, {name} is {type(layer).__name__}"
                raise InputError(f"tp_plan.{pattern}", word, reason)
            if name in tied:
                remedy = "leave it out: it is then whole on every rank"
                raise InputError(f"tp_plan.{pattern}", word, f"{name} shares its weight with another layer", remedy)
            dim = 1 if style == "rowwise" else 0
            if layer.weight.shape[dim] % tp:
                size = "rows" if kind is nn.Embedding else "inputs" if dim else "outputs"
                reason = f"tp={tp} does not divide the {layer.weight.shape[dim]} {size} of {name}"
                raise InputError("strategy.tp", tp, reason, "use a divisor, or leave it out of the plan")
            # Split it.
            dims[f"{name}.weight"] = dim
            if isinstance(layer, nn.Embedding):
                _look_up(layer, tp, index, comm)
                continue
            _split(layer, dim, tp, index)
            if layer.bias is not None and not dim:
                dims[f"{name}.bias"] = 0
            _communicate(layer, style, comm)
    return dims


def _matching(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _tied(module: nn.Module) -> set[str]:
    """Return the names of layers whose weight another layer has too."""
    owners: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(p), []).append(name.rpartition(".")[0])
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _split(layer: nn.Linear, dim: int, tp: int, index: int) -> None:
    """Keep this rank's part of a layer."""
    layer.weight.data = layer.weight.data.chunk(tp, dim)[index].clone()
    if layer.bias is not None and not dim:
        layer.bias.data = layer.bias.data.chunk(tp)[index].clone()
    layer.out_features, layer.in_features = layer.weight.shape


def _look_up(layer: nn.Embedding, tp: int, index: int, comm: Comm) -> None:
    """Keep this rank's rows of an embedding, and sum the looked-up rows over the ranks."""
    layer.weight.data = layer.weight.data.chunk(tp)[index].clone()
    rows = layer.weight.shape[0]
    low = rows * index
    padding = None if layer.padding_idx is None else layer.padding_idx - low
    padding = padding if padding is not None and 0 <= padding < rows else None

    def summed(ids: Tensor) -> Tensor:
        here = (ids >= low) & (ids < low + rows)
        own = F.embedding(torch.where(here, ids - low, 0), layer.weight, padding)
        y: Tensor = _Summed.apply(own * here.unsqueeze(-1), comm)
        return y

    layer.forward = summed  # type: ignore[method-assign,assignment]


def _communicate(layer: nn.Linear, style: str, comm: Comm) -> None:
    """Make a layer communicate as its style says."""
    if style == "rowwise":

        def summed(x: Tensor) -> Tensor:
            y: Tensor = _Summed.apply(F.linear(x, layer.weight), comm)
            return y if layer.bias is None else y + layer.bias

        layer.forward = summed  # type: ignore[method-assign,assignment]
        return

    def columns(x: Tensor) -> Tensor:
        copied: Tensor = _Copied.apply(x, comm)
        y = F.linear(copied, layer.weight, layer.bias)
        if style == "colwise":
            return y
        gathered: Tensor = _Gathered.apply(y, comm)
        return gathered

    layer.forward = columns  # type: ignore[method-assign,assignment]


def _sum(x: Tensor, comm: Comm, phase: Any) -> Tensor:
    """Return the sum over the tp ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(x, "tp", unit="tp_plan", phase=phase).wait()
    return x


def gathered_over_tp(x: Tensor, dim: int, comm: Comm) -> Tensor:
    """Return the parts of all tp ranks, joined along a dim."""
    tp, index = comm.mesh.size("tp"), comm.mesh.place(comm.world.rank)["tp"]
    parts = torch.zeros((tp, *x.shape), dtype=x.dtype, device=x.device)
    parts[index] = x
    comm.all_reduce(parts, "tp", unit="tp_plan", phase="F").wait()
    return torch.cat(tuple(parts), dim)


class _Copied(torch.autograd.Function):
    """Identity of an input that all ranks have and use differently; backward sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _sum(g, ctx.comm, "B"), None


class _Summed(torch.autograd.Function):
    """Sum of the ranks' terms; backward gives each term the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return _sum(x, comm, "F")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _Gathered(torch.autograd.Function):
    """Concatenation of all ranks' last dims; backward takes the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm, ctx.size = comm, x.shape[-1]
        return gathered_over_tp(x, -1, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        index = ctx.comm.mesh.place(ctx.comm.world.rank)["tp"]
        return g.narrow(-1, index * ctx.size, ctx.size).contiguous(), None
