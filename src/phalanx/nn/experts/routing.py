"""Routing as functions of the router's logits: the experts of each token and their weights.

    scores      p = softmax(z) or sigmoid(z), (tokens, count), of logits z = x Wᵀ
    choose      the top_k best experts of each token, from its best groups if there are groups; by p + bias if there
                is a balance bias (Wang et al. 2024), which does not enter the weight
    fits        whether a choice is among the first `most` of its expert and sequence
    take        the `most` best tokens of a sequence for each expert (Zhou et al. 2022, "expert choice"), of
                equal ones the first
    weights     p of the chosen experts, divided by their sum if `normalized`, times `scale`; (tokens, top_k) where
                tokens choose, (tokens, count) where experts do

With p' = p / Σ p, f the share of a sequence's choices that an expert got, and a mean over the tokens of the batch:

    balance loss   balance_loss x count x mean(Σ_e f_e p'_e)          (Fedus et al. 2021; per sequence, DeepSeek-V2)
    z loss         z_loss x mean((log Σ_e exp z_e)²)                  (Zoph et al. 2022)

Both only bend gradients: they are added in the backward pass of the weights.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.nn.functional import accumulate_dtype
from phalanx.schedule.layers.routing import expert_capacity
from phalanx.spec.model.mechanisms import Experts


def scores(logits: Tensor, x: Experts) -> Tensor:
    """Return the scores p of logits (tokens, count), in fp32 (fp64 in fp64 runs)."""
    z = logits.to(accumulate_dtype(logits.dtype))
    return z.softmax(-1) if x.score == "softmax" else z.sigmoid()


def choose(p: Tensor, x: Experts, balance: Tensor | None) -> Tensor:
    """Return the experts that tokens choose, (tokens, top_k), from scores p (tokens, count)."""
    by = p if balance is None else p + balance
    if x.groups > 1:
        grouped = by.unflatten(-1, (x.groups, -1))
        best = grouped.amax(-1) if x.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
        out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best.topk(x.top_groups, -1).indices, False)
        by = grouped.masked_fill(out.unsqueeze(-1), -math.inf).flatten(-2)
    return by.topk(x.top_k, -1).indices


def within_capacity(experts: Tensor, count: int, most: int) -> Tensor:
    """Return which choices, of experts (batch, seq, top_k), are among the first `most` of their expert and sequence:
    bool, of the same shape."""
    batch, *_ = experts.shape
    of = torch.arange(batch, device=experts.device).view(-1, 1, 1) * count
    key = (experts + of).flatten()
    order = key.argsort(stable=True)
    held = torch.zeros(batch * count, dtype=torch.int64, device=key.device).index_add_(0, key, torch.ones_like(key))
    begins = held.cumsum(0) - held
    place = torch.empty_like(key)
    place[order] = torch.arange(len(key), device=key.device) - begins[key[order]]
    return place.view(experts.shape) < most


def take_tokens(p: Tensor, most: int) -> Tensor:
    """Return which tokens each expert takes, the `most` best of each sequence by scores p (batch, seq, count): bool,
    of the same shape.

    Tokens with the same history in their documents, such as the same first token of two, have the same score, and
    every layout rounds it differently. So scores that differ from the last one taken by less than eps^(3/4) are equal
    to it, and the first such tokens are taken.
    """
    last = p.topk(most, 1).values[:, -1:]  # (batch, 1, count)
    tie: float = torch.finfo(p.dtype).eps ** 0.75
    above = p > last * (1 + tie)
    equal = (p >= last * (1 - tie)).logical_and_(above.logical_not())
    room = most - above.sum(1, keepdim=True)
    return equal.logical_and_(equal.cumsum(1, dtype=torch.int32) <= room).logical_or_(above)


@dataclass
class Losses:
    """Auxiliary losses of a layer, which add to the gradients of its logits. `even`: balance_loss x count x f for
    each token's sequence, (tokens, count); `z`: the factor of the z loss; `seed`: the gradient of one token's
    loss."""

    even: Tensor | None = None
    z: float = 0.0
    seed: float = 1.0


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, chosen: Tensor | None, x: Experts, losses: Losses) -> Tensor:
        ctx.x, ctx.z, ctx.seed, ctx.dtype = x, losses.z, losses.seed, logits.dtype
        lse = None
        if losses.z:
            lse = logits.to(p.dtype).logsumexp(-1, keepdim=True)
        ctx.save_for_backward(p, chosen, lse, losses.even)
        w = p if chosen is None else p.gather(-1, chosen)
        if x.normalized:
            w = w / w.sum(-1, keepdim=True).add_(1e-20)
        return w * x.scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        p, chosen, lse, even = ctx.saved_tensors
        x: Experts = ctx.x
        d_w = g * x.scale
        if x.normalized:  # w = p / Σ p over those chosen
            own = p.gather(-1, chosen)
            total = own.sum(-1, keepdim=True).add_(1e-20)
            d_w = (d_w - (d_w * own).sum(-1, keepdim=True).div_(total)).div_(total)
        d_p = d_w if chosen is None else torch.zeros_like(p).scatter_(-1, chosen, d_w)
        if even is not None and x.score == "softmax":
            d_p = d_p.add(even, alpha=ctx.seed)
        elif even is not None:  # of p / Σ p
            total = p.sum(-1, keepdim=True)
            mean = (even * p).sum(-1, keepdim=True).div_(total)
            d_p = d_p.add((even - mean).div_(total), alpha=ctx.seed)
        d_z = p * (d_p - (d_p * p).sum(-1, keepdim=True) if x.score == "softmax" else d_p * (1 - p))
        if lse is not None:
            soft = p if x.score == "softmax" else (p.log() - (-p).log1p()).sub_(lse).exp_()
            d_z = d_z.addcmul_(soft, lse, value=2 * ctx.z * ctx.seed)
        return d_z.to(ctx.dtype), None, None, None, None


def weights(logits: Tensor, p: Tensor, chosen: Tensor | None, x: Experts, losses: Losses) -> Tensor:
    """Return the weights of the chosen experts, in the type of the scores p; backward adds the gradients of `losses`.
    Keeps p, the choices, and for the z loss a number per token."""
    return _Weights.apply(logits, p, chosen, x, losses)  # type: ignore[no-any-return]


def losses(logits: Tensor, p: Tensor, terms: Losses) -> Tensor:
    """Return (balance loss, z loss) summed over tokens: (2,), fp64."""
    sums = torch.zeros(2, dtype=torch.float64, device=p.device)
    if terms.even is not None:
        sums[0] = (terms.even * (p / p.sum(-1, keepdim=True))).sum()
    if terms.z:
        sums[1] = terms.z * logits.to(p.dtype).logsumexp(-1).square_().sum()
    return sums


def even_token_choices(tokens: int, x: Experts, device: torch.device) -> Tensor:
    """Return balanced choices, (tokens, top_k): token t gets t top_k, t top_k + 1, ... modulo the number of
    experts."""
    return torch.arange(tokens * x.top_k, device=device).remainder_(x.count).view(tokens, x.top_k)


def even_expert_choices(tokens: int, x: Experts, device: torch.device) -> Tensor:
    """Return balanced choices by experts, (tokens, count) bool: each expert takes equally many tokens, starting where
    the previous one stopped."""
    each = expert_capacity(x, tokens) or 0
    taken = torch.arange(x.count * each, device=device).remainder_(tokens).view(x.count, each)
    return torch.zeros(x.count, tokens, dtype=torch.bool, device=device).scatter_(1, taken, True).t().contiguous()
