"""The job file: one TOML file with [model] [cluster] [job] [strategy] [train].

A file becomes a `JobFile` of frozen specs, or an InputError that names the field. `plan.json` holds the same tables,
so a run can be resumed from its own record.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

from phalanx.spec.documents import read_toml
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import Job, Train
from phalanx.spec.model.families import complete, from_hugging_face
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import MODEL_FIELDS, ModelSpec
from phalanx.spec.ranges import FilePath, Name, Ranks, require_ranges
from phalanx.spec.strategy import spec as strategies
from phalanx.spec.strategy.spec import Strategy

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


@dataclass(frozen=True)
class ClusterChoice:
    """Which cluster, and how much of it. Raises InputError for choices that contradict each other."""

    preset: Name | None = None
    """A name from cluster/presets.py, or `local`: this machine, measured. Local if there is no `file` either."""
    file: FilePath | None = None
    """Path of a cluster TOML; excludes `preset`."""
    nodes: Ranks = 1
    """Nodes of a preset."""
    ranks: Ranks | None = None
    """Ranks to run on this machine, with preset `local`; None: chosen by the planner."""

    def __post_init__(self) -> None:
        require_ranges(self, "cluster")
        if "" in (self.preset, self.file):
            name = "preset" if self.preset == "" else "file"
            raise InputError(f"cluster.{name}", "", "is empty", "leave it out to take this machine")
        if self.preset and self.file:
            raise InputError("cluster", None, "has both preset and file", "keep one")
        if self.preset not in (None, "local") and self.ranks is not None:
            raise InputError("cluster.ranks", self.ranks, "is for preset = 'local'", "use cluster.nodes")
        if self.preset == "local" and self.nodes != 1:
            raise InputError(
                "cluster.nodes", self.nodes, "this machine is one node", "to use more, start torchrun on every node"
            )


@dataclass(frozen=True)
class JobFile:
    """A job file, checked: one field per table."""

    model: ModelSpec
    cluster: ClusterChoice
    job: Job
    strategy: Strategy | None
    """None for "auto": the planner chooses."""
    train: Train
    notes: tuple[str, ...] = ()
    """Notes to show to the user once."""


TABLES = ("model", "cluster", "job", "strategy", "train")


def load(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Read a job file and apply overrides such as `strategy.dp=2`.

    A relative path in it (data, tokenizer, weights, config, cluster file) is looked up in the file's own folder, then
    in the working directory. Raises InputError.
    """
    if path.suffix == ".json":
        remedy = "phalanx train, explain and lint read plans"
        raise InputError("job file", str(path), "is JSON, as plans are; a job file is TOML", remedy)
    tables = override(read_toml(path, "job file"), overrides)
    train = tables.setdefault("train", {})
    if isinstance(train, dict) and not train.get("name"):
        train["name"] = path.stem
    return from_tables(tables, path.parent)


def override(tables: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `table.field=value` assignments to tables, in place, and return them. Raises InputError."""
    for item in overrides:
        target, equals, text = item.partition("=")
        *parents, last = target.strip().split(".")
        if not equals or (not parents and last != "strategy"):
            raise InputError("set", item, "is not of the form table.field=value", "e.g. strategy.dp=2")
        table: Any = tables
        for name in parents:
            table = table.setdefault(name, {})
            if table == "auto" and name == "strategy":
                table = tables["strategy"] = {}
            elif isinstance(table, str) and name == "strategy":
                table = tables["strategy"] = strategies.parse(table)
            if not isinstance(table, dict):
                raise InputError("set", item, f"{name!r} is not a table")
        table[last] = text.strip() if not parents else _value(text.strip())
    return tables


def _value(text: str) -> Any:
    """The value of an override: TOML, or else a plain word."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def from_tables(tables: Mapping[str, Any], folder: Path) -> JobFile:
    """Build a JobFile from its five tables; `folder` is where their relative paths are looked up first.

    Raises InputError.
    """
    # Known tables.
    for name in tables:
        if name not in TABLES:
            raise InputError(f"[{name}]", None, "no such table", nearest(name, TABLES))
    if "job" not in tables:
        raise InputError("[job]", None, "is missing", "it needs global_batch and seq")
    # Build each, with paths relative to the file's folder.
    model, notes = make_model(tables.get("model", {}), folder)
    cluster = build(ClusterChoice, tables.get("cluster", {"preset": "local"}), "cluster")
    if not cluster.preset and not cluster.file:
        cluster = replace(cluster, preset="local")
    if cluster.file:
        cluster = replace(cluster, file=str(_resolved(cluster.file, folder)))
    train = build(Train, tables.get("train", {}), "train")
    if train.data != "austen":
        prefix = f"{train.data}.idx"  # Megatron's pair of files, given by their common name
        path = _resolved(prefix, folder) if (folder / prefix).exists() else _resolved(train.data, folder)
        train = replace(train, data=str(path))
    if train.tokenizer:
        train = replace(train, tokenizer=str(_resolved(train.tokenizer, folder)))
    if train.weights:
        train = replace(train, weights=str(_resolved(train.weights, folder)))
    return JobFile(
        model=model,
        cluster=cluster,
        job=build(Job, tables["job"], "job"),
        strategy=make_strategy(tables.get("strategy", "auto")),
        train=train,
        notes=tuple(notes),
    )


def to_tables(file: JobFile) -> dict[str, Any]:
    """The tables that `from_tables` reads back to an equal JobFile."""
    return {
        "model": asdict(file.model),
        "cluster": asdict(file.cluster),
        "job": asdict(file.job),
        "strategy": "auto" if file.strategy is None else asdict(file.strategy),
        "train": asdict(file.train),
    }


def make_strategy(table: Any) -> Strategy | None:
    """Build a Strategy from a table or a line such as `dp=4,zero=3`; None for "auto". Raises InputError."""
    if table == "auto":
        return None
    if isinstance(table, str):
        table = strategies.parse(table)
    if isinstance(table, dict) and table.get("sp") in (0, 1):
        table = {**table, "sp": bool(table["sp"])}
    return build(Strategy, table, "strategy")


def build(kind: type[T], table: Any, table_name: str) -> T:
    """Build a frozen dataclass from a table, strictly.

    `table_name` is the table's name in messages. Raises InputError for unknown and missing keys, and for wrong types.
    """
    from pydantic import ValidationError

    _require_known_keys(kind, table, table_name)
    try:
        # Through JSON, because pydantic's strict mode then refuses "2" for 2, yet takes lists for tuples.
        text = json.dumps(table)
    except TypeError as error:
        raise InputError(table_name, None, f"holds a value of a type that no field has ({error})") from None
    except RecursionError:
        raise InputError(table_name, None, "is nested too deep") from None
    try:
        cls: Any = kind  # hashable, which mypy does not see of type[T]
        return cast("T", _adapter(cls).validate_json(text, strict=True))
    except ValidationError as error:
        # For a union (`float or "auto"`) every branch reports an error; the first is as good as any.
        # Of several mechanisms, the one that the table's `kind` names reports no error at `kind`.
        problems = error.errors()
        kinds = {e["loc"][:-1] for e in problems if e["type"] == "literal_error" and e["loc"][-1:] == ("kind",)}
        first = next((e for e in problems if e["loc"][:-1] not in kinds), problems[0])
        name = ".".join([table_name, *_field_path(kind, first["loc"])])
        if first["type"] == "missing":
            raise InputError(name, None, "is missing") from None
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, InputError):
            raise inner from None
        message = first["msg"].removeprefix("Input ")
        raise InputError(name, first["input"], message) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the pydantic adapter of a type, cached: creating one takes longer than reading most files."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _field_path(kind: Any, loc: tuple[str | int, ...]) -> list[str]:
    """Return the field names in pydantic's location, without its names of union branches."""
    path: list[str] = []
    kinds = [kind]
    for part in loc:
        if isinstance(part, int):
            path.append(str(part))
            continue
        named = [k for k in kinds if part in {f.name for f in fields(k)}]
        if named:
            path.append(part)
            kinds = [k for owner in named for k in _dataclasses_in(_hints(owner)[part])]
    return path


def _dataclasses_in(hint: Any) -> list[Any]:
    """Return the dataclasses in a type hint, alone or inside unions and tuples."""
    return [hint] if is_dataclass(hint) else [k for part in get_args(hint) for k in _dataclasses_in(part)]


def _chosen(kinds: Sequence[Any], table: Mapping[str, Any], name: str) -> Any:
    """Return the dataclass, of several, that a table's `kind` names. Raises InputError for an unknown kind."""
    if len(kinds) == 1:
        return kinds[0]
    by_kind = {str(next(f.default for f in fields(k) if f.name == "kind")): k for k in kinds}
    said = table.get("kind", "")
    if said not in by_kind:
        raise InputError(
            f"{name}.kind", said, "is not a mechanism" if said else "is missing", nearest(str(said), by_kind)
        )
    return by_kind[said]


def _require_known_keys(kind: Any, table: Any, name: str) -> None:
    """Raise InputError for unknown keys at any depth, and for values that are not tables."""
    if not isinstance(table, Mapping):
        raise InputError(name, table, "must be a table of key = value")
    hints = _hints(kind)
    names = {f.name for f in fields(kind)}
    for key, inner in table.items():
        if key not in names:
            raise InputError(f"{name}.{key}", None, "no such field", nearest(str(key), names))
        nested = _dataclasses_in(hints[key])
        if nested:
            for i, part in enumerate(inner if isinstance(inner, list | tuple) else [inner]):
                if isinstance(part, Mapping):
                    place = f"{name}.{key}" + (f".{i}" if isinstance(inner, list | tuple) else "")
                    _require_known_keys(_chosen(nested, part, place), part, place)


def make_model(table: Any, folder: Path) -> tuple[ModelSpec, list[str]]:
    """Build a ModelSpec from `preset`, `config` or a family with sizes; single fields override each of these.

    Returns it with notes for the user. Raises InputError.
    """
    if not isinstance(table, Mapping):
        raise InputError("model", table, "must be a table of key = value")
    user_fields: dict[str, Any] = dict(table)
    notes: list[str] = []
    name, config = user_fields.pop("preset", None), user_fields.pop("config", None)
    if name is not None and config is not None:
        raise InputError("model", None, "has both preset and config", "keep one")
    for key in user_fields:
        if key not in MODEL_FIELDS:
            raise InputError(f"model.{key}", None, "no such field", nearest(key, [*MODEL_FIELDS, "preset"]))
    if name is not None:
        from_preset = complete(preset(str(name)))
        if not user_fields and not any(isinstance(part, Mapping | list) for part in from_preset.values()):
            return ModelSpec(**from_preset), notes  # trusted: skip the strict reading, which takes 0.1 s
        user_fields = {**preset(str(name)), **user_fields}
    elif config is not None:
        from_config, notes = from_hugging_face(_resolved(str(config), folder))
        user_fields = {**from_config, **user_fields}
    return build(ModelSpec, complete(user_fields), "model"), notes


def _resolved(name: str, folder: Path) -> Path:
    """Resolve a path named in a file: in that file's folder if it exists there, else in the working directory."""
    sibling = folder / name
    return (sibling if sibling.exists() else Path(name)).absolute()
