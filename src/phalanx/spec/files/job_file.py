"""What a user writes: one TOML file with [model] [cluster] [job] [strategy] [train].

A file becomes a `JobFile` of frozen specs, or an InputError that names the field. `plan.json` holds the same
tables, so a run can be taken up again from its own record.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import Job, Train
from phalanx.spec.model.families import complete
from phalanx.spec.model.from_hugging_face import from_hugging_face
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import MODEL_FIELDS, ModelSpec
from phalanx.spec.strategy import spec as strategies
from phalanx.spec.strategy.spec import Strategy

T = TypeVar("T")


@dataclass(frozen=True)
class ClusterChoice:
    """Which cluster: a preset (`local`: this machine, measured) or a cluster TOML, and how much of it."""

    preset: str | None = None
    file: str | None = None
    nodes: int = 1
    ranks: int | None = None

    def __post_init__(self) -> None:
        if self.preset and self.file:
            raise InputError("cluster", None, "has both preset and file", "keep one")
        if self.preset not in (None, "local") and self.ranks is not None:
            raise InputError("cluster.ranks", self.ranks, "is for preset = 'local'", "use cluster.nodes")
        if self.preset == "local" and self.nodes != 1:
            raise InputError("cluster.nodes", self.nodes, "this machine is one node", "start torchrun on every node")
        if self.nodes < 1 or (self.ranks is not None and self.ranks < 1):
            name = "nodes" if self.nodes < 1 else "ranks"
            raise InputError(f"cluster.{name}", getattr(self, name), "must be at least 1")


@dataclass(frozen=True)
class JobFile:
    """A job file, checked. `strategy` is None for "auto"; `notes` are lines that the user should see once."""

    model: ModelSpec
    cluster: ClusterChoice
    job: Job
    strategy: Strategy | None
    train: Train
    notes: tuple[str, ...] = ()


TABLES = ("model", "cluster", "job", "strategy", "train")


def load(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Read a job file, with `--set` overrides such as `strategy.dp=2` laid over it.

    Relative paths in it (data, config, cluster file) are taken from the file's own folder where they exist
    there, else from the working directory. Raises InputError.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise InputError("job file", str(path), "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("job file", str(path), f"cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        if path.suffix == ".json":
            mend = "phalanx train, explain and lint read plans"
            raise InputError("job file", str(path), "is JSON, as plans are; a job file is TOML", mend) from None
        raise InputError("job file", str(path), f"is not TOML ({error})") from None
    tables = override(tables, overrides)
    train = tables.setdefault("train", {})
    if isinstance(train, dict) and not train.get("name"):
        train["name"] = path.stem
    return from_tables(tables, path.parent)


def override(tables: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Tables with `table.field=value` assignments laid over them."""
    for item in overrides:
        path, equals, text = item.partition("=")
        *parents, last = path.strip().split(".")
        if not equals or (not parents and last != "strategy"):
            raise InputError("--set", item, "is not of the form table.field=value", "e.g. strategy.dp=2")
        table: Any = tables
        for name in parents:
            table = table.setdefault(name, {})
            if table == "auto" and name == "strategy":
                table = tables["strategy"] = {}
            elif isinstance(table, str) and name == "strategy":
                table = tables["strategy"] = strategies.parse(table)
            if not isinstance(table, dict):
                raise InputError("--set", item, f"{name!r} is not a table")
        table[last] = text.strip() if not parents else _value(text.strip())
    return tables


