"""Assertions about an answer: `memory<75GiB, step<20s, mfu>0.4, fits`, as continuous integration asks them.

A name is a field of the answer as `--json` prints it, whole (`memory_bytes`), without its unit (`memory`,
`step_time`), by the end of its path (`question.gpus`, `sides.2.step`), or `step`. Where the answer has several fields
of that name, the shallowest counts, which of a plan is its best strategy's; of rows, such as compared sides, each
must hold. Numbers take units: bytes (KiB to TB), times (ms, s, min, h, d), energy (kWh, MWh), carbon (kg, t), USD
and per cent; or they are another field (`sides.2.step<sides.1.step`). A name alone must be true.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.spec.byte_sizes import parse_bytes, write_bytes
from phalanx.spec.errors import InputError, nearest

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS = ("_bytes", "_s", "_share", "_kwh", "_kg")
_SCALES = {
    "_s": _SECONDS,
    "_kwh": {"Wh": 1e-3, "kWh": 1.0, "MWh": 1e3, "GWh": 1e6},
    "_kg": {"g": 1e-3, "kg": 1.0, "t": 1e3},
    "money": {"USD": 1.0},
}
"""Units of a number by how the name of its field ends; other fields take per cent."""
_SHORT = {"step": "step_time"}
_FIELD = "assert"


@dataclass(frozen=True)
class Assertion:
    """One comparison of a field with a value."""

    text: str
    name: str
    compare: str
    value: str

    def failures(self, values: dict[str, Any]) -> list[str]:
        """Return a line for each field of this name where the assertion does not hold. Raises InputError for an
        unknown field, or a value of another kind."""
        return [why for path in _paths(self.name, values) if (why := self._failure(path, values))]

    def _failure(self, path: str, values: dict[str, Any]) -> str:
        value = values[path]
        if not self.compare:
            if not isinstance(value, bool):
                raise InputError(_FIELD, self.text, f"{path} is not true or false", f"compare it: {self.name}<...")
            return "" if value else f"{self.text}: {path} is false"
        if value is None:
            return f"{self.text}: {path} has no value here"
        limit = self._limit(path, values)
        if limit is None:
            return f"{self.text}: {self.value} has no value here"
        if _COMPARISONS[self.compare](value, limit):
            return ""
        than = "" if _is_value(self.value) else f", {self.value} is {_with_unit(limit, path)}"
        return f"{self.text}: {path} is {_with_unit(value, path)}{_interval(path, values)}{than}"

    def _limit(self, path: str, values: dict[str, Any]) -> Any:
        """Return what the field is compared with: a number, another field's value, or a word. Raises InputError."""
        if not isinstance(values[path], int | float):
            return self.value
        if _is_value(self.value):
            return _number(self.value, path)
        others = _paths(self.value, values)
        kind, other = (type(values[each]) in (int, float) for each in (path, others[0]))
        if len(others) > 1 or (kind and not other and values[others[0]] is not None):
            raise InputError(_FIELD, self.text, f"{self.value} is no one number", "name one field, or a number")
        return values[others[0]]


def _is_value(text: str) -> bool:
    """Whether a text begins as a number does; a field's name does not."""
    return not re.match(r"[A-Za-z_]", text)


def parse(line: str) -> tuple[Assertion, ...]:
    """Parse assertions that commas separate. Raises InputError for text that is no assertion."""
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
    return [why for assertion in parse(line) for why in assertion.failures(values)]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a plain answer by path, the shallow ones first; rows of a list are counted from 1."""
    inner = []
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value, 1):
        below = f"{path}.{key}" if path else str(key)
        if isinstance(entry, dict | list):
            inner.append((below, entry))
        elif isinstance(value, dict):
            yield below, entry
    for below, entry in inner:
        yield from _leaves(entry, below)


def _paths(name: str, values: dict[str, Any]) -> list[str]:
    """Return the paths of the shallowest fields of this name, with or without its unit: one in each row of a list.
    Raises InputError for a name that no field has."""
    head, dot, last = name.rpartition(".")
    wanted = tuple(f"{head}{dot}{_SHORT.get(last, last)}{unit}" for unit in ("", *_UNITS))
    matches = [path for path in values if path in wanted or path.endswith(tuple(f".{each}" for each in wanted))]
    if not matches:
        whole = {path.rpartition(".")[2] for path in values}
        names = sorted(whole | {re.sub(f"({'|'.join(_UNITS)})$", "", each) for each in whole})
        raise InputError(_FIELD, name, "is no field of the answer", nearest(name, names))
    first = min(matches, key=_depth)
    rows = re.sub(r"(?<=\.)\d+(?=\.)", "*", first)
    return [path for path in matches if re.sub(r"(?<=\.)\d+(?=\.)", "*", path) == rows]


def _depth(path: str) -> int:
    """Return how many names a path has, without the numbers of rows."""
    return sum(not part.isdigit() for part in path.split("."))


def _number(text: str, path: str) -> float:
    """Parse a number with or without a unit, and return it in the unit of the field at `path`. Raises InputError."""
    if path.endswith("_bytes"):
        return parse_bytes(text, _FIELD)
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z%]*)", text.strip(), re.IGNORECASE)
    rate = path.endswith("per_s") or path.endswith("per_kwh")
    units = next((_SCALES[end] for end in _SCALES if path.endswith(end) and not rate), {"%": 0.01})
    if match is None or (match[2] and match[2] not in units):
        raise InputError(_FIELD, text, f"is no value of {path}", f"a number{', or with ' + ', '.join(units)}")
    return float(match[1]) * (units[match[2]] if match[2] else 1.0)


def _with_unit(value: Any, path: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if path.endswith("_bytes"):
        return write_bytes(value)
    return f"{value:.4g} s" if path.endswith("_s") and not path.endswith("per_s") else f"{value:.4g}"


def _interval(path: str, values: dict[str, Any]) -> str:
    """Return the likely interval of a field as text, from X_low_s and X_high_s for X_s; "" without these."""
    unit = next((unit for unit in _UNITS if path.endswith(unit)), "")
    stem = path.removesuffix(unit)
    low, high = (values.get(f"{stem}_{end}{unit}") for end in ("low", "high"))
    return "" if low is None or high is None else f" ({low:.4g} to {_with_unit(high, path)} likely)"
