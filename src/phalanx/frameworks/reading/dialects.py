"""Programs that take another framework's flags under other names, or with other defaults: rows of dialects.toml."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class Dialect:
    """A program's flags: a row of dialects.toml, which says what its fields are."""

    title: str
    programs: tuple[str, ...]
    reads: str
    source: str
    words: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def translated(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return flags as the framework that reads them has them. A rank of 0 is no adapter."""
        plain = {name.replace("-", "_"): value for name, value in args.items()}
        named = {self.renamed.get(name, name): value for name, value in plain.items() if name != self.model}
        return {
            **self.defaults,
            **{name: value for name, value in named.items() if (name, value) != ("lora_rank", 0)},
        }

    def model_of(self, args: Mapping[str, Any]) -> str:
        """Return the name of the model that flags state, "" where they do not."""
        return str(args.get(self.model) or "") if self.model else ""


@cache
def _dialects() -> tuple[Dialect, ...]:
    return tuple(Rows(Path(__file__).with_name("dialects.toml"), record(Dialect, "title")).values())


def dialect_of(program: str, positional: Sequence[str], flags: Collection[str] = ()) -> Dialect | None:
    """Return the dialect of a program by its name and the words before its flags, or by its flags where it has no
    name; None for others."""
    name = re.sub(r"\.py$", "", program)
    for row in _dialects():
        if any(re.search(rf"(^|[./]){p}$", name) for p in row.programs) and (
            not row.words or (positional and positional[0] in row.words)
        ):
            return row
        if not name and row.flags and {flag.replace("-", "_") for flag in flags}.issuperset(row.flags):
            return row
    return None
