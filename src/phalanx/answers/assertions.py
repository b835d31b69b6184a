"""Assertions about an answer: `memory<75GiB, step<20s, mfu>0.4, fits`, as continuous integration asks them.

A name is a field of the answer as `--json` prints it, whole (`memory_bytes`), without its unit (`memory`,
`step_time`), by a dotted path (`question.gpus`), or `step`. Where the answer has several fields of that name, the
shallowest counts, which of a plan is its best strategy's. Numbers take units: bytes (KiB to TB), times (ms,
s, min, h, d) and per cent. A name alone must be true.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.spec.byte_sizes import parse_bytes, write_bytes
from phalanx.spec.errors import InputError, nearest

_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS = ("_bytes", "_s", "_share")
_SHORT = {"step": "step_time"}
_FIELD = "assert"


@dataclass(frozen=True)
class Assertion:
    """One comparison of a field with a value."""

    text: str
    name: str
    compare: str
    value: str

    def failure(self, values: dict[str, Any]) -> str:
        """Return why it does not hold for these fields, in one line; "" if it does. Raises InputError for an unknown
        field, or a value of another kind."""
        path = _path(self.name, values)
        value = values[path]
        if not self.compare:
            if not isinstance(value, bool):
                raise InputError(_FIELD, self.text, f"{path} is not true or false", f"compare it: {self.name}<...")
            return "" if value else f"{self.text}: {path} is false"
        if value is None:
            return f"{self.text}: {path} has no value here"
        limit = _number(self.value, path) if isinstance(value, int | float) else self.value
        if _COMPARED[self.compare](value, limit):
            return ""
        return f"{self.text}: {path} is {_written(value, path)}{_interval(path, values)}"


def parse(line: str) -> tuple[Assertion, ...]:
    """Parse assertions apart by commas. Raises InputError for one that is none."""
    result = []
    for text in filter(None, map(str.strip, line.split(","))):
        match = re.fullmatch(r"([A-Za-z_][\w.]*)\s*(?:(<=|>=|!=|==|<|>|=)\s*([^\s<>=!].*))?", text)
        if match is None:
            raise InputError(_FIELD, text, "is no assertion", "write 'memory<75GiB, step<20s, fits'")
        result.append(Assertion(text, match[1], match[2] or "", match[3] or ""))
    if not result:
        raise InputError(_FIELD, line, "asserts nothing", "write 'memory<75GiB, step<20s, fits'")
    return tuple(result)


def failures(line: str, answer: Any) -> list[str]:
    """Return a line for each assertion that does not hold for a plain answer. Raises InputError."""
    values = dict(_leaves(answer))
    return [why for assertion in parse(line) if (why := assertion.failure(values))]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a plain answer by path, the shallow ones first."""
    if not isinstance(value, dict):
        return
    inner = []
    for key, entry in value.items():
        below = f"{path}.{key}" if path else key
        if isinstance(entry, dict):
            inner.append((below, entry))
        elif not isinstance(entry, list):
            yield below, entry
    for below, entry in inner:
        yield from _leaves(entry, below)


def _path(name: str, values: dict[str, Any]) -> str:
    """Return the shallowest field of a name, with or without its unit."""
    wanted = {*(_SHORT.get(name, name) + unit for unit in ("", *_UNITS))}

    def depth(path: str) -> int:
        return path.count(".")

    matches = [path for path in values if path in wanted or path.rpartition(".")[2] in wanted]
    if not matches:
        whole = {path.rpartition(".")[2] for path in values}
        names = sorted(whole | {re.sub(f"({'|'.join(_UNITS)})$", "", each) for each in whole})
        raise InputError(_FIELD, name, "is no field of the answer", nearest(name, names))
    return min(matches, key=depth)


def _number(text: str, path: str) -> float:
    """Return a number with its unit, in the unit of a field."""
    if path.endswith("_bytes"):
        return parse_bytes(text, _FIELD)
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z%]*)", text.strip(), re.IGNORECASE)
    units = _SECONDS if path.endswith("_s") and not path.endswith("per_s") else {"%": 0.01}
    if match is None or (match[2] and match[2] not in units):
        raise InputError(_FIELD, text, f"is no value of {path}", f"a number{', or with ' + ', '.join(units)}")
    return float(match[1]) * (units[match[2]] if match[2] else 1.0)


def _written(value: Any, path: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if path.endswith("_bytes"):
        return write_bytes(value)
    return f"{value:.4g} s" if path.endswith("_s") and not path.endswith("per_s") else f"{value:.4g}"


def _interval(path: str, values: dict[str, Any]) -> str:
    """Return the interval of a field, where the answer has one."""
    stem = path.removesuffix("_s")
    low, high = (values.get(f"{stem}_{end}_s") for end in ("low", "high"))
    return f" ({low:.4g} to {high:.4g} s likely)" if low is not None and high is not None else ""
