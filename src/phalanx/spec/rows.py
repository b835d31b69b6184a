"""Read rows of facts that ship as TOML: a table of the file is a row, read when one is first asked for.

    ["H800"]                a row, by its name
    like = "H100"           has every fact of another row that it does not state itself
    note = "..."            why a value is what it is, for readers of the file; no fact unless the rows have a `note`
    memory_mib = 81559      a field NAME_bytes in MiB
    double = false          a figure that does not exist: None, where the field may be None

A row that lacks a fact, has an unknown one or one of another type raises ValueError with file, row and field.
"""

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Table = Mapping[str, Any]
_MIB = 2**20


class Rows(Mapping[str, T]):
    """The rows of a file by name, in its order. `make(name, table)` makes a row; `among(name)` selects rows by name,
    where a file has several kinds."""

    def __init__(
        self, path: Path, make: Callable[[str, Table], T], among: Callable[[str], bool] = lambda name: True
    ) -> None:
        self._path, self._make, self._among = path, make, among

    @cached_property
    def _rows(self) -> dict[str, T]:
        tables = tomllib.loads(self._path.read_text())
        try:
            return {name: self._make(name, _in_full(name, tables)) for name in tables if self._among(name)}
        except ValueError as error:
            raise ValueError(f"{self._path.name}: {error}") from None

    def __getitem__(self, name: str) -> T:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def record(cls: type[T], key: str = "") -> Callable[[str, Table], T]:
    """Return a function that makes a frozen dataclass of a row; the field `key`, if given, gets the row's name."""

    def make(name: str, table: Table) -> T:
        return _build(cls, name, {key: name, **table} if key else table)

    return make


def require_fields(row: str, table: Table, known: Collection[str], required: Collection[str]) -> None:
    """Require that a row has the fields that are required, and no unknown one. Raises ValueError."""
    if missing := [name for name in required if name not in table]:
        raise ValueError(f"row {row}: {missing[0]} is missing")
    if unknown := [name for name in table if name not in known]:
        raise ValueError(f"row {row}: {unknown[0]} is not a field of it")


def _in_full(name: str, tables: Mapping[str, Table]) -> dict[str, Any]:
    """Return a row with the facts inherited through `like`. A note is not inherited."""
    chain = [name]
    while "like" in tables[chain[-1]]:
        parent = tables[chain[-1]]["like"]
        if parent not in tables or parent in chain:
            raise ValueError(f"row {name}: like = {parent!r} is not another row")
        chain.append(parent)
    inherited: dict[str, Any] = {}
    for ancestor in reversed(chain[1:]):
        inherited |= tables[ancestor]
    inherited.pop("note", None)
    return {field: value for field, value in {**inherited, **tables[name]}.items() if field != "like"}


@cache
def _fields(cls: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the types of a dataclass's fields, and which have no default."""
    types = get_type_hints(cls)
    required = (f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)
    return {field.name: types[field.name] for field in fields(cls)}, tuple(required)


def _build(cls: type[T], row: str, table: Table) -> T:
    """Make a frozen dataclass of a table, each field of its type."""
    row_type: Any = cls  # hashable, which mypy does not see of type[T]
    types, required = _fields(row_type)
    facts = dict(_in_bytes(table, types))
    if "note" not in types:
        facts.pop("note", None)
    require_fields(row, facts, types, required)
    return cls(**{name: _value(types[name], value, row, name) for name, value in facts.items()})


def _in_bytes(table: Table, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the facts of a table, those in MiB in bytes."""
    for name, value in table.items():
        in_bytes = f"{name.removesuffix('_mib')}_bytes"
        stated_in_mib = name.endswith("_mib") and in_bytes in known and isinstance(value, int | float)
        yield (in_bytes, value * _MIB) if stated_in_mib else (name, value)


def _value(kind: Any, value: Any, row: str, field: str) -> Any:
    """Return a value as its field's type has it. Raises ValueError for one of another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and NoneType in arguments:
        if value is False:
            return None
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return _value(kind, value, row, field)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], entry, row, field) for entry in value)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _build(kind, f"{row}, {field}", value)
    if origin is Literal:
        fits = value in arguments
    elif kind in (int, float):
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
    else:
        fits = isinstance(value, origin or kind)
    if not fits:
        raise ValueError(f"row {row}: {field} = {value!r} is no {getattr(kind, '__name__', kind)}")
    return value