def _value(text: str) -> Any:
    """What stands behind `=` in an override: TOML, or else a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def from_tables(tables: Mapping[str, Any], folder: Path) -> JobFile:
    """A JobFile from its five tables. Raises InputError."""
    for name in tables:
        if name not in TABLES:
            raise InputError(f"[{name}]", None, "no such table", nearest(name, TABLES))
    if "job" not in tables:
        raise InputError("[job]", None, "is missing", "it needs global_batch and seq")
    model, notes = make_model(tables.get("model", {}), folder)
    cluster = build(ClusterChoice, tables.get("cluster", {"preset": "local"}), "cluster")
    if not cluster.preset and not cluster.file:
        cluster = replace(cluster, preset="local")
    if cluster.file:
        cluster = replace(cluster, file=str(_beside(cluster.file, folder)))
    train = build(Train, tables.get("train", {}), "train")
    if train.data != "austen":
        prefix = f"{train.data}.idx"  # of a pair of files that is named by what their names share
        path = _beside(prefix, folder) if (folder / prefix).exists() else _beside(train.data, folder)
        train = replace(train, data=str(path))
    if train.tokenizer:
        train = replace(train, tokenizer=str(_beside(train.tokenizer, folder)))
    if train.weights:
        train = replace(train, weights=str(_beside(train.weights, folder)))
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


def make_strategy(given: Any) -> Strategy | None:
    """A Strategy from a table or a line; None for "auto"."""
    if given == "auto":
        return None
    table = strategies.parse(given) if isinstance(given, str) else given
    if isinstance(table, dict) and table.get("sp") in (0, 1):
        table = {**table, "sp": bool(table["sp"])}
    return build(Strategy, table, "strategy")


def cluster_from_toml(path: Path) -> ClusterSpec:
    """A ClusterSpec from a TOML file with its fields. Raises InputError."""
    try:
        return build(ClusterSpec, tomllib.loads(path.read_text()), "cluster")
    except FileNotFoundError:
        raise InputError("cluster.file", str(path), "no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError("cluster.file", str(path), f"cannot be read ({error})") from None


def build(kind: type[T], table: Any, where: str) -> T:
    """A frozen dataclass from a table, strictly: unknown keys, wrong types and missing keys are refused."""
    from pydantic import TypeAdapter, ValidationError

    _known_keys(kind, table, where)
    try:
        # JSON is pydantic's strict mode for plain tables: no "2" for 2, but lists for tuples.
        text = json.dumps(table)
    except TypeError as error:
        raise InputError(where, None, f"holds a value of a type that no field has ({error})") from None
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        # Of a union (`float or "auto"`) every branch reports; the first is as good as any.
        first = error.errors()[0]
        name = ".".join([where, *_field_path(kind, first["loc"])])
        if first["type"] == "missing":
            raise InputError(name, None, "is missing") from None
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, InputError):
            raise inner from None
        message = first["msg"].removeprefix("Input ")
        raise InputError(name, first["input"], message) from None


def _field_path(kind: Any, loc: tuple[str | int, ...]) -> list[str]:
    """pydantic's location without the names of union branches."""
    path: list[str] = []
    for part in loc:
        if isinstance(part, int):
            path.append(str(part))
        elif is_dataclass(kind) and part in {f.name for f in fields(kind)}:
            path.append(part)
            kind = _dataclass_in(get_type_hints(kind)[part])
    return path


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a hint names, alone or as a part of a union or tuple."""
    return hint if is_dataclass(hint) else next((a for a in get_args(hint) if is_dataclass(a)), None)


def _known_keys(kind: Any, table: Any, where: str) -> None:
    """Refuse keys that no field has, at any depth, and tables that are none."""
    if not isinstance(table, Mapping):
        raise InputError(where, table, "must be a table of key = value")
    hints = get_type_hints(kind)
    names = {f.name for f in fields(kind)}
    for key, inner in table.items():
        if key not in names:
            raise InputError(f"{where}.{key}", None, "no such field", nearest(str(key), names))
        if isinstance(inner, float) and not math.isfinite(inner):
            raise InputError(f"{where}.{key}", inner, "must be a finite number")
        nested = _dataclass_in(hints[key])
        if nested is not None:
            for i, part in enumerate(inner if isinstance(inner, list | tuple) else [inner]):
                if isinstance(part, Mapping):
                    place = f"{where}.{key}" + (f".{i}" if isinstance(inner, list | tuple) else "")
                    _known_keys(nested, part, place)


def make_model(table: Any, folder: Path) -> tuple[ModelSpec, list[str]]:
    """A ModelSpec from `preset`, `config` or a family with sizes; single fields may be laid over each."""
    if not isinstance(table, Mapping):
        raise InputError("model", table, "must be a table of key = value")
    given: dict[str, Any] = dict(table)
    notes: list[str] = []
    name, config = given.pop("preset", None), given.pop("config", None)
    if name is not None and config is not None:
        raise InputError("model", None, "has both preset and config", "keep one")
    for key in given:
        if key not in MODEL_FIELDS:
            raise InputError(f"model.{key}", None, "no such field", nearest(key, [*MODEL_FIELDS, "preset"]))
    if name is not None:
        own = complete(preset(str(name)))
        if not given and not any(isinstance(part, Mapping | list) for part in own.values()):
            return ModelSpec(**own), notes  # nobody wrote it: there is nothing to read strictly, which takes 0.1 s
        given = {**preset(str(name)), **given}
    elif config is not None:
        found, notes = from_hugging_face(_beside(str(config), folder))
        given = {**found, **given}
    return build(ModelSpec, complete(given), "model"), notes


def _beside(name: str, folder: Path) -> Path:
    """A path that a file names: beside that file if it exists there."""
    beside = folder / name
    return (beside if beside.exists() else Path(name)).absolute()
