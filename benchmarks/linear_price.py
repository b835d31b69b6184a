from dataclasses import dataclass

from phalanx.serving.simulation.deployment import UNBOUNDED


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
