"""The rows of families.toml: what each model_type fixes, and where its config.json keeps the rest.

like         another row, whose entries this one inherits; an empty text removes one
fixed        fields of ModelSpec that the family fixes: also the defaults of a user who writes sizes
routing      fields of Experts that it fixes
needs        mechanisms that it requires: experts, latent
keys         field of ModelSpec -> expression, or { of = expression, value = field }
experts, latent, multipliers   the same for the fields of those
rope         theta and scaling where the config has none; `partial`: it may rotate a part of each head; `kinds`:
             further kinds of scaling, which are named, not run
mixers       name -> a mechanism of blocks/ and its sizes
layer        expressions for the sublayers of layer i, as words of `words` or of a pattern, joined by +
words        the config's name of a sublayer -> its name in a pattern
only         key -> the values that are understood, the default first
only_priced  a feature that is priced but that our decoder lacks -> expression: whether a config has it
refused      a feature that no mechanism describes -> expression: whether a config has it
neutral      keys that change no size, cost or result that is priced
part, inner  of a vision-language model: the table of its text part, and the type of that
any_inner    whether that table may state any other type
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.spec.model.hugging_face.expressions import names
from phalanx.spec.model.hugging_face.reading import Fields


@dataclass(frozen=True)
class FamilyRow:
    """One model_type, as the head of this file explains."""

    fixed: Fields = field(default_factory=dict)
    routing: Fields = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    keys: Fields = field(default_factory=dict)
    experts: Fields = field(default_factory=dict)
    latent: Fields = field(default_factory=dict)
    multipliers: Fields = field(default_factory=dict)
    rope: Fields = field(default_factory=dict)
    mixers: dict[str, Fields] = field(default_factory=dict)
    layer: tuple[str, ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    only: dict[str, list[Any]] = field(default_factory=dict)
    only_priced: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Any] = field(default_factory=dict)
    neutral: tuple[str, ...] = ()
    part: str = ""
    inner: str = ""
    any_inner: bool = False

    @property
    def reads(self) -> bool:
        """Whether it says how to read a config.json."""
        return bool(self.keys or self.part)

    @cached_property
    def known(self) -> frozenset[str]:
        """The keys of a config.json that the row reads or knows to be neutral."""
        keys = {*self.only, *self.neutral}
        tables = self.experts, self.latent, self.multipliers
        for part in (self.keys, *tables, self.mixers, self.layer, self.only_priced, self.refused):
            for text in _texts(part):
                keys |= names(text)
        return frozenset(keys)


def _texts(part: Any) -> Iterator[str]:
    """Yield the expressions of a part of a row."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, Mapping):
        yield from (part["of"],) if "of" in part else (t for value in part.values() for t in _texts(value))
    elif isinstance(part, list | tuple):
        yield from (t for value in part for t in _texts(value))


class Families(Mapping[str, FamilyRow]):
    """The rows of a file by model_type, read when one is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, dict[str, FamilyRow]()

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        return tomllib.loads(self._path.read_text())

    def __getitem__(self, name: str) -> FamilyRow:
        if name not in self._rows:
            table = _in_full(name, self._tables)
            if unknown := set(table) - {f.name for f in fields(FamilyRow)}:
                raise ValueError(f"{self._path.name}: row {name}: {min(unknown)} is not a field of it")
            lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
            self._rows[name] = FamilyRow(**{**table, **lists})
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def _in_full(name: str, tables: Mapping[str, Any]) -> Fields:
    """Return a row with the entries inherited through `like`. Raises KeyError for a row that does not exist."""
    table = tables[name]
    own = {key: value for key, value in table.items() if key != "like"}
    return _merged(_in_full(table["like"], tables), own) if "like" in table else own


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Fields:
    """Return table `below` with the entries of `above` put over it, at any depth; an empty text removes an entry."""
    merged = dict(below)
    for key, value in above.items():
        if value == "" and isinstance(value, str):
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping) and "of" not in value:
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged
