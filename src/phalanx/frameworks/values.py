"""Values as files of strangers state them: counts, numbers and truth values, also written as text; None is open."""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

LARGEST_COUNT = 10**12
"""The largest number that is read as a count, so that products of a few stay finite."""


def count(value: Any) -> int | None:
    """Return a positive whole number up to LARGEST_COUNT, as text or with separators too; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.replace("_", "").replace(",", "").strip()
        value = int(text) if re.fullmatch("[0-9]{1,15}", text) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and 0 < value <= LARGEST_COUNT else None


def words_of(value: Any) -> list[str]:
    """Return the words of a command that is a list or a text; a text as a shell splits it, or at blanks where a
    quotation does not end. None is none."""
    if isinstance(value, list):
        return [str(word) for word in value]
    text = str(value or "")
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def tables_of(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the tables of a list that a table has; none for anything else."""
    rows = value.get(name) if isinstance(value, Mapping) else None
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def number(value: Any, default: float) -> float:
    """Return a finite number, also written as text; the default for anything else, such as a shell's variable."""
    if isinstance(value, bool):
        return default
    try:
        stated = float(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return stated if math.isfinite(stated) else default


def endless(value: Any) -> bool:
    """Whether a value is NaN, infinite or too large for a float, also written as text."""
    try:
        return not isinstance(value, bool) and not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
    except OverflowError:
        return True


def truth(value: Any) -> bool | None:
    """Return a truth value, also written as text; None for `auto` and anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(value.lower())
    return None


def zero_level(value: Any) -> int | None:
    """Return a level of ZeRO; None for anything else."""
    return value if type(value) is int and value in range(len(ZERO_LEVELS)) else None


def product(*values: int | None) -> int | None:
    """Return the product; None if a factor is open."""
    result = 1
    for value in values:
        if value is None:
            return None
        result *= value
    return result


def divided(whole: int | None, by: int | None) -> int | None:
    """Return the quotient if it is whole; None if not or if one is open."""
    if whole is None or not by or whole % by:
        return None
    return whole // by
