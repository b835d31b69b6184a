"""Attention in bands of a window equals attention under a mask of all pairs, which long sequences never have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.toy_model import model
from torch import Tensor

from phalanx.nn.decoder import attention_mask
from phalanx.nn.init import create
from phalanx.runtime.autograd.windowed_attention import band_mask, window_attention
from phalanx.schedule.layers import windows


@pytest.mark.parametrize(
    ("seq", "heads", "kv_heads", "window"), [(600, 4, 2, 50), (515, 4, 4, 300), (300, 2, 1, 5), (128, 2, 2, 1)]
)
def test_bands_are_attention_under_the_whole_mask(seq: int, heads: int, kv_heads: int, window: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, seq, heads, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, seq, kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = window_attention(q, k, v, band_mask(window, q), window)
    turned: list[Tensor] = [t.transpose(1, 2) for t in (q, k, v)]
    theirs = F.scaled_dot_product_attention(*turned, attn_mask=attention_mask(q, window), enable_gqa=True).transpose(
        1, 2
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), g), torch.autograd.grad(theirs, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_decoder_is_the_same_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model(family="mistral", window=40, max_seq=700)
    tokens = torch.randint(spec.vocab, (2, 700), generator=torch.Generator().manual_seed(0))
    found = []
    for start in (10**6, 1):
        monkeypatch.setattr(windows, "FROM", start)
        torch.manual_seed(0)
        decoder = create(spec, torch.float64, torch.device("cpu"))
        for p in decoder.parameters():
            torch.nn.init.normal_(p, std=0.1)
        decoder(tokens).square().sum().backward()
        found.append([p.grad for p in decoder.parameters()])
        (mask,) = decoder._kept.values()
        assert mask.numel() == windows.mask_elements(700, 40)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_mask_does_not_grow_with_the_square_of_a_sequence() -> None:
    """32,768 tokens had a mask of 2 GiB in bf16; now it is the same for any length."""
    assert 2 * windows.mask_elements(2048, 1024) == 2 * 2048**2
    assert windows.mask_elements(32_768, 1024) == windows.mask_elements(131_072, 1024) < 2**19
    seq, window = 32_768, 1024
    assert windows.pairs(seq, window) < 1.3 * seq * window
