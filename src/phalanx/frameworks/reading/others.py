"""What people give that no reader takes, each by its name with what to give in its place: rows of others.toml."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class Unread:
    """A row of others.toml, which says what its fields are."""

    title: str
    does: str
    give: str
    programs: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    least: int = 1

    def error(self, file: str) -> InputError:
        """The refusal of a file."""
        return InputError("file", file, self.does, self.give.format(file=file))


@cache
def _rows() -> tuple[Unread, ...]:
    return tuple(Rows(Path(__file__).with_name("others.toml"), record(Unread, "title")).values())


def program(name: str, words: tuple[str, ...], args: Mapping[str, Any]) -> Unread | None:
    """Return what a program is that is not read, by its name, the word behind it or its flags; None for others."""
    last = re.sub(r"\.py$", "", name.rpartition("/")[2])
    called = {name, last, last.rpartition(".")[2], *([f"{last} {words[0]}"] if words else [])}
    return next(
        (
            row
            for row in _rows()
            if any(re.fullmatch(pattern, one) for pattern in row.programs for one in called)
            or any(re.fullmatch(pattern, str(args.get(flag, ""))) for flag, pattern in row.flags.items())
        ),
        None,
    )


def tables(config: Mapping[str, Any]) -> Unread | None:
    """Return what tables are that are not read, by keys at their top or by paths; None for others."""
    return next((row for row in _rows() if row.keys and sum(_has(config, k) for k in row.keys) >= row.least), None)


def _has(config: Mapping[str, Any], path: str) -> bool:
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
