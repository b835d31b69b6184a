"""Training steps of layers beside transformers' torch implementations, on one thread, interleaved: Mamba-2, the gated
delta net, and attention in a window over a long sequence. Each pair has the same weights and input."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.result import Result
from phalanx.nn.gated_norm import gated_rms_norm
from phalanx.nn.recurrences import chunked
from phalanx.nn.recurrences.delta_rule import DeltaRule
from phalanx.nn.recurrences.ssd import StateSpace
from phalanx.runtime.autograd.windowed_attention import band_mask, window_attention

HIDDEN, SEQ, ROUNDS = 512, 1024, 7
LONG, WINDOW = 8192, 1024
Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""(transformers', ours): functions that run a layer forward."""


def _mamba(x: Tensor) -> Pair:
    import transformers
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    sizes: dict[str, Any] = {
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 64,
        "chunk_size": 128,
    }
    config: Any = transformers.NemotronHConfig(hidden_size=HIDDEN, **sizes, layers_block_type=["linear_attention"])
    layer: Any = NemotronHMamba2Mixer(config, 0).float()
    s, widths = StateSpace(16, 64, 2, 64, 128), [1024, 128, 128]

    def ours() -> Tensor:
        z, *parts = layer.in_proj(x).split([1024, *widths, 16], -1)
        filters, biases = layer.conv1d.weight.squeeze(1).split(widths), layer.conv1d.bias.split(widths)
        y = chunked.scan(s, parts, filters, biases, (layer.dt_bias, layer.A_log, layer.D))
        out: Tensor = layer.out_proj(gated_rms_norm(y, z, layer.norm.weight, 2, 1e-5, "before"))
        return out

    return lambda: layer(x), ours


def _delta(x: Tensor) -> Pair:
    import transformers
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    widths: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    config: Any = transformers.Qwen3NextConfig(hidden_size=HIDDEN, **sizes, **widths, num_hidden_layers=4)
    layer: Any = Qwen3NextGatedDeltaNet(config, 0).float()
    s = DeltaRule(4, 8, 64, 64, 64)

    def ours() -> Tensor:
        joined = layer.in_proj_qkvz(x), layer.in_proj_ba(x)
        q, k, v, z, beta, alpha = layer.fix_query_key_value_ordering(*joined)
        parts = (q.flatten(2), k.flatten(2), v.flatten(2), beta, alpha)
        filters = layer.conv1d.weight.squeeze(1).split([256, 256, 512])
        y = chunked.scan(s, parts, filters, (), (layer.dt_bias, layer.A_log))
        out: Tensor = layer.out_proj(gated_rms_norm(y, z.flatten(2), layer.norm.weight, 8, 1e-6, "after"))
        return out

    return lambda: layer(x), ours


def _window() -> Pair:
    """The core alone: transformers gives torch's attention a mask of all pairs (masking_utils.py)."""
    q, k, v = (torch.randn(1, LONG, 4, 64, requires_grad=True) for _ in range(3))
    at = torch.arange(LONG)
    distance = at.unsqueeze(-1) - at
    everything, band = (distance >= 0).logical_and_(distance < WINDOW), band_mask(WINDOW, q)

    def theirs() -> Tensor:
        queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=everything)

    return theirs, lambda: window_attention(q, k, v, band, WINDOW)


def bench() -> Iterator[Result]:
    """Compare seconds of a forward and a backward pass, by the median of rounds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(1, SEQ, HIDDEN, requires_grad=True)
    cases = {"Mamba-2": _mamba(x), "gated delta net": _delta(x), f"window of {WINDOW:,} in {LONG:,}": _window()}
    for name, pair in cases.items():
        seconds: list[list[float]] = [[], []]
        for i in range(2 * (ROUNDS + 1)):
            start = time.perf_counter()
            pair[i % 2]().square().sum().backward()
            if i > 1:
                seconds[i % 2].append(time.perf_counter() - start)
        theirs, ours = seconds
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        shown = f"{ratio:.2f} ({median(ours) * 1e3:.0f} and {median(theirs) * 1e3:.0f} ms)"
        yield Result(f"step of {name}: seconds / transformers'", shown, "1", ratio <= 1)
