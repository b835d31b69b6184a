"""The keys of a framework's configuration: which key sets which field, in which words, and to what effect.

A key of a field stands once: with the fact of a Strategy's field or an option, in facts.toml, else in the folder's
keys.toml, by name: `field` (table.field) and `words`. What every key changes is in verdicts.toml (verdicts.py).
Readers ask a table for the key of a field and the value that a word means, writers for the key and the word.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from phalanx.frameworks import verdicts
from phalanx.frameworks.registry import STACKS
from phalanx.frameworks.stack import in_full
from phalanx.frameworks.verdicts import Verdict
from phalanx.spec.errors import InputError
from phalanx.spec.rows import record

_ROOT = Path(__file__).parent
_TRUTHS = {"true": True, "false": False}
"""Words that are no text in a file."""


@dataclass(frozen=True)
class Key:
    """A key by its path in the file, or a flag."""

    name: str
    field: str = ""
    """table.field that it sets, such as strategy.tp; "": none."""
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its word -> the field's value, where they differ."""
    source: str = ""
    """file:line at the commit of the framework's stacks."""


@dataclass(frozen=True, eq=False)
class KeyTable:
    """The keys of one framework."""

    keys: tuple[Key, ...]
    verdicts: Mapping[str, Verdict]
    """What each key changes, by its name or by its path from some table on."""

    def __getitem__(self, name: str) -> str:
        """Return the key that sets a field. Raises KeyError where none does."""
        return self._by_field[name].name

    @cached_property
    def _by_field(self) -> dict[str, Key]:
        return {key.field: key for key in reversed(self.keys)}

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name that the framework has, without the tables above it."""
        names = (*(key.name for key in self.keys), *(name.removesuffix(".*") for name in self.verdicts))
        return frozenset(map(plain, names))

    @cached_property
    def layout(self) -> Mapping[str, str]:
        """Name without tables -> whole key, of the keys that set the layout and of the tables that hold degrees."""
        degrees = [key.name for key in self.keys if _is_degree(key)]
        tables = [name.rpartition(".")[0] for name in degrees if "." in name]
        of_verdicts = [name.removesuffix(".*") for name, known in self.verdicts.items() if known.effect == "layout"]
        return {plain(name): name for name in (*tables, *of_verdicts, *degrees)}

    @cached_property
    def switches(self) -> frozenset[str]:
        """Flags of its command line that take no value."""
        return frozenset(name for name, verdict in self.verdicts.items() if verdict.switch)

    def verdict(self, path: str) -> Verdict | None:
        """Return the verdict of the key at a dotted path; None for an unknown key or one that is not judged. The
        longest known end of the path decides, then a verdict about a whole table (`NAME.*`), then the bare name."""
        parts = path.replace("-", "_").split(".")
        ends = [".".join(parts[n:]) for n in range(len(parts))]
        tables = (f"{'.'.join(parts[: n + 1])}.*" for n in range(len(parts) - 1))
        names = (*ends[:-1], *tables, ends[-1])
        known = next((self.verdicts[name] for name in names if name in self.verdicts), None)
        return known if known is not None and known.effect else None

    def fields(self, table: str) -> dict[str, str]:
        """Return the keys of a table's fields, by field without the table."""
        start = f"{table}."
        return {key.field.removeprefix(start): key.name for key in self.keys if key.field.startswith(start)}

    def values(self, name: str) -> tuple[Any, ...]:
        """Return the values that a field can be given: those its keys have words for."""
        return tuple(dict.fromkeys(value for key in self.keys if key.field == name for value in key.words.values()))

    def value(self, name: str, word: object) -> Any:
        """Return the value of a field that a word of its key means, in any case; None for an unknown word."""
        words = {text.lower(): value for key in self.keys if key.field == name for text, value in key.words.items()}
        return words.get(str(word).lower())

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields as a file states them, key -> word, or key -> value where the key has no words. Raises
        KeyError where no key sets a field, or has no word for its value."""
        return dict(self.setting(name, value) for name, value in values.items())

    def setting(self, name: str, value: Any) -> tuple[str, Any]:
        """Return the key of a field with the word for its value, as `write`."""
        rows = [key for key in self.keys if key.field == name]
        for key in rows:
            for word, meaning in key.words.items():
                if meaning == value and type(meaning) is type(value):
                    return key.name, _TRUTHS.get(word, word)
        for key in rows:
            if not key.words:
                return key.name, value
        raise KeyError(f"no key has a word for {name} = {value}")


def _is_degree(key: Key) -> bool:
    table, _, name = key.field.partition(".")
    return table == "strategy" and name in ("tp", "pp", "cp", "ep", "zero")


def plain(name: str) -> str:
    """Return a key as the framework's source has it: without its table, without dashes."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


def optimizer_word(keys: KeyTable, name: str, title: str) -> str:
    """Return what a framework calls an optimizer. Raises InputError if none is exported to `title` by that name."""
    words = keys.values("job.optimizer.name")
    if name not in words:
        remedy = f"use {' or '.join(words)}"
        raise InputError("job.optimizer.name", name, f"is not exported to {title}", remedy)
    return str(keys.setting("job.optimizer.name", name)[1])


@cache
def key_table(framework: str) -> KeyTable:
    """Return the keys of a framework by the name of its folder. Raises ValueError for a row with an unknown part."""
    keys: dict[tuple[str, str], Key] = {}

    def add(key: Key) -> None:
        keys.setdefault((key.name, key.field), key)

    for stack in (stack for stack in STACKS.values() if stack.framework == framework):
        for table, entries in (("strategy", stack.strategy), ("options", stack.options)):
            for name, entry in entries.items():
                if entry.key:
                    add(Key(entry.key, f"{table}.{name}", entry.words, entry.source))
    make_key = record(Key, "name")
    path = _ROOT / framework / "keys.toml"
    document = tomllib.loads(path.read_text()) if path.is_file() else {}
    files = document.pop("files", {})
    for name, row in document.items():
        add(make_key(name, row | {"source": in_full(row.get("source", ""), files)}))
    return KeyTable(tuple(keys.values()), verdicts.load(_ROOT / framework / "verdicts.toml"))
