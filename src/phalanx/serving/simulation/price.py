"""The price of a step as the simulation reads it: seconds of one step of an engine, by the contents of its batch.

    step(prompt tokens, attended pairs, sequences, context)

`prompt tokens` are computed in this step, each attending to those before it: `pairs` counts (query, key) of them all,
n (past + (n + 1) / 2) for n tokens of a prompt with `past` in the cache. `sequences` each produce a token from
`context` cached tokens in sum. Between two changes of the batch only the context grows, by a token per sequence and
step; where the price is a line in the context, a run of such steps needs no loop:

    sum over i < k of (t + q i) = k t + q k (k - 1) / 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

UNBOUNDED = 1 << 60


class StepPrice(Protocol):
    """Seconds of a step of one worker: all GPUs that hold one copy of the model."""

    def decode(self, sequences: int, context: int) -> tuple[float, float, int]:
        """Return (seconds of a step that decodes only, seconds per further token of context, the context up to which
        that line holds)."""
        ...

    def mixed(self, tokens: int, pairs: float, sequences: int, context: int, uneven: float = 1.0) -> float:
        """Return the seconds of a step that computes `tokens` of prompts along with `sequences` that decode, if any.

        `uneven`: tokens of prompts in the busiest group that attends apart, over their mean over the groups."""
        ...


@dataclass(frozen=True)
class LinearPrice:
    """A price that is linear in everything, for results that are known in closed form."""

    step_s: float
    """Seconds of any step."""
    token_s: float = 0.0
    """Seconds per token of a prompt."""
    pair_s: float = 0.0
    """Seconds per query and key of a prompt."""
    sequence_s: float = 0.0
    """Seconds per sequence that decodes."""
    context_s: float = 0.0
    """Seconds per cached token read."""

    def decode(self, sequences: int, context: int) -> tuple[float, float, int]:
        """Return seconds, slope and end of a decoding step's line."""
        return self.step_s + self.sequence_s * sequences + self.context_s * context, self.context_s, UNBOUNDED

    def mixed(self, tokens: int, pairs: float, sequences: int, context: int, uneven: float = 1.0) -> float:
        """Return the seconds of a step with prompts."""
        decoding = self.sequence_s * sequences + self.context_s * context
        return self.step_s + (self.token_s * tokens + self.pair_s * pairs) * uneven + decoding
