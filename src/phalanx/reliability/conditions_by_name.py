"""Conditions of a training by the names of their options: `restart=manual, storage=nas, elastic`."""

import re
from collections.abc import Mapping
from typing import Any

from phalanx.reliability.conditions import Conditions
from phalanx.spec.byte_sizes import parse_bytes
from phalanx.spec.errors import InputError, nearest

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_S = 1e12


def parse_seconds(text: str, name: str) -> float:
    """Parse `30min`, `3h`, `90` (seconds). Raises InputError; 0 is refused."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d|)\s*", text)
    if match is None:
        raise InputError(name, text, "is no duration", "write 90s, 30min, 3h or 2d")
    value = float(match[1]) * _UNITS[match[2] or "s"]
    if not 0 < value <= _MOST_S:
        raise InputError(name, text, f"must be longer than nothing and at most {_MOST_S / 86_400:.3g} days")
    return value


_WORDS = ("failures", "restart", "storage", "checkpoint")
_DURATIONS = {"mttf": "mttf_s", "detect": "detect_s", "restart-time": "restart_s", "silent": "silent_s",
              "interval": "interval_s", "repair": "repair_s"}  # fmt: skip
_SIZES = {"write": "write_bytes_per_s", "read": "read_bytes_per_s", "checkpoint-bytes": "checkpoint_bytes"}
_SWITCHES = ("synchronous", "elastic")
_NAMES = (*_WORDS, *_DURATIONS, *_SIZES, *_SWITCHES, "spares")


def conditions_of(given: Mapping[str, str | bool | int | None]) -> Conditions:
    """Return the conditions with these values by name, `restart-time` or `restart_time`; a value of None counts as
    not given. Raises InputError."""
    read: dict[str, Any] = {}
    for name, value in ((name.replace("_", "-"), value) for name, value in given.items()):
        if value is None:
            continue
        if name in _DURATIONS:
            read[_DURATIONS[name]] = parse_seconds(str(value), name)
        elif name in _SIZES:
            read[_SIZES[name]] = parse_bytes(str(value), name)
        elif name == "spares" and isinstance(value, str):
            if not value.isdecimal():
                raise InputError(name, value, "is no number of nodes", "write 4")
            read[name] = int(value)
        elif name in _NAMES:
            read[name] = value
        else:
            raise InputError("conditions", name, "is no condition of a training", nearest(name, _NAMES))
    return Conditions(**read)


def conditions_in(line: str) -> Conditions:
    """Read a line such as `restart=manual, storage=nas, elastic`. Raises InputError."""
    given: dict[str, str | bool] = {}
    for word in filter(None, (part.strip() for part in line.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if bool(equals) == (name in _SWITCHES) or (equals and not value):
            example = "write restart=manual, elastic" if name in _NAMES else nearest(name, _NAMES)
            raise InputError("conditions", word, "is no condition with its value", example)
        given[name] = value if equals else True
    return conditions_of(given)
