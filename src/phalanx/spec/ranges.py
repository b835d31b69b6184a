"""The legal range of every number and text that a user writes, declared where the field is declared.

    heads: Annotated[int, Range(1, 10**5)]
    lr: Annotated[float, Range(0, 1e6, above=True)]

`require_ranges` checks a record when it is created. Upper limits are where sizes stop making sense: they keep every
product of them finite, and every enumeration short.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class Range:
    """Range from `low` to `high`, inclusive except with `above` (excludes `low`) or `below` (excludes `high`)."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def problem(self, number: Any) -> str:
        """Return the problem with a number; empty if it is in the range. NaN is in no range."""
        low_ok = number > self.low if self.above else number >= self.low
        high_ok = number < self.high if self.below else number <= self.high
        if low_ok and high_ok:
            return ""
        if isinstance(number, float) and not math.isfinite(number):
            return "must be a finite number"
        if self.high <= 1 and isinstance(number, float):
            ends = f"{'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"
            return f"must be in {ends}"
        if low_ok:
            return f"must be {'below' if self.below else 'at most'} {_shown(self.high)}"
        if self.low == 0 and not self.above:
            return "must not be negative"
        if 0 <= self.low < 1 and number <= 0:
            return "must be positive"
        return f"must be {'above' if self.above else 'at least'} {_shown(self.low)}"


@dataclass(frozen=True)
class Length:
    """Length of a text: at most `high` characters, none of them NUL, which file names cannot contain."""

    high: int

    def problem(self, text: Any) -> str:
        """Return the problem with a text; empty if there is none."""
        if "\0" in text:
            return "holds a NUL character"
        return "" if len(text) <= self.high else f"has {len(text):,} characters; at most {self.high:,} are read"


Count = Annotated[int, Range(1, 10**9)]
"""A count of at least 1."""
Natural = Annotated[int, Range(0, 10**9)]
"""A count that may be 0."""
Ranks = Annotated[int, Range(1, 10**7)]
"""A number of ranks, GPUs or nodes."""
Name = Annotated[str, Length(1000)]
"""A text for people, or the name of something."""
FilePath = Annotated[str, Length(4096)]
"""The path of a file: Linux's longest."""
Share = Annotated[float, Range(0, 1)]
"""A share, from 0 to 1."""
Seconds = Annotated[float, Range(0, 1e9)]
"""A duration in seconds; may be 0."""
Rate = Annotated[float, Range(1, 1e24)]
"""A rate in bytes/s or FLOP/s: at least one per second."""
SecondsPer = Annotated[float, Range(0, 1)]
"""Seconds for a byte, a FLOP or a kernel: an inverse rate."""
Bytes = Annotated[int, Range(0, 2**60)]
"""A size in memory: an exbibyte at most."""


def require_64_bits(field: str, value: Any) -> None:
    """Require that a value, if it is an integer, is one that 64 bits hold. Raises InputError."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError(field, value, "is a number of more than 63 bits")


_SINGLE = (int, float, str)


def require_ranges(record: Any, record_name: str) -> None:
    """Require that the fields of a record are in their declared ranges; None is in every range.

    `record_name` names the record in messages. Raises InputError for `record_name.field`.
    """
    for name, rule in _rules(record.__class__):
        value = getattr(record, name)
        if value is None:
            continue
        # Most values are single: searches check strategies by thousands.
        for place, part in (("", value),) if type(value) in _SINGLE else _parts(value, ""):
            if isinstance(part, str) == isinstance(rule, Length) and (problem := rule.problem(part)):
                raise InputError(f"{record_name}.{name}{place}", part, problem)


def require_seed(seed: int) -> None:
    """Require a seed that every generator of drawn numbers takes. Raises InputError."""
    if not 0 <= seed < 2**63:
        raise InputError("seed", seed, "must be from 0 to 2^63 - 1")


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts in a value, with their place in it."""
    if isinstance(value, tuple | list):
        for i, inner in enumerate(value):
            yield from _parts(inner, f"{place}[{i}]")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _parts(inner, f"{place}.{key}")
    elif value is not None and not isinstance(value, bool):
        yield place, value


@cache
def _rules(kind: type[Any]) -> tuple[tuple[str, Range | Length], ...]:
    """Return the fields of a dataclass with a declared range, and that range."""
    hints = get_type_hints(kind, include_extras=True)
    rows = ((f.name, next(_declared(hints[f.name]), None)) for f in fields(kind))
    return tuple((name, rule) for name, rule in rows if rule is not None)


def _declared(hint: Any) -> Iterator[Range | Length]:
    """Yield the ranges in a type, alone or inside a union, a tuple or a mapping."""
    if get_origin(hint) is Annotated:
        yield from (rule for rule in hint.__metadata__ if isinstance(rule, Range | Length))
    for inner in get_args(hint):
        yield from _declared(inner)


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
