"""Tensor parallelism of any module by a plan of names: which layers split their outputs, which their inputs.

    colwise                 rows of W, (out / tp, in), and of b. Backward, the gradient of the input is summed
    colwise:2, colwise:64,16,16
                            the same for a matrix that packs several: their number, or the rows of each
                            (gate and up; q, k and v). Each rank has its rows of every one, in their order
    rowwise                 columns of W, (out, in / tp). Forward, outputs are summed, then b is added once
    rowwise_inside          rowwise, whose outputs each rank uses on its own channels: their gradients are summed too
    colwise_inside          colwise of what a rowwise_inside returned, which sums the gradient
    colwise_gather_output   colwise, whose outputs are gathered: a head whose logits all ranks need
    embedding_rowwise       rows of an embedding, (vocab / tp, hidden): each rank looks up its own, outputs are summed
    per_channel             what treats every channel by itself, between a colwise and a rowwise layer: grouped and
                            depthwise convolutions, group and batch norms, a parameter. Takes counts as colwise does
    attention_heads         nn.MultiheadAttention: each rank has its heads, outputs are summed
    divided                 a number in the module, such as its heads, of which each rank has a tp-th
    local_width             a block that takes sizes from the width of its input: views of what is split get a tp-th
    replicated_with_grad_allreduce
                            parameters that all ranks hold and use on their own heads: their gradients are summed

Linear layers and convolutions, transposed ones too, are split alike: channels are the outputs and inputs. A plan maps
names of layers, parameters or numbers to these words; `*` matches one number or name (`layers.*.mlp.up_proj`). The
plans that Hugging Face models publish (`base_model_tp_plan` of a config, `_tp_plan` of a model) are of this form;
proposal.py makes one of a module and a batch. Layers: Shoeybi et al. 2019, section 3.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode

from phalanx.runtime.any_module.split_attention import split_attention
from phalanx.runtime.any_module.split_names import Cut
from phalanx.runtime.any_module.tensor_comm import CopyInput, GatherParts, SumTerms, sum_over_tp
from phalanx.runtime.comm.communicator import Comm
from phalanx.spec.errors import InputError, nearest

STYLES = (
    "colwise",
    "rowwise",
    "rowwise_inside",
    "colwise_inside",
    "colwise_gather_output",
    "embedding_rowwise",
    "per_channel",
    "attention_heads",
    "divided",
    "local_width",
    "replicated_with_grad_allreduce",
)
_SAME = {"colwise_rep": "colwise_gather_output"}  # its older name
_PACKED = ("colwise", "colwise_inside", "per_channel")
_COLUMNS = ("colwise", "colwise_inside", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_inside")
Matrix = nn.Linear | _ConvNd
"""Layers with outputs and inputs."""


def published_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan that a Hugging Face model publishes. Raises InputError for a module without one."""
    plan: dict[str, str] = {}
    for name, part in module.named_modules():
        own = getattr(getattr(part, "config", None), "base_model_tp_plan", None)
        if own and getattr(part, "base_model", None) is part and not plan:
            plan |= {f"{name}.{key}" if name else key: style for key, style in own.items()}
    plan |= dict(getattr(module, "_tp_plan", None) or {})
    tied = tied_layers(module)
    plan = {key: style for key, style in plan.items() if not any(_matching(key).fullmatch(name) for name in tied)}
    if not plan:
        reason = "has no published plan (base_model_tp_plan)"
        remedy = 'give one: {"mlp.up": "colwise", ...}; phalanx.propose_tp_plan(module, batch, tp) proposes one'
        raise InputError("tp_plan", None, f"{type(module).__name__} {reason}", remedy)
    return plan


