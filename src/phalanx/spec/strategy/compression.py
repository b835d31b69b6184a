"""Gradient compression: the grammar of a strategy's `compression`.

    name[:value][:stochastic][:nofeedback]     int8     topk:0.01     powersgd:4     int4:stochastic

    fp16, bf16, int8, int4   every element in fewer bits; all but bf16 with a scale per block of elements
    topk:s, randk:s          the share s of the elements: the largest, or a random choice, the same on every rank
    threshold:t              the elements of magnitude t or above
    powersgd:r               matrices as products of rank r (Vogels et al. 2019)

What compression drops is kept as a residual and added to the next gradient (error feedback: Seide et al. 2014,
Karimireddy et al. 2019), unless `nofeedback` is given. `stochastic` rounds up or down at random, without bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from phalanx.spec.errors import InputError

BITS = {"fp16": 16, "bf16": 16, "int8": 8, "int4": 4}
BLOCK = 256
"""Elements that share a scale."""
_EXAMPLES = {"topk": "topk:0.01", "randk": "randk:0.01", "threshold": "threshold:1e-3", "powersgd": "powersgd:4"}
_FIELD = "strategy.compression"


@dataclass(frozen=True)
class Compression:
    """A parsed `compression`."""

    name: str
    """fp16, bf16, int8, int4, topk, randk, threshold or powersgd."""
    value: float = 0.0
    """topk, randk: the share of elements kept; threshold: the least magnitude kept; powersgd: the rank; else 0."""
    stochastic: bool = False
    """Whether int8 and int4 round at random, without bias, instead of to the nearest."""
    feedback: bool = True
    """Whether what was dropped is added to the next gradient."""

    @property
    def quantised(self) -> bool:
        """Whether every element is sent, in fewer bits."""
        return self.name in BITS

    @property
    def bits(self) -> int:
        """Bits per element of a quantised compressor. Raises KeyError for any other."""
        return BITS[self.name]

    @property
    def scaled(self) -> bool:
        """Whether blocks carry a scale. bf16 needs none: it has the range of fp32."""
        return self.name != "bf16"


@cache
def parse(text: str) -> Compression | None:
    """Parse `int4:stochastic`; None for `none`. Raises InputError for an unknown name, number or option."""
    if text == "none":
        return None
    name, *words = text.split(":")
    if name not in BITS and name not in _EXAMPLES:
        raise InputError(_FIELD, text, "is not known", f"use {', '.join(('none', *BITS, *_EXAMPLES.values()))}")
    value = 0.0
    if name in _EXAMPLES:
        value = _value(text, name, words)
        words = words[1:]
    options = [word for word in words if word in ("stochastic", "nofeedback")]
    if words != options or len(set(options)) != len(options):
        raise InputError(_FIELD, text, "has unknown or repeated options", "use stochastic and nofeedback, once each")
    if "stochastic" in options and name not in ("int8", "int4"):
        raise InputError(_FIELD, text, "stochastic rounding is for int8 and int4", "leave it out")
    return Compression(name, value, "stochastic" in options, "nofeedback" not in options)


def _value(text: str, name: str, words: list[str]) -> float:
    example = f"e.g. {_EXAMPLES[name]}"
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        raise InputError(_FIELD, text, "lacks a number after the name", example) from None
    if name in ("topk", "randk") and not 0 < value <= 1:
        raise InputError(_FIELD, text, "the share of elements must be above 0 and at most 1", example)
    if name == "threshold" and not 0 < value < float("inf"):
        raise InputError(_FIELD, text, "the least magnitude must be positive and finite", example)
    if name == "powersgd" and not (value >= 1 and value == int(value)):
        raise InputError(_FIELD, text, "the rank must be a whole number of at least 1", example)
    return value
