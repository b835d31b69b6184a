"""Near-ties of a router: cases in which a strategy may correctly choose other experts than one process does.

In fp32 the scores of a token's k-th and next best expert may differ by less than two orders of summation do. Then a
strategy may choose the other one, and every later number differs. Such a flip is visible in the expert loads. It
counts as a near-tie if the choices of at least as many tokens of that layer change when their scores change by
`BOUND`; otherwise it is an error like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.nn import routing
from phalanx.spec.model.mechanisms import Experts
from phalanx.training.expert_load import LayerLoad

BOUND = 1e-5
"""Relative change of a score; the bound of fp32 gradients."""
_TRIALS = 16


def tied(p: Tensor, x: Experts, balance: Tensor | None) -> int:
    """Count the tokens, of scores p (tokens, count), that choose other experts when scores change by up to
    `BOUND`."""
    generator = torch.Generator(p.device).manual_seed(0)
    chosen = routing.choose(p, x, balance).sort(-1).values
    differ = torch.zeros(len(p), dtype=torch.bool, device=p.device)
    for _ in range(_TRIALS):
        noise = torch.randint(0, 2, p.shape, generator=generator, device=p.device).mul_(2).sub_(1)
        other = routing.choose(p * (1 + BOUND * noise.to(p.dtype)), x, balance).sort(-1).values
        differ |= (other != chosen).any(-1)
    return int(differ.sum())


def first_flip(
    ours: Sequence[LayerLoad],
    truth: Sequence[LayerLoad],
    seen: Mapping[int, Sequence[tuple[Tensor, Tensor | None]]],
    x: Experts,
) -> str:
    """Describe the near-ties that explain the first layer whose loads differ; "" if all loads agree, or near-ties do
    not explain it. `seen`: (scores, balance biases) of every pass, by block, as one process had them."""
    for a, b in zip(ours, truth, strict=True):
        if a.chosen == b.chosen:
            continue
        moved = sum(abs(m - n) for m, n in zip(a.chosen, b.chosen, strict=True)) // 2
        ties = sum(tied(p, x, balance) for p, balance in seen[b.block])
        if moved > ties:
            return ""
        choices = "1 choice" if moved == 1 else f"{moved} choices"
        return f"{choices} in block {b.block}, where {ties} tokens hang on less than {BOUND:g} of a score"
    return ""
