"""The angles of rotary positions, and their scaling for sequences longer than in pre-training."""

import math

import torch
from torch import Tensor

from phalanx.spec.model.mechanisms import RopeScaling
from phalanx.spec.model.spec import ModelSpec


def rotary_table(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position x θ_i, (max_seq, d / 2) fp64, θ_i = rope_theta^(-2i / d), d =
    spec.rotary_width."""
    # On the CPU whatever the default device: the table needs values even where parameters are on `meta`.
    d = spec.rotary_width
    theta = spec.rope_theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d)
    scale = 1.0
    if spec.rope_scaling is not None:
        theta, scale = _stretch(theta, spec.rope_theta, spec.rope_scaling)
    angles = torch.outer(torch.arange(spec.max_seq, dtype=torch.float64, device="cpu"), theta)
    return angles.cos() * scale, angles.sin() * scale


def _stretch(theta: Tensor, base: float, s: RopeScaling) -> tuple[Tensor, float]:
    """Return the scaled frequencies, (d / 2,), and the factor of cos and sin: slow frequencies are divided by
    `factor`, fast ones stay, those between are blended."""
    if s.kind == "linear":
        return theta / s.factor, 1.0
    assert s.original_max_seq is not None
    if s.kind == "llama3":
        turns = s.original_max_seq * theta / (2 * math.pi)
        stays = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
        return (1 - stays) * theta / s.factor + stays * theta, 1.0
    d = 2 * len(theta)

    def dimension(turns: float) -> float:
        """Return the index whose frequency makes that many turns in the original length (YaRN, equation 17)."""
        assert s.original_max_seq is not None
        return d * math.log(s.original_max_seq / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001  # as in transformers: a step, in place of a division by zero
    slow = ((torch.arange(d // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    scale = s.attention_factor
    if scale is None:
        scale = 0.1 * math.log(s.factor) + 1 if s.factor > 1 else 1.0
    return slow * theta / s.factor + (1 - slow) * theta, scale