def split_layers(module: nn.Module, plan: Mapping[str, str], comm: Comm) -> dict[str, Cut]:
    """Split the layers that a plan names over the tp ranks; return the cut of each split tensor. Raises InputError
    for a name that nothing has, a style that is not known, and sizes that do not divide."""
    layers = dict(module.named_modules())
    parameters, tied = dict(module.named_parameters()), tied_layers(module)
    cuts: dict[str, Cut] = {}
    blocks: list[nn.Module] = []
    # Layers, parameters and numbers of each entry of the plan.
    for pattern, word in plan.items():
        style, counts = _style(pattern, word)
        matching = _matching(pattern)
        names = [name for name in layers if matching.fullmatch(name)]
        if style == "local_width":
            blocks += [layers[name] for name in names]
        alone = [name for name in parameters if matching.fullmatch(name)]
        if style == "divided":
            _divide(pattern, layers, matching, comm.mesh.size("tp"))
            continue
        if not names and not alone:
            layer_names = [name for name in layers if name]  # the module itself has none
            hint = nearest(pattern, layer_names) if layer_names else 'name the module itself: ""'
            raise InputError(f"tp_plan.{pattern}", word, "is the name of no layer", hint)
        # Replicated: only gradients are summed.
        if style == "replicated_with_grad_allreduce":
            replicas = [p for name in names for p in layers[name].parameters()] + [parameters[name] for name in alone]
            for p in replicas:
                p.register_hook(lambda g: sum_over_tp(g, comm, "B"))
            continue
        for name in names if style != "local_width" else ():
            if name in tied:
                remedy = "leave it out: it is then whole on every rank"
                raise InputError(f"tp_plan.{pattern}", word, f"{name} shares its weight with another layer", remedy)
            entry = f"tp_plan.{pattern}", word
            own = _split_layer(layers[name], name, style, counts, comm, entry)
            cuts |= {f"{name}.{key}" if name else key: cut for key, cut in own.items()}
        for name in alone if style == "per_channel" else ():
            cuts[name] = _keep_part(parameters, name, None, counts, comm)
    for block in blocks:  # their numbers are divided
        follow_local_width(block, comm.mesh.size("tp"))
    return cuts


def _style(pattern: str, word: str) -> tuple[str, tuple[int, ...]]:
    """Return (a style, the counts after its colon) from the word of a plan. Raises InputError."""
    style, _, said = word.partition(":") if isinstance(word, str) else (word, "", "")
    style = _SAME.get(style, style)
    if style not in STYLES:
        raise InputError(f"tp_plan.{pattern}", word, "is not a style here", nearest(str(word), STYLES))
    if (not said and word == style) or word in _SAME:
        return style, ()
    counts = [int(n) if n.strip().isdecimal() else 0 for n in said.split(",")]
    if style not in _PACKED or min(counts) < 1:
        reason = "has counts that are none" if style in _PACKED else "takes no counts: only matrices of several do"
        raise InputError(f"tp_plan.{pattern}", word, reason, "for example colwise:2, or colwise:64,16,16")
    return style, tuple(counts)


def _split_layer(
    layer: nn.Module, name: str, style: str, counts: tuple[int, ...], comm: Comm, entry: tuple[str, str]
) -> dict[str, Cut]:
    """Split a layer; return the cuts of its tensors by their names in it. Raises InputError before it is changed."""
    kinds = _KINDS[style]
    grouped = isinstance(layer, _ConvNd) and layer.groups > 1
    if not isinstance(layer, kinds) or grouped != (style == "per_channel" and isinstance(layer, _ConvNd)):
        of = "a grouped convolution" if grouped else type(layer).__name__
        raise InputError(*entry, f"splits {_KIND_WORDS[style]}, {name} is {of}")
    if isinstance(layer, Matrix) and not any(type(layer).forward is kind.forward for kind in _OWN_FORWARD):
        raise InputError(*entry, f"{name} is {type(layer).__name__}, which has a forward of its own")
    if isinstance(layer, nn.MultiheadAttention):
        return split_attention(layer, name, comm, entry)
    tensors = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    # Transposed convolutions have (in, out, ...).
    outputs = 1 if isinstance(layer, _ConvTransposeNd) else 0
    dim = 1 - outputs if style in _ROWS else outputs
    if counts and outputs:
        raise InputError(*entry, f"{name} is transposed: its outputs are packed in no order that can be kept")
    tp = comm.mesh.size("tp")
    if (isinstance(layer, nn.GroupNorm) and layer.num_groups % tp) or (grouped and layer.groups % tp):
        groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else layer.groups
        raise InputError("strategy.tp", tp, f"does not divide the {groups} groups of {name}", "use a divisor")
    cuts = {}
    for key, t in tensors.items():
        if t is not None and t.dim() and not (key == "bias" and style in (*_ROWS, "embedding_rowwise")):
            cuts[key] = _keep_part(tensors, key, dim if t.dim() > 1 else 0, counts, comm, name, style)
    for attribute in _SIZES:
        if hasattr(layer, attribute) and _follows(attribute, style, grouped):
            setattr(layer, attribute, getattr(layer, attribute) // tp)
    if isinstance(layer, nn.Embedding):
        _look_up(layer, comm)
    elif isinstance(layer, Matrix) and style != "per_channel":
        _communicate(layer, style, comm)
    return cuts


_KINDS: dict[str, Any] = {
    "colwise": Matrix,
    "rowwise": Matrix,
    "rowwise_inside": Matrix,
    "colwise_inside": Matrix,
    "colwise_gather_output": Matrix,
    "embedding_rowwise": nn.Embedding,
    "per_channel": _ConvNd | nn.GroupNorm | _NormBase | nn.PReLU,
    "attention_heads": nn.MultiheadAttention,
}
_KIND_WORDS = {style: "nn.Linear and convolutions" for style in (*_COLUMNS, *_ROWS)} | {
    "embedding_rowwise": "nn.Embedding",
    "per_channel": "grouped convolutions, norms of groups and batches, and parameters",
    "attention_heads": "nn.MultiheadAttention",
}
_OWN_FORWARD: tuple[Any, ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_SIZES = {
    "in_features": _ROWS,
    "in_channels": (*_ROWS, "per_channel"),
    "out_features": _COLUMNS,
    "out_channels": (*_COLUMNS, "per_channel"),
    "groups": ("per_channel",),
    "num_groups": ("per_channel",),
    "num_channels": ("per_channel",),
    "num_features": ("per_channel",),
}
"""Numbers of a layer that follow its part, and the styles under which they do."""


def _follows(attribute: str, style: str, grouped: bool) -> bool:
    return style in _SIZES[attribute] and (attribute != "groups" or grouped)


def _keep_part(
    tensors: Mapping[str, Any],
    key: str,
    dim: int | None,
    counts: tuple[int, ...],
    comm: Comm,
    layer: str = "",
    style: str = "per_channel",
) -> Cut:
    """Keep this rank's part of a tensor along `dim`, by default its first dim with several elements; return the cut.
    Raises InputError for sizes that tp does not divide."""
    tensor, tp = tensors[key], comm.mesh.size("tp")
    if dim is None:
        dim = next((i for i, n in enumerate(tensor.shape) if n > 1), 0)
    size, name = tensor.shape[dim], layer or key
    what = "rows" if style == "embedding_rowwise" else "inputs" if style in _ROWS else "outputs" if layer else ""
    counts = (size // counts[0],) * counts[0] if len(counts) == 1 and size % counts[0] == 0 else counts
    if counts and sum(counts) != size:
        said = " + ".join(map(str, counts)) if len(counts) > 1 else f"{counts[0]} equal parts"
        raise InputError("tp_plan", name, f"has {size} {what or 'elements'}, and not {said}")
    for n in counts or (size,):
        if n % tp:
            packed = f" (of {size})" if counts else ""
            reason = f"tp={tp} does not divide the {n} {what or 'elements'}{packed} of {name}"
            raise InputError("strategy.tp", tp, reason, "use a divisor, or leave it out of the plan")
    cut = Cut(dim, counts if dim == 0 else ())
    tensor.data = cut.part(tensor.data, tp, comm.mesh.place(comm.world.rank)["tp"]).clone()
    return cut


def _divide(pattern: str, layers: Mapping[str, nn.Module], matching: re.Pattern[str], tp: int) -> None:
    """Divide the numbers that an entry names. Raises InputError."""
    divided = False
    for name, layer in layers.items():
        for attribute, value in list(vars(layer).items()):
            if matching.fullmatch(f"{name}.{attribute}" if name else attribute) and type(value) is int:
                divided = True
                if value % tp:
                    reason = f"tp={tp} does not divide {name}.{attribute} = {value}"
                    raise InputError("strategy.tp", tp, reason, "use a divisor")
                setattr(layer, attribute, value // tp)
    if not divided:
        numbers = [f"{n}.{a}" if n else a for n, m in layers.items() for a, v in vars(m).items() if type(v) is int]
        raise InputError(f"tp_plan.{pattern}", "divided", "is the name of no number", nearest(pattern, numbers))


def _matching(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def tied_layers(module: nn.Module) -> set[str]:
    """Return the names of layers that share a weight with another layer."""
    owners: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(p), []).append(name.rpartition(".")[0])
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _look_up(layer: nn.Embedding, comm: Comm) -> None:
    """Make an embedding that has this rank's rows look up these alone, and sum the results over the ranks."""
    rows = layer.weight.shape[0]
    low = rows * comm.mesh.place(comm.world.rank)["tp"]
    padding = None if layer.padding_idx is None else layer.padding_idx - low
    padding = padding if padding is not None and 0 <= padding < rows else None

    def everywhere(ids: Tensor) -> Tensor:
        here = (ids >= low) & (ids < low + rows)
        own = F.embedding(torch.where(here, ids - low, 0), layer.weight, padding)
        y: Tensor = SumTerms.apply(own * here.unsqueeze(-1), comm)
        return y

    layer.forward = everywhere  # type: ignore[method-assign,assignment]


def _communicate(layer: Matrix, style: str, comm: Comm) -> None:
    """Make a layer communicate as its style says."""
    spatial = 0 if isinstance(layer, nn.Linear) else layer.weight.dim() - 2
    inner: Callable[..., Tensor] = layer.forward

    def rowwise(x: Tensor) -> Tensor:
        y: Tensor = SumTerms.apply(_product(layer, x), comm)
        y = y if layer.bias is None else y + layer.bias.view(-1, *(1,) * spatial)
        return CopyInput.apply(y, comm) if style == "rowwise_inside" else y

    def colwise(x: Tensor, *args: Any) -> Tensor:
        y = inner(x if style == "colwise_inside" else CopyInput.apply(x, comm), *args)
        if style != "colwise_gather_output":
            return y
        gathered: Tensor = GatherParts.apply(y, comm, -1 - spatial)
        return gathered

    layer.forward = rowwise if style in _ROWS else colwise  # type: ignore[method-assign]


def _product(layer: Matrix, x: Tensor) -> Tensor:
    """Return the output of a layer, without its bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, layer.weight)
    if isinstance(layer, _ConvTransposeNd):
        product = getattr(F, f"conv_transpose{layer.weight.dim() - 2}d")
        how = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        return product(x, layer.weight, None, *how)  # type: ignore[no-any-return]
    return layer._conv_forward(x, layer.weight, None)


_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}


def follow_local_width(block: nn.Module, tp: int) -> None:
    """Make the views in a block's forward pass, whose numbers are divided already, have a tp-th of the width.

    Attention that takes sizes from its input, of which a rank has everything, is written in nanoGPT and timm as

        b, t, width = x.shape
        q = q.view(b, t, self.heads, width // self.heads)
        y = y.transpose(1, 2).reshape(b, t, width)

    With its number of heads divided it asks for tp times the elements that a rank has; such a view gets a tp-th of
    the last of its sizes that the width gives. Every other call is left alone.
    """
    inner, numbers = block.forward, [n for n in vars(block).values() if type(n) is int and n > 0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > 1]
        widths = {t.shape[-1] for t in given} | {t.shape[1] for t in given if t.dim() > 3}
        with _LocalWidth(tp, widths | {width // n for width in widths for n in numbers}):
            return inner(*args, **kwargs)

    block.forward = forward


class _LocalWidth(TorchFunctionMode):
    """Divides one of `sizes` by tp where a view asks for tp times the elements of a tensor."""

    def __init__(self, tp: int, sizes: set[int]) -> None:
        super().__init__()
        self._tp, self._sizes = tp, sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS and not kwargs:
            x, *size = args
            args = x, *self._local(x, size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size, size)
        return func(*args, **(kwargs or {}))

    def _local(self, x: Tensor, size: Sequence[Any], said: Sequence[Any]) -> Sequence[Any]:
        if not all(isinstance(n, int) and n > 0 for n in size) or math.prod(size) != x.numel() * self._tp:
            return said
        places = [i for i, n in enumerate(size) if n in self._sizes and n % self._tp == 0]
        return [[n // self._tp if i == places[-1] else n for i, n in enumerate(size)]] if places else said
