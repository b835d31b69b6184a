"""Attention's core where no kernel of the device's own gives it, against the kernel of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.runtime.autograd.attention_core import backward, forward, plain_backward, plain_forward

BATCH, QUERIES, KEYS, HEAD_DIM = 2, 6, 10, 8
HEADS = [(4, 4), (6, 2), (4, 1)]  # and those of keys
DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]


def drawn(heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g, q, k and v, lying in memory as layers have them: heads beside each other."""
    torch.manual_seed(0)
    sizes = (QUERIES, heads), (QUERIES, heads), (KEYS, kv_heads), (KEYS, kv_heads)
    g, q, k, v = (torch.randn(BATCH, n, h, HEAD_DIM).to(dtype).transpose(1, 2) for n, h in sizes)
    return g, q, k, v


def hiding(*shape: int, dtype: torch.dtype) -> Tensor:
    """A mask that hides some keys of every query, and leaves it the first."""
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    return torch.randn(shape).to(dtype).masked_fill_(hidden, -1e30)


def agree(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], bound: float) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=bound, atol=bound)  # shapes and types too


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("masked", [None, (BATCH, 1), (1, 1), (BATCH, "heads"), ()], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_products_alone_are_as_good_as_the_kernel(
    heads: int, kv_heads: int, causal: bool, masked: tuple[int | str, ...] | None, dtype: torch.dtype, bound: float
) -> None:
    g, q, k, v = drawn(heads, kv_heads, dtype)
    shape = None if masked is None else [heads if n == "heads" else int(n) for n in masked]
    mask = None if shape is None else hiding(*shape, QUERIES, KEYS, dtype=dtype)
    theirs = forward(q, k, v, mask, causal)
    agree(plain_forward(q, k, v, mask, causal), theirs, bound)
    agree(plain_backward(g, q, k, v, *theirs, mask, causal), backward(g, q, k, v, *theirs, mask, causal), bound)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_shares_of_some_keys_sum_to_the_gradient_of_all(heads: int, kv_heads: int) -> None:
    g, q, k, v = drawn(heads, kv_heads, torch.float64)
    whole = plain_forward(q, k, v)
    d_q, d_k, d_v = plain_backward(g, q, k, v, *whole)
    parts = [plain_backward(g, q, k[:, :, at], v[:, :, at], *whole) for at in (slice(4), slice(4, KEYS))]
    first, second = parts
    agree((first[0] + second[0],), (d_q,), 1e-12)
    agree(tuple(torch.cat(pair, 2) for pair in zip(first[1:], second[1:], strict=True)), (d_k, d_v), 1e-12)
