"""Files and programs that no reader is for, recognized so that an error can say what to give instead: rows of
others.toml."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class Unread:
    """A row of others.toml, which describes the fields."""

    title: str
    does: str
    give: str
    programs: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    least: int = 1
    text: str = ""
    engine: str = ""
    stacks: Mapping[str, str] = field(default_factory=dict)

    def error(self, file: str) -> InputError:
        """Return the error about such a file."""
        return InputError("file", file, self.does, self.give.format(file=file))


@cache
def _rows() -> tuple[Unread, ...]:
    return tuple(Rows(Path(__file__).with_name("others.toml"), record(Unread, "title")).values())


def program(name: str, words: tuple[str, ...], args: Mapping[str, Any]) -> Unread | None:
    """Return the row of a program, by its name, its name with the first word behind it, or its flags; None for a
    program that is not listed."""
    last = re.sub(r"\.py$", "", name.rpartition("/")[2])
    names = {name, last, last.rpartition(".")[2], *([f"{last} {words[0]}"] if words else [])}
    for row in _rows():
        by_name = any(re.fullmatch(pattern, one) for pattern in row.programs for one in names)
        if by_name or any(re.fullmatch(pattern, str(args.get(flag, ""))) for flag, pattern in row.flags.items()):
            return row
    return None


def written(text: str) -> Unread | None:
    """Return the row of a text that starts nothing; None for one that is not listed."""
    return next((row for row in _rows() if row.text and re.search(row.text, text)), None)


def tables(config: Mapping[str, Any]) -> Unread | None:
    """Return the row of tables, by dotted paths of their keys; None for tables that are not listed."""
    for row in _rows():
        held = [key for key in row.keys if _at(config, key) is not _NOTHING]
        if held and len(held) >= row.least:
            stack = row.stacks.get(str(_at(config, f"{held[0]}.{row.engine}")))
            return replace(row, give=row.give.replace("--stack S ", f"--stack {stack} ")) if stack else row
    return None


_NOTHING = object()


def _at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path with dots, or _NOTHING."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _NOTHING
        value = value[name]
    return value
