"""nn.MultiheadAttention over the tp ranks: each has its heads of q, k and v, packed in one matrix, and its columns of
the output projection, whose terms are summed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.runtime.any_module.split_names import Cut
from phalanx.runtime.any_module.tensor_comm import CopyInput, SumTerms
from phalanx.runtime.comm.communicator import Comm
from phalanx.spec.errors import InputError


def split_attention(layer: nn.MultiheadAttention, name: str, comm: Comm, entry: tuple[str, str]) -> dict[str, Cut]:
    """Keep this rank's heads; return the cuts of the layer's tensors. Raises InputError before it is changed."""
    tp, index = comm.mesh.size("tp"), comm.mesh.place(comm.world.rank)["tp"]
    if type(layer).forward is not nn.MultiheadAttention.forward:
        raise InputError(*entry, f"{name} is {type(layer).__name__}, which has a forward of its own")
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise InputError(*entry, f"{name} has keys of another width, or a token of its own, which are not split")
    if layer.num_heads % tp:
        raise InputError("strategy.tp", tp, f"does not divide the {layer.num_heads} heads of {name}", "use a divisor")
    d = layer.embed_dim
    cuts = {"in_proj_weight": Cut(0, (d, d, d)), "out_proj.weight": Cut(1)}
    if layer.in_proj_bias is not None:
        cuts["in_proj_bias"] = Cut(0, (d, d, d))
    tensors = dict(layer.named_parameters())
    for key, cut in cuts.items():
        tensors[key].data = cut.part(tensors[key].data, tp, index).clone()
    layer.num_heads //= tp
    # The encoder layer's fused path, which knows nothing of this, asks for it.
    layer._qkv_same_embed_dim = False

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from query (batch, tokens, d) over this rank's heads; sequences first as the layer says."""
        return _attend(layer, comm, query, key, value, key_padding_mask, attn_mask), None

    layer.forward = forward  # type: ignore[method-assign]
    return cuts


def _attend(
    layer: nn.MultiheadAttention,
    comm: Comm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    batched = query.dim() == 3
    turned = batched and not layer.batch_first
    weights = layer.in_proj_weight.chunk(3)
    biases: Any = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    heads = []
    for x, w, b in zip((query, key, value), weights, biases, strict=True):
        copied: Tensor = CopyInput.apply(x if batched else x.unsqueeze(0), comm)
        copied = copied.transpose(0, 1) if turned else copied
        heads.append(F.linear(copied, w, b).unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2))
    q, k, v = heads
    dropped = layer.dropout if layer.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, _scores(mask, padding, layer, comm, q), dropped)
    out = F.linear(out.transpose(1, 2).flatten(2), layer.out_proj.weight)  # a term of (batch, tokens, d)
    y: Tensor = SumTerms.apply(out.transpose(0, 1) if turned else out if batched else out.squeeze(0), comm)
    return y if layer.out_proj.bias is None else y + layer.out_proj.bias


def _scores(
    mask: Tensor | None, padding: Tensor | None, layer: nn.MultiheadAttention, comm: Comm, like: Tensor
) -> Tensor | None:
    """Return the sum of both masks as numbers to add to the scores, (batch, heads, queries, keys). Where a mask is
    boolean, True hides a key."""

    def added(m: Tensor) -> Tensor:
        return torch.zeros_like(m, dtype=like.dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m

    total = None
    if mask is not None:
        total = added(mask)
        if mask.dim() == 3:  # (batch x all heads, to, from)
            index = comm.mesh.place(comm.world.rank)["tp"]
            total = total.unflatten(0, (like.shape[0], -1))
            total = total.narrow(1, index * layer.num_heads, layer.num_heads)
    if padding is not None:
        of_keys = added(padding).view(like.shape[0], 1, 1, -1)
        total = of_keys if total is None else total + of_keys
    return total
