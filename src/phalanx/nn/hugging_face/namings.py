"""How Hugging Face files name the parameters of each model family: a row of namings.toml, most like another."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from phalanx.spec.rows import Rows, Table, record

_FILE = Path(__file__).with_name("namings.toml")


@dataclass(frozen=True)
class Joined:
    """Modules of ours whose tensors are one in a file, in order: once, or in every one of its groups."""

    tensor: str
    parts: tuple[str, ...]
    groups: Literal["", "heads", "key heads"] = ""


@dataclass(frozen=True)
class Naming:
    """Names of a model family: our module, or parameter -> the Hugging Face one, with a star for the number of an
    expert. `base` is the prefix of all but the head, and may be missing in a file."""

    base: str
    block: str
    outside: dict[str, str]
    inside: dict[str, str]
    joined: tuple[Joined, ...] = ()
    transposed: bool = False  # matrices of blocks are (in, out)
    buffers: str = r"(?!)"  # non-parameters in older files
    balance: str = ""  # the experts' balance biases
    recurrent: Naming | None = None  # blocks with a recurrence in place of attention
    less_one: tuple[str, ...] = ()  # modules whose weights are stored less one
    also: tuple[str, ...] = ("", "")  # a part of names in other files, and what it is here
    spread: tuple[str, ...] = ()  # vectors (n,) that are stored as (1, 1, n, 1)


@cache
def _modules() -> Table:
    return tomllib.loads(_FILE.read_text())["modules"]  # type: ignore[no-any-return]


def _naming(name: str, table: Table) -> Naming:
    """Return a row with the modules that it lists; `recurrent` states what differs there."""
    stated = {field: value for field, value in table.items() if field != "recurrent"}
    modules = {
        field: {ours: theirs for part in table[field] for ours, theirs in _modules()[part].items()}
        for field in ("outside", "inside")
    }
    naming = record(Naming)(name, stated | modules)
    differs = table.get("recurrent")
    return naming if differs is None else replace(naming, recurrent=_naming(name, stated | differs))


NAMINGS = Rows(_FILE, _naming, lambda name: name != "modules")
"""The rows by model_type."""
