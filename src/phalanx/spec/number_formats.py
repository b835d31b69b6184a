"""Number formats by name: ONE table, with a row of all facts that prices, kernels, chips and stacks need.

A format is a type of numbers and, for narrow ones, the sharing of scales: values are numbers times scale. A row
without a fact cannot be made, and every reader (bytes of operands, rates of chips, what a job may multiply, the words
of options) takes it from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scales = Literal["none", "tensor", "row", "block"]
"""Granularity of scales: none, a tensor, a row (along the dimension that a product sums over), or a block of a
row."""
Peak = Literal["double", "single", "tf32", "half", "fp8", "fp4"]
"""Fields of a chip (spec/cluster/chips.py) with the dense FLOP/s of a format."""

_SINCE_BLACKWELL = frozenset({"blackwell", "blackwell-ultra", "blackwell-gddr"})
_SINCE_ADA = _SINCE_BLACKWELL | {"ada", "hopper"}
_SINCE_AMPERE = _SINCE_ADA | {"ampere", "ampere-gddr"}
_SINCE_VOLTA = _SINCE_AMPERE | {"volta"}
# Other makers'.
_TPU = frozenset({"tpu", "tpu-fp8"})
_EIGHT = frozenset({"cdna3", "cdna4", "gaudi", "tpu-fp8", "trainium-fp8"})
_OTHERS = _EIGHT | _TPU | {"cdna2", "gaudi3", "trainium"}


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
    generations: frozenset[str]
    """Chip generations that multiply it, at their `peak`."""
    peak: Peak | None
    """Field of the chip's peak rate; None: no chip multiplies it."""
    since: tuple[int, int] | None
    """Minimum CUDA compute capability of our products in it; None: not supported."""
    multiple: int
    """Granule of the row length of operands and results of its products."""
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


def _plain(
    name: str,
    bits: int,
    generations: frozenset[str] = frozenset(),
    peak: Peak | None = None,
    word: str | None = None,
    title: str | None = None,
    rounds: bool = False,
) -> NumberFormat:
    """Return the row of a type whose numbers need no scales. `rounds`: products round operands of another type to
    it."""
    return NumberFormat(
        name=name,
        word=word,
        title=title or name,
        bits=bits,
        scales="none",
        values_per_scale=0,
        scale_bits=0,
        dtype=None if rounds else name,
        gradient_dtype=None if rounds else name,
        scale_dtype=None,
        generations=generations,
        peak=peak,
        since=(0, 0) if peak else None,
        multiple=1,
        priced_as=name if rounds else "bfloat16" if peak else None,
        computes=peak is not None and not rounds,
        multiplies=False,
        gathers=False,
    )


def _float8(
    name: str,
    title: str,
    scales: Scales,
    gradients: str,
    word: str | None = None,
    block: int = 0,
    priced_as: str = "float8",
    multiplies: bool = False,
    gathers: bool = False,
) -> NumberFormat:
    """Return the row of a recipe of 8-bit floats with fp32 scales (Micikevicius et al. 2022, "FP8 Formats for Deep
    Learning"), whose products are torch._scaled_mm's or Transformer Engine's."""
    return NumberFormat(
        name=name,
        word=word,
        title=title,
        bits=8,
        scales=scales,
        values_per_scale=block,
        scale_bits=32,
        dtype="float8_e4m3fn",
        gradient_dtype=gradients,
        scale_dtype="float32",
        generations=_SINCE_ADA | _EIGHT,
        peak="fp8",
        since=(8, 9),
        multiple=max(16, block),
        priced_as=priced_as,
        computes=False,
        multiplies=multiplies,
        gathers=gathers,
    )


def _blocks(
    name: str,
    title: str,
    bits: int,
    values_per_scale: int,
    scale_dtype: str,
    dtype: str | None,
    peak: Peak | None,
    scale_bits: int = 8,
    word: str | None = None,
    priced_as: str | None = None,
    multiplies: bool = False,
) -> NumberFormat:
    """Return the row of a format whose blocks have small scales, which Blackwell's tensor cores read with the
    numbers; without a peak, of one that only stores weights."""
    return NumberFormat(
        name=name,
        word=word,
        title=title,
        bits=bits,
        scales="block",
        values_per_scale=values_per_scale,
        scale_bits=scale_bits,
        dtype=dtype,
        gradient_dtype=dtype,
        scale_dtype=scale_dtype,
        generations=_SINCE_BLACKWELL if peak else frozenset(),
        peak=peak,
        since=(10, 0) if peak else None,
        multiple=max(32, values_per_scale),
        priced_as=priced_as,
        computes=False,
        multiplies=multiplies,
        gathers=False,
    )


_ROWS = (
    _plain("float64", 64, _SINCE_VOLTA | _OTHERS, "double", title="fp64"),
    _plain("float32", 32, _SINCE_VOLTA | _OTHERS, "single", word="fp32", title="fp32"),
    _plain("bfloat16", 16, _SINCE_AMPERE | _OTHERS, "half", word="bf16", title="bf16"),
    _plain("float16", 16, _SINCE_VOLTA | (_OTHERS - _TPU), "half", word="fp16", title="fp16"),
    # fp32 whose products run on tensor cores, with 10 bits of mantissa (NVIDIA A100 whitepaper).
    _plain("tfloat32", 32, _SINCE_AMPERE, "tf32", word="tf32", title="TF32", rounds=True),
    _plain("int64", 64),
    _plain("int32", 32),
    _plain("uint8", 8),
    # One scale a tensor, of current values; gradients in e5m2, which has a wider range.
    _float8("float8", "FP8", "tensor", "float8_e5m2", word="fp8", multiplies=True, gathers=True),
    # The same with scales from earlier steps (Transformer Engine's DelayedScaling).
    _float8("float8-delayed", "FP8, delayed scales", "tensor", "float8_e5m2"),
    # One scale a row of both operands (torchao's rowwise recipe).
    _float8("float8-row", "FP8 by row", "row", "float8_e4m3fn", priced_as="mxfp8", multiplies=True),
    # One scale for 128 activations or 128 x 128 weights (DeepSeek-V3).
    _float8("float8-block", "FP8 by block", "block", "float8_e4m3fn", "fp8-block", 128, "mxfp8"),
    # One power of two for 32 numbers (OCP Microscaling Formats, version 1.0).
    _blocks("mxfp8", "MXFP8", 8, 32, "float8_e8m0fnu", "float8_e4m3fn", "fp8", 8, "mxfp8", "mxfp8", True),
    # One scale in e4m3 for 16 numbers, and one in fp32 for all (NVIDIA 2025, "Pretraining LLMs with NVFP4").
    _blocks("nvfp4", "NVFP4", 4, 16, "float8_e4m3fn", "float4_e2m1fn_x2", "fp4", 8, "nvfp4", "nvfp4", True),
    # Only weights of served models: OCP's four bits, and integers with one 16-bit scale per 128.
    _blocks("mxfp4", "MXFP4", 4, 32, "float8_e8m0fnu", "float4_e2m1fn_x2", "fp4"),
    _blocks("int4", "INT4", 4, 128, "bfloat16", None, None, scale_bits=16),
)
NUMBER_FORMATS: dict[str, NumberFormat] = {row.name: row for row in _ROWS}
COMPUTED = tuple(sorted((row for row in _ROWS if row.computes), key=lambda row: row.bits))
"""Compute types of a job, narrow types first."""
SHORT_NAMES: dict[str, str] = {row.title: row.name for row in COMPUTED}
"""Compute types by the names used in configurations: bf16, fp16, fp32, fp64."""
MULTIPLIED = tuple(row for row in _ROWS if row.multiplies)
"""Formats that our runtime supports for products in blocks of models with another compute type."""
PRECISIONS: dict[str, NumberFormat] = {row.word: row for row in _ROWS if row.word}
"""Selectable formats of products, by the user's word."""
