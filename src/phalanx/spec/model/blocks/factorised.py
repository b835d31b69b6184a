"""Multi-matrix factorisation attention (Hu et al. 2024), in Step 3: queries from a latent, one head of wide keys."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer, latent_norm
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import Attend, Dim, Norm, Output, Rotary, added, linear, whole
from phalanx.spec.model.mechanisms import Width
from phalanx.spec.ranges import Range


@dataclass(frozen=True)
class FactorisedSizes(MixerSizes):
    """Attention with queries from a latent. Sizes are counts of elements."""

    heads: Heads
    """Query heads."""
    head_dim: Annotated[int, Range(2, 10**5)]
    """Width of a head, all of it rotated by position."""
    q_rank: Width
    """Width of the latent that queries come from."""
    kv_heads: Heads = 1
    """Key and value heads, a divisor of `heads`."""
    divided: ClassVar = ("heads", "kv_heads")
    kind: Literal["factorised"] = "factorised"
    """The mechanism."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise InputError(f"{self.path}.kv_heads", self.kv_heads, f"does not divide heads = {self.heads}")


def factorised(hidden: int, sizes: FactorisedSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return attention with queries from a latent (vLLM, model_executor/models/step3_text.py, Step3TextAttention)."""
    of, dim, h, rank = f"mixers.{sizes.name}.heads", sizes.head_dim, whole(hidden), whole(sizes.q_rank)
    q, kv = Dim(sizes.heads, dim, "tp", of=of), Dim(sizes.kv_heads, dim, "tp", copies=True, of=of)
    ops = (
        linear("n", h, (Output("q_down", rank), Output("k", kv), Output("v", kv)), ("q_down", "k", "v")),
        latent_norm("q_down", "q_latent", "q_norm", sizes.q_rank),
        linear("q_latent", rank, (Output("q", q),), ("q_up",)),
        Rotary(("q", "k"), (q, kv), dim),
        Attend(Output("o", q), kv, dim, dim, dim, 2 * kv.size, True),
        linear("o", q, (added(hidden),), ("o",)),
    )
    return Sublayer("attention", norm, ops, after)
