"""Number formats by name: number_formats.toml, ONE table, with a row of all facts that prices, chips and stacks need.

A format is a type of numbers and, for narrow ones, the sharing of scales: values are numbers times scale. A row
without a fact cannot be made, and every reader (bytes of operands, rates of chips, what a job may multiply, the words
of options) takes it from here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.spec.rows import Rows, record

Scales = Literal["none", "tensor", "row", "block"]
"""Granularity of scales: none, a tensor, a row (along the dimension that a product sums over), or a block of a
row."""
Peak = Literal["double", "single", "tf32", "half", "fp8", "fp4"]
"""Fields of a chip (spec/cluster/chips.py) with the dense FLOP/s of a format."""


@dataclass(frozen=True)
class NumberFormat:
    """A number format. Raises ValueError for facts that contradict each other."""

    name: str
    """Name in jobs, options and files."""
    word: str | None
    """Word by which users select this precision of products; None: not selectable."""
    title: str
    """Name for people."""
    bits: int
    """Bits of a number."""
    scales: Scales
    values_per_scale: int
    """Numbers in a block; 0 if scales are not per block."""
    scale_bits: int
    """Bits of a scale; 0 without scales."""
    dtype: str | None
    """torch's name of the number type; None: torch has none."""
    gradient_dtype: str | None
    """torch's name of the type for gradients of results."""
    scale_dtype: str | None
    """torch's name of the type of scales."""
    generations: tuple[str, ...]
    """Chip generations that multiply it, at their `peak`."""
    peak: Peak | None
    """Field of the chip's peak rate; None: no chip multiplies it."""
    since: tuple[int, int] | None
    """Minimum CUDA compute capability of our products in it; None: not supported."""
    multiple: int
    """Number that the row lengths of operands and results of its products must be multiples of."""
    priced_as: str | None
    """Format whose fitted price applies to its products; None: no price."""
    computes: bool
    """Whether a job can compute in it."""
    multiplies: bool
    """Whether our runtime supports it for products in blocks of a model with another compute type."""
    gathers: bool
    """Whether our runtime can gather operands in it: their scale is known in advance, and serves both passes."""

    def __post_init__(self) -> None:
        blocks, scaled = self.scales == "block", self.scales != "none"
        facts = {
            "values_per_scale": (self.values_per_scale > 0) == blocks,
            "scale_bits": (self.scale_bits > 0) == scaled,
            "scale_dtype": scaled or self.scale_dtype is None,
            "peak": (self.peak is not None) == bool(self.generations),
            "since": self.since is not None or not self.multiplies,
            "multiple": blocks <= (self.multiple % max(self.values_per_scale, 1) == 0),
            "gathers": self.scales == "tensor" or not self.gathers,
        }
        for fact, sound in facts.items():
            if not sound:
                raise ValueError(f"number format {self.name}: {fact} = {getattr(self, fact)!r} contradicts its row")

    @property
    def narrow(self) -> bool:
        """Whether it is only for products: its numbers are meaningful only with their scales."""
        return self.scales != "none"

    @property
    def compute(self) -> str:
        """The type that a job computes in when its products are in this format: itself, float32 where its operands
        are rounded to this, and bfloat16 around narrow products."""
        return self.name if self.computes else "bfloat16" if self.narrow else "float32"

    @property
    def bytes_per_value(self) -> float:
        """Bytes per value of a long operand, including its share of a block's scale. Scales of tensors and rows are
        few, and not counted."""
        bits = self.bits + (self.scale_bits / self.values_per_scale if self.values_per_scale else 0)
        return bits // 8 if bits % 8 == 0 else bits / 8

    def bytes_of(self, n: int) -> int:
        """Return the bytes of an operand of n values: numbers, and scales of its blocks."""
        scales = -(-n // self.values_per_scale) if self.values_per_scale else 0
        return -(-(n * self.bits + scales * self.scale_bits) // 8)

    def on(self, generation: str) -> bool:
        """Whether chips of a generation multiply it."""
        return generation in self.generations


NUMBER_FORMATS = Rows(Path(__file__).with_name("number_formats.toml"), record(NumberFormat, "name"))
_ROWS = tuple(NUMBER_FORMATS.values())
COMPUTED = tuple(sorted((row for row in _ROWS if row.computes), key=lambda row: row.bits))
"""Compute types of a job, narrow types first."""
SHORT_NAMES: dict[str, str] = {row.title: row.name for row in COMPUTED}
"""Compute types by the names used in configurations: bf16, fp16, fp32, fp64."""
MULTIPLIED = tuple(row for row in _ROWS if row.multiplies)
"""Formats that our runtime supports for products in blocks of models with another compute type."""
PRECISIONS: dict[str, NumberFormat] = {row.word: row for row in _ROWS if row.word}
"""Selectable formats of products, by the user's word."""
