"""Gradient compression: the grammar of a strategy's `compression`.

    name[:value][:stochastic][:nofeedback]     int8     topk:0.01     powersgd:4     int4:stochastic

    fp16, bf16, int8, int4   every element in fewer bits; all but bf16 with a scale per block of elements
    topk:s, randk:s          the share s of the elements: the largest, or a random choice, the same on every rank
    threshold:t              the elements of magnitude t or above
    powersgd:r               matrices as products of rank r (Vogels et al. 2019)

The dropped part is kept as a residual and added to the next gradient (error feedback: Seide et al. 2014, Karimireddy
et al. 2019), unless `nofeedback` is given. `stochastic` rounds up or down at random, without bias. The facts about
each are in compressors.py.
"""

from __future__ import annotations

from functools import cache

from phalanx.spec.errors import InputError
from phalanx.spec.strategy.compressors import COMPRESSORS, Codes, Compression, Number, example

_FIELD = "strategy.compression"


@cache
def parse(text: str) -> Compression | None:
    """Parse `int4:stochastic`; None for `none`. Raises InputError for an unknown name, number or option."""
    if text == "none":
        return None
    name, *words = text.split(":")
    row = COMPRESSORS.get(name)
    if row is None:
        raise InputError(_FIELD, text, "is not known", f"use {', '.join(('none', *map(example, COMPRESSORS)))}")
    value = 0.0
    if not isinstance(row, Codes):
        value = _value(text, row.number, example(name), words)
        words = words[1:]
    options = [word for word in words if word in ("stochastic", "nofeedback")]
    if words != options or len(set(options)) != len(options):
        raise InputError(_FIELD, text, "has unknown or repeated options", "use stochastic and nofeedback, once each")
    if "stochastic" in options and not (isinstance(row, Codes) and row.stochastic):
        able = [name for name, row in COMPRESSORS.items() if isinstance(row, Codes) and row.stochastic]
        raise InputError(_FIELD, text, f"stochastic rounding is for {' and '.join(able)}", "leave it out")
    return Compression(name, value, "stochastic" in options, "nofeedback" not in options)


def _value(text: str, number: Number, usual: str, words: list[str]) -> float:
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        raise InputError(_FIELD, text, "lacks a number after the name", f"e.g. {usual}") from None
    if not number.allowed(value):
        raise InputError(_FIELD, text, number.rule, f"e.g. {usual}")
    return value
