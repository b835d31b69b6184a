"""The sizes and choices that determine the live bytes of a block's passes, in addition to its operators."""

from dataclasses import dataclass
from functools import cached_property

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.attention_core import Core
from phalanx.schedule.layers.routing import ExpertTraffic
from phalanx.spec.model.blocks.operators import Dim, Linear
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.number_formats import NumberFormat
from phalanx.spec.strategy.spec import Recompute


@dataclass(frozen=True)
class PassSizes:
    """The tokens of a micro-batch on one of `tp` ranks, and how a block is computed on them. Sizes of tensors are in
    bytes; operators have the Dims of the rank's part of the block."""

    t: Column
    """Tokens."""
    e: int
    """Bytes of an element."""
    hidden: int
    tp: int = 1
    sp: bool = False
    """Whether the residual stream has only the rank's own tokens."""
    repeat: Recompute = "none"
    """Recomputation in the backward pass (runtime/autograd/recompute.py)."""
    core: Core | None = None
    """Attention's core over ranks that share sequences."""
    operands: NumberFormat | None = None
    """The products' narrow format; None: products are in the compute type."""
    gathered: bool = False
    """Whether weights are gathered in the narrow format, so that forward passes do not round them; backward passes
    transpose them."""
    narrow_stream: bool = False
    """Whether sequence parallelism gathers in the narrow format too."""
    mask: Column = 0
    """Bytes of the masks between documents, without rotary angles."""
    in_place: bool | None = None
    """Whether products write weight gradients straight into gradient memory of their own type; None: layers cannot
    defer weight gradients."""
    experts: Experts | None = None
    rows: ExpertTraffic | None = None
    """Rows of the block's experts."""
    seq: int = 0
    """Tokens of a sequence, for recurrences."""

    @cached_property
    def own_tokens(self) -> Column:
        """Tokens of the residual stream."""
        return self.t // self.tp if self.sp else self.t

    @cached_property
    def stream(self) -> Column:
        """Bytes of the residual stream, (own tokens, hidden), of a norm of it, or of their gradients."""
        return self.own_tokens * self.hidden * self.e

    @cached_property
    def whole(self) -> Column:
        """Bytes of the stream of all tokens, (t, hidden), while it is summed over ranks."""
        return self.t * self.hidden * self.e

    @cached_property
    def together(self) -> Column:
        """Bytes of the stream of all tokens while it is gathered."""
        return self.t * self.hidden if self.narrow_stream else self.whole

    @property
    def wide(self) -> int:
        """Bytes of a number that is at least fp32: a statistic, a score."""
        return max(self.e, 4)

    @property
    def defers(self) -> bool:
        """Whether layers can defer weight gradients; all products of one input then have their backward pass
        together."""
        return self.in_place is not None

    @property
    def copied(self) -> int:
        """0 if a product's weight gradient is computed in its final memory, without a copy; else 1."""
        return int(not self.in_place or self.operands is not None)

    @property
    def operand_bytes(self) -> float:
        """Bytes of an operand in the narrow format; 0: no such format."""
        return self.operands.bytes_per_value if self.operands else 0

    @property
    def ulysses(self) -> bool:
        """Whether attention scatters heads and gathers tokens."""
        return self.core is not None and self.core.part.ulysses > 1

    def bytes_of(self, dim: Dim) -> Column:
        """Return the bytes of a tensor of all tokens."""
        return self.t * dim.size * self.e

    def numbers(self, groups: int) -> Column:
        """Return the bytes of a wide number for each token and group."""
        return self.t * groups * self.wide

    def weight(self, op: Linear, i: int = 0) -> int:
        """Return the bytes of the gradient of a product's matrix number `i`."""
        return op.y[i].dim.size * op.into.size * self.e
