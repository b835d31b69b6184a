"""Conditions on strategies, as one line: `tp<=8, zero=1, schedule in (1f1b, interleaved), tp*cp<=8`.

    line       condition {, condition}                          all must hold
    condition  sum op sum [op sum] | field [not] in (value, ...)
    op         = == != < <= > >=
    sum        integers and fields joined by * % + -, from left to right with * and % first

Fields with words for values (schedule, recompute, order, ...) are compared with = != in, and a value may end in `*`:
`recompute=block:*`. The same conditions apply to one Strategy and to columns of strategies: `holds` returns a bool or
a mask. Refusals of stacks are written in this grammar too (frameworks/).
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError, nearest

_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_SPLIT = re.compile(r"(<=|>=|!=|==|=|<|>)")
_MEMBER = re.compile(r"([a-z_]+)\s+(not\s+)?in\s*\(([^()]*)\)")
_TOKEN = re.compile(r"\s*([a-z_][a-z_0-9]*|[0-9]{1,18}|[*%+-])")


@dataclass(frozen=True)
class Words:
    """A column of a field whose values are words: `codes` are indices into `names`."""

    codes: npt.NDArray[np.int64]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    """One condition: its source `text`, the fields it reads, and its test."""

    text: str
    fields: frozenset[str]
    test: Callable[[Mapping[str, Any]], Any]

    def holds(self, values: Mapping[str, Any]) -> Any:
        """Evaluate the condition on `values` by field: numbers, words, columns of numbers, or Words."""
        return self.test(values)


def parse(line: str, fields: Sequence[str], words: Mapping[str, Sequence[str]], field: str) -> tuple[Condition, ...]:
    """Parse a line into its conditions. `fields`: the names of all fields; `words`: the fields whose values are
    words, with their legal values ((): any). Raises InputError under the name `field`."""
    parts = [part.strip() for part in re.split(r",(?![^(]*\))|\s+and\s+", line)]
    conditions: list[Condition] = []
    for part in filter(None, parts):
        conditions += _parsed(part, fields, words, field)
    if not conditions:
        raise InputError(field, line, "states no condition", "e.g. 'tp<=8, zero=1'")
    return tuple(conditions)


def holds(conditions: Iterable[Condition], values: Mapping[str, Any]) -> Any:
    """Whether all conditions hold: a bool, or a mask if `values` has columns."""
    result: Any = True
    for condition in conditions:
        result = result & condition.holds(values)
        if result is False:  # scalars: thousands of strategies are judged one by one
            return False
    return result


def amount(text: str, fields: Sequence[str], field: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that evaluates a sum such as tp*pp on values by field. Raises InputError about `field`."""
    return _sum(text, fields, {}, text, field).value


def _parsed(text: str, fields: Sequence[str], words: Mapping[str, Sequence[str]], field: str) -> list[Condition]:
    member = _MEMBER.fullmatch(text)
    if member:
        name, negated, inside = member.groups()
        values = [value.strip() for value in inside.split(",") if value.strip()]
        if not values:
            raise InputError(field, text, "names no value", f"e.g. {name} in (1, 2)")
        _require_known([name], fields, text, field)
        if name in words:
            return [_of_words(text, name, values, bool(negated), words[name], field)]
        numbers = [_integer(value, text, field) for value in values]
        return [Condition(text, frozenset([name]), _member_test(name, numbers, bool(negated)))]
    pieces = [piece.strip() for piece in _SPLIT.split(text)]
    if len(pieces) not in (3, 5) or not all(pieces):
        raise InputError(field, text, "is not a condition", "write e.g. tp<=8, zero=1 or virtual in (1, 2)")
    conditions = []
    for left, op, right in zip(pieces[:-2:2], pieces[1::2], pieces[2::2], strict=True):
        if left in words:
            if op not in ("=", "==", "!="):
                raise InputError(field, text, f"{left} has words for values, which have no order", "use =, != or in")
            conditions.append(_of_words(text, left, [right], op == "!=", words[left], field))
            continue
        one, other = _sum(left, fields, words, text, field), _sum(right, fields, words, text, field)
        conditions.append(Condition(text, one.fields | other.fields, _compared(one, _OPS[op], other)))
    return conditions


