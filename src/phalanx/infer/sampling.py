"""Which token follows: of the `top_k` most likely ones, the fewest that have probability `top_p` together (Holtzman
et al. 2020, "nucleus sampling"), one is drawn by softmax(logits / temperature).

A draw takes the number u in [0, 1) determined by (seed, request, place), and returns the first token, in vocabulary
order, at which the cumulative probability exceeds u. So it depends neither on the split nor on which requests share a
step. All in fp64 on the host.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError
from phalanx.spec.ranges import require_seed


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: number of `tokens` (None: 80, or as many as fit), `temperature` (0: greedy), `top_k` (0:
    all tokens), `top_p` (1: all), `seed`; `past_end`: whether it goes on after the model's end-of-text token."""

    tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    top_p: float = 1.0
    past_end: bool = False

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise InputError("tokens", self.tokens, "must be at least 1")
        if self.top_k < 0:
            raise InputError("top_k", self.top_k, "must not be negative", "0 draws from all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", self.top_p, "must be above 0, and 1 at most", "1 draws from all tokens")
        if not (self.temperature == 0 or 1e-3 <= self.temperature <= 1e3):
            raise InputError("temperature", self.temperature, "must be 0 (greedy) or between 0.001 and 1000")
        require_seed(self.seed)


def choose(logits: npt.NDArray[np.float64], sampling: Sampling, request: int, place: int) -> int:
    """Return the token that follows, from its logits (vocab,). `place`: number of tokens of the request before it.
    Raises InputError if the largest logit is not finite, as with damaged weights or after a diverged training."""
    if not np.isfinite(logits.max()):  # -inf marks a token that never follows
        raise InputError(
            "weights", None, "give a logit that is not finite", "use a checkpoint from before the loss diverged"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    p = np.exp(scaled - scaled.max())
    if 0 < sampling.top_k < len(p):
        p[p < np.partition(p, -sampling.top_k)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]  # of the tokens that are likelier
        p[order[before >= sampling.top_p * p.sum()]] = 0
    sums = np.cumsum(p)
    return int(np.searchsorted(sums, uniform(sampling.seed, request, place) * sums[-1], side="right"))


def uniform(seed: int, request: int, place: int) -> float:
    """Return the draw for a place of a request, in [0, 1) (Salmon et al. 2011, Philox: a function of its counter)."""
    bits = np.random.Philox(key=seed, counter=[place, request, 0, 0])
    return float(np.random.Generator(bits).random())