def _of_words(text: str, name: str, values: list[str], negated: bool, legal: Sequence[str], field: str) -> Condition:
    for value in values:
        if legal and not any(fnmatchcase(word, value) or fnmatchcase(value, word) for word in legal):
            raise InputError(field, text, f"{value!r} is not a value of {name}", nearest(value, legal))

    def matches(word: Any) -> bool:
        return any(fnmatchcase(str(word), value) for value in values) != negated

    def test(given: Mapping[str, Any]) -> Any:
        column = given[name]
        if isinstance(column, Words):
            return np.array([matches(word) for word in column.names], dtype=bool)[column.codes]
        return matches(column)

    return Condition(text, frozenset([name]), test)


def _member_test(name: str, numbers: list[int], negated: bool) -> Callable[[Mapping[str, Any]], Any]:
    def test(given: Mapping[str, Any]) -> Any:
        column = given[name]
        if isinstance(column, int):
            return (column in numbers) != negated
        inside = np.isin(column, numbers)
        return ~inside if negated else inside

    return test


@dataclass(frozen=True)
class _Sum:
    fields: frozenset[str]
    value: Callable[[Mapping[str, Any]], Any]


def _compared(one: _Sum, op: Callable[[Any, Any], Any], other: _Sum) -> Callable[[Mapping[str, Any]], Any]:
    return lambda given: op(one.value(given), other.value(given))


def _sum(text: str, fields: Sequence[str], words: Mapping[str, Sequence[str]], whole: str, field: str) -> _Sum:
    # Split into operands and operators, in turn.
    tokens, place = [], 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise InputError(field, whole, f"cannot read {text[place:].strip()!r}", "write e.g. tp*cp<=8, zero=1")
        tokens.append(token.group(1))
        place = len(text) if not text[token.end() :].strip() else token.end()
    if len(tokens) % 2 == 0 or any((t in "*%+-") != (i % 2 == 1) for i, t in enumerate(tokens)):
        raise InputError(field, whole, f"cannot read {text!r}", "write e.g. tp*cp<=8, zero=1")
    names = [t for t in tokens[::2] if not t.isdigit()]
    _require_known(names, fields, whole, field)
    for name in names:
        if name in words:
            raise InputError(field, whole, f"{name} has words for values", f"use e.g. {name}=VALUE")

    # A single number or field.
    if len(tokens) == 1:
        name = tokens[0]
        if name.isdigit():
            number = int(name)
            return _Sum(frozenset(), lambda given: number)
        return _Sum(frozenset(names), lambda given: given[name])

    # Evaluate * and % first, then + and -, each from left to right.
    operands = [int(t) if t.isdigit() else t for t in tokens[::2]]

    def value(given: Mapping[str, Any]) -> Any:
        terms = [given[t] if isinstance(t, str) else t for t in operands]
        if len(terms) == 2:
            return _CALCULATE[tokens[1]](*terms)
        ops = list(tokens[1::2])
        for level in ("*%", "+-"):
            place = 0
            while place < len(ops):
                if ops[place] in level:
                    terms[place : place + 2] = [_CALCULATE[ops[place]](terms[place], terms[place + 1])]
                    del ops[place]
                else:
                    place += 1
        return terms[0]

    return _Sum(frozenset(names), value)


def _remainder(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a % max(b, 1)
    return np.mod(a, np.maximum(b, 1))


_CALCULATE: dict[str, Callable[[Any, Any], Any]] = {
    "*": operator.mul,
    "%": _remainder,
    "+": operator.add,
    "-": operator.sub,
}


def _require_known(names: Sequence[str], known: Sequence[str], text: str, field: str) -> None:
    for name in names:
        if name not in known:
            raise InputError(field, text, f"{name!r} is not a field", _suggestion(name, tuple(known)))


@cache
def _suggestion(name: str, known: tuple[str, ...]) -> str:
    return nearest(name, known)


def _integer(value: str, text: str, field: str) -> int:
    if value.lower() in ("true", "false"):
        return int(value.lower() == "true")
    if not re.fullmatch(r"\d{1,12}", value):
        raise InputError(field, text, f"{value!r} is not an integer")
    return int(value)
