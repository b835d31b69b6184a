"""A file of somebody's own as a configuration: which framework it is of, and its tables with those of the files that
it names. JSON, YAML and TOML are parsed as data; scripts, command lines and manifests are read as text (launchers/),
Python by its syntax tree. Nothing is run.

A configuration that is started has the tables

    launch     options of its launchers                 env     variables that are exported for it
    args       flags of its program; those of a framework whose flags are keys (`flat`) are laid over its file
    accelerate, deepspeed_json, fsdp_config             files that it names, by their place in facts.toml
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.frameworks import folder
from phalanx.frameworks.accelerate import launch as accelerate
from phalanx.frameworks.companions import LARGEST, MISSING, Companions
from phalanx.frameworks.configuration import Config, Configuration, Partial
from phalanx.frameworks.dumps import dumped, logged
from phalanx.frameworks.framework import Framework
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.launchers.launcher import Launch
from phalanx.frameworks.launchers.manifest import is_manifest
from phalanx.frameworks.launchers.started import Started, in_manifest, in_script, settled, value_of
from phalanx.frameworks.parts import python_tables, reader
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.frameworks.shell.scope import plain
from phalanx.frameworks.tables import documents, nested, overlaid, texts, without
from phalanx.spec.documents import read_text, require_finite, require_shallow
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.spec import ModelSpec

READERS: dict[str, Callable[[Config, int | None], Configuration]] = {
    framework.reads: reader(framework) for framework in FRAMEWORKS.values() if framework.reads
}
"""The reader of each kind of configuration."""
_BY_KIND = {framework.reads: framework for framework in FRAMEWORKS.values() if framework.reads}
_IN_PYTHON = next(framework for framework in FRAMEWORKS.values() if framework.python)
_DATA = (".json", ".yaml", ".yml", ".toml")
_BASES = re.compile(r"\.(ya?ml|json|toml)$")
_DEFAULTS = frozenset(name for framework in FRAMEWORKS.values() for name in framework.default_bases)
_DEEPEST = 8
"""Base files of base files."""


@dataclass(frozen=True)
class _Source:
    """A file on its way to a configuration. `started`: what it launches, None for tables."""

    path: Path
    config: Config
    started: Started | None = None


@dataclass
class _Reading:
    """What becomes of the files of one reading."""

    files: Companions
    notes: list[str] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)
    """What a launcher leaves open."""
    missing: list[str] = field(default_factory=list)
    """Files of settings that are named and not here."""

    def tables_of(self, name: str, directory: str, what: str, depth: int = 0) -> dict[str, Any] | None:
        """Return the tables of a file that is named; None where it is not here, which is noted. Raises InputError for
        one that cannot be read."""
        path, function = named(Path(name))
        text = self.files.text(str(path), directory)
        if text is None:
            self.missing.append(f"{name}, {what}, {self.files.why(str(path))}")
            return None
        if path.suffix == ".py":
            return _of_python(text, str(path), function)
        tables = documents(text, path.suffix.lower(), name)
        config = tables[0] if tables and isinstance(tables[0], dict) else {}
        self.notes.append(f"{name}, {what}, is read too")
        return self.over_base(config, directory, depth)

    def over_base(self, config: dict[str, Any], directory: str, depth: int = 0) -> dict[str, Any]:
        """Return tables over those that their file names as its base (MaxText's `base_config`)."""
        base = config.get("base_config")
        if not isinstance(base, str) or not _BASES.search(base) or base.rpartition("/")[2] in _DEFAULTS:
            return config
        if depth >= _DEEPEST:
            raise InputError("file", base, f"is the base of a base, {_DEEPEST} deep", "does one include itself?")
        below = self.tables_of(base, directory, "its base", depth + 1)
        return overlaid(below, config) if below is not None else config


def read(paths: Sequence[Path], kind: str | None = None, world: int | None = None) -> tuple[Configuration, Config]:
    """Read a configuration from a file with those that it names or that are given too; return its tables as well.

    `world`: ranks, where the file leaves them open. Raises InputError for a file that is none."""
    if kind is not None and kind not in READERS:
        raise InputError("--kind", kind, "is not a kind of configuration", nearest(kind, READERS))
    if len(paths) == 1 and paths[0].is_dir():
        return _folder(paths[0], kind, world)
    main, given = _main(paths)
    reading = _Reading(Companions(main.parent, given))
    source = _source(main, reading)
    if source.started is not None:
        kind, config = _launched(source.started, kind, reading, main)
        world = source.started.launch.world or world
    else:
        kind = kind or kind_in(main, source.config)
        config = reading.over_base(dict(source.config), "")
        if kind is None:
            raise InputError("file", str(main), "is no configuration of a known framework", _known())
        config = _with_named(config, _BY_KIND[kind], "", reading)
    kind, config = _with_given(kind, config, reading)
    c = configured(config, kind, world)
    model = c.spec or _model(c, reading)
    notes = (*(source.started.notes if source.started else ()), *reading.asks, *c.notes)
    c = replace(c, notes=notes, companions=tuple(reading.notes), missing=tuple(reading.missing))
    return replace(c, spec=model, open_model="" if model else c.open_model), config


def configured(config: Config, kind: str, world: int | None) -> Configuration:
    """Return the configuration of tables, with what became of its launchers' options. Raises InputError where nothing
    of it is understood."""
    launch = config.get("launch")
    own = {
        n: value for n, value in config.items() if n not in ("launched", "launch") and not (n == "env" and not value)
    }
    tables = Partial(own) if isinstance(config, Partial) else own
    launched = config.get("launched")
    if not isinstance(launched, Launch):
        return READERS[kind](tables if "launch" not in config else {"launch": launch, **tables}, world)
    c = READERS[kind](tables, world)
    understood = {f"launch.{name}": "world" for name in launched.counted}
    understood |= {f"launch.{name}": "file" for name in launched.options if name == "config_file"}
    quiet = [
        f"launch.{n}" for n in launched.options if n not in (*launched.counted, *launched.unknown, "config_file")
    ]
    return replace(
        c,
        understood={**{k: v for k, v in c.understood.items() if not k.startswith("launch.")}, **understood},
        without_effect=(*c.without_effect, *quiet),
        unknown={**c.unknown, **{f"launch.{name}": near for name, near in launched.unknown.items()}},
    )


# From a file to a source.


def _main(paths: Sequence[Path]) -> tuple[Path, list[Path]]:
    """Return the file that the others belong to: a script or a manifest, else the first of a framework."""
    if len(paths) == 1:
        return paths[0], []
    ranks = {path: _rank(path) for path in paths}
    main = min(paths, key=lambda path: ranks[path])
    return main, [path for path in paths if path != main]


def _rank(path: Path) -> int:
    if path.suffix.lower() not in (*_DATA, ".py"):
        return 0
    if path.suffix.lower() == ".py":
        return 2
    config = document(path)
    kind = "manifest" if "args" in config and "launch" in config else kind_of(config)
    return {"manifest": 0, "hf": 1, "deepspeed": 5, "accelerate": 4, None: 6}.get(kind, 2)


def _source(path: Path, reading: _Reading) -> _Source:
    """Return a file as tables, or as what it starts. Raises InputError where it cannot be read."""
    file, function = named(path)
    text = read_text(file, "file", LARGEST)
    suffix = file.suffix.lower()
    where = str(file)
    if suffix == ".py":
        return _Source(path, _of_python(text, where, function))
    if suffix in _DATA or text.lstrip().startswith("{"):
        tables = documents(text, suffix, where)
        if is_manifest(tables):
            return _Source(path, {}, _located(where, partial(in_manifest, tables, reading.files.text, _knows)))
        if len(tables) > 1:
            raise InputError(
                "file", where, f"has {len(tables)} documents", "keep the one that configures the training"
            )
        if not tables or not isinstance(tables[0], dict):
            raise InputError("file", where, "is no table of settings")
        return _Source(path, logged(tables[0]))
    if args := dumped(text):
        return _Source(path, {"launch": {}, "env": {}, "args": texts(args)} if _is_flat(args) else texts(args))
    started = _located(where, partial(in_script, text, reading.files.text, _knows, file.name))
    if not started.args and not started.assigned and not started.positional and _looks_like_yaml(text):
        tables = documents(text, ".yaml", where)
        if tables and isinstance(tables[0], dict):
            return _Source(path, tables[0])
    return _Source(path, {}, started)


def _located(where: str, make: Callable[[], Started]) -> Started:
    """Return what a text starts; an error about it names its file."""
    try:
        return make()
    except InputError as error:
        if error.field == "script" or (error.field == "file" and error.value is None):
            raise InputError("file", where, error.reason, error.remedy) from None
        raise


def _looks_like_yaml(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and sum(bool(re.match(r"\s*(- )?[\w.-]+:(\s|$)", line)) for line in lines) > len(lines) / 2


def _of_python(text: str, where: str, function: str) -> dict[str, Any]:
    """Return the tables of a configuration in Python. Raises InputError where it has none."""
    try:
        value = python_tables(_IN_PYTHON, text, where, function)
        require_finite(value)
        result: dict[str, Any] = texts(require_shallow(value))
    except RecursionError:
        raise InputError("file", where, "is nested too deep") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError("file", where, f"cannot be parsed: {' '.join(str(error).split())[:160]}") from error
    return result


def _is_flat(args: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, dict) for value in args.values())


# From what is started to tables.


def _knows(launch: Launch) -> bool:
    return _framework_of(launch.program, {w.lstrip("-").partition("=")[0]: True for w in launch.words}) is not None


def _framework_of(program: str, args: Mapping[str, Any]) -> Framework | None:
    """Return the framework of a program's flags, or of the program by its name."""
    by_flags = kind_of({"launch": {}, "args": dict(args)})
    if by_flags is not None:
        return _BY_KIND[by_flags]
    name = re.sub(r"\.py$", "", program)
    frameworks = sorted(FRAMEWORKS.values(), key=lambda f: f.position)
    return next((f for f in frameworks if any(re.search(rf"(^|[./]){p}$", name) for p in f.programs)), None)


def _launched(started: Started, kind: str | None, reading: _Reading, path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind and the tables of a training that is started. Raises InputError where it is of no framework
    that is known."""
    reading.files.written |= started.files
    launch, flags = started.launch, {**started.args, **started.assigned}
    framework = _BY_KIND[kind] if kind else _framework_of(launch.program, flags)
    if framework is None and (engine := _engine_file(started, reading)) is not None:
        framework, config = engine
        return framework.reads, {**config, "launch": _typed(launch.options), "launched": launch}
    if framework is None:
        raise _not_known(started, path)
    switches = key_table(framework.folder).switches
    args = {name: _plain(settled(value, name.replace("-", "_") in switches)) for name, value in started.args.items()}
    assigned = {name: _plain(value) for name, value in started.assigned.items()}
    launched = {"launch": _typed(launch.options), "env": _typed(started.environment), "launched": launch}
    reading.missing += started.missing
    if launch.missing:
        reading.asks += [f"{name}, its list of hosts, {reading.files.why(name)}" for name in launch.missing]
    config = _over_base(framework, args, assigned, started, reading)
    if isinstance(config, dict) and not framework.flat:
        config = {**launched, **config}
    elif framework.flat:
        config |= {k: v for k, v in launched.items() if k != "env" or "env" in framework.beside}
    config = _with_named(config, framework, started.directory, reading)
    if launch.kept or launch.config:
        tables = reading.tables_of(launch.config, started.directory, "accelerate's file") if launch.config else {}
        config["accelerate"] = accelerate.tables(tables or {}, _typed(launch.kept), missing=tables is None)
        config = _with_named(config, framework, started.directory, reading)
        if framework.reads == "accelerate":  # a dialect of its file
            config = {**config.pop("accelerate"), **config}
    return framework.reads, config


def _over_base(
    framework: Framework, args: dict[str, Any], assigned: dict[str, Any], started: Started, reading: _Reading
) -> dict[str, Any]:
    """Return a program's flags over the file that they name as their base; Partial where that file is not here."""
    name = _base_of(framework, args, started)
    removed = [word[1:].partition("=")[0] for word in assigned if word.startswith("~")]
    flags = {**args, **{key: value for key, value in assigned.items() if not key.startswith("~")}}
    over = nested(flags) if framework.flat else {"args": flags}
    if name.rpartition("/")[2] in framework.default_bases and reading.files.find(name, started.directory) is None:
        return over
    base = reading.tables_of(name, started.directory, "its base configuration") if name else None
    if base is None:
        return Partial(over) if name or framework.needs_base else over
    for path in removed:
        base = without(base, path)
    return overlaid(base if framework.flat else {"args": base}, over)


def _base_of(framework: Framework, args: dict[str, Any], started: Started) -> str:
    """Take the name of the base file out of a program's flags; "" where they name none."""
    plain_names = {name.replace("-", "_"): name for name in args}
    if {"config_path", "config_name"} <= set(plain_names):  # hydra's
        folder_, file = (str(args.pop(plain_names[name])) for name in ("config_path", "config_name"))
        return f"{folder_}/{file}{'' if _BASES.search(file) else '.yaml'}"
    for name in framework.base:
        if isinstance(args.get(name), str):
            return str(args.pop(name))
    if framework.python_base and isinstance(args.get("config"), str):
        return framework.python_base.format(module=args.pop("module", ""), config=args.pop("config"))
    positional = [word for word in started.positional if _BASES.search(word)]
    return positional[-1] if "" in framework.base and positional else ""


def _engine_file(started: Started, reading: _Reading) -> tuple[Framework, dict[str, Any]] | None:
    """Return the configuration of DeepSpeed that a program of its own is given."""
    for value in started.args.values():
        if isinstance(value, str) and value.endswith(".json"):
            tables = reading.tables_of(value, started.directory, "its file")
            if tables is not None and kind_of(tables) == "deepspeed":
                return _BY_KIND["deepspeed"], tables
    return None


def _not_known(started: Started, path: Path) -> InputError:
    program = plain(started.launch.program)
    missing = [note for note in started.notes if note.endswith(MISSING)]
    if missing:
        return InputError("file", str(path), "starts no training that is known by itself", "; ".join(missing[:3]))
    if not started.args and not started.assigned:
        return InputError(
            "file", str(path), "is no configuration of a known framework, and starts no training", _known()
        )
    flags = [f"--{name}" for name in started.args][:3]
    given = f" with {', '.join(flags)}" if flags else ""
    reason = f"starts {program or 'a program'}{given}, which is of no framework that is known"
    return InputError("file", str(path), reason, "give the file of its settings, or " + _known())


def _known() -> str:
    return f"--kind, one of {', '.join(READERS)}"


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value_of(value) if isinstance(value, str) else value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return plain(value) if isinstance(value, str) else value


# Files that are named, and files that are given too.


def _with_named(config: dict[str, Any], framework: Framework, directory: str, reading: _Reading) -> dict[str, Any]:
    """Return tables with those of the files that they name."""
    for path, place in framework.named.items():
        value: Any = config
        for part in path.split("."):
            value = value.get(part, value.get(part.replace("_", "-"))) if isinstance(value, Mapping) else None
        if not isinstance(value, str) or not value.endswith(_DATA) or place in config:
            continue
        if (tables := reading.tables_of(value, directory, f"its {path.rpartition('.')[2]}")) is not None:
            config = type(config)({**config, place: tables})
    return config


def _with_given(kind: str, config: dict[str, Any], reading: _Reading) -> tuple[str, dict[str, Any]]:
    """Return tables with the files that were given too and that none of the others names. Raises InputError for one
    that does not belong to them."""
    framework = _BY_KIND[kind]
    for path in reading.files.given:
        if path in reading.files.opened:
            continue
        other = document(path)
        other_kind = kind_of(other)
        place = {"deepspeed": "deepspeed_json", "accelerate": "accelerate"}.get(other_kind or "")
        if "model_type" in other or "architectures" in other:
            config = type(config)({**config, "_config_json": str(path)})
        elif place and place in (*framework.named.values(), "accelerate") and place not in config:
            config = config if isinstance(config.get("args"), dict) else {"args": config}
            config = {**config, place: accelerate.tables(other, {}) if place == "accelerate" else other}
        elif other_kind == kind and isinstance(config, Partial):  # the base that was not found
            config = overlaid(other, config)
        else:
            reason = "is not named by the other file, and is none that belongs to it"
            raise InputError("file", str(path), reason, "name one training's files")
    return kind, config


def _model(c: Configuration, reading: _Reading) -> ModelSpec | None:
    """Return the model of the config.json that was given, or that lies in the folder which the file names."""
    given = [p for p in reading.files.given if p not in reading.files.opened and p.suffix == ".json"]
    config_json = next((p for p in given if "model_type" in document(p) or "architectures" in document(p)), None)
    if config_json is None and c.model_name:
        config_json = reading.files.find(f"{c.model_name}/config.json")
    if config_json is None:
        return None
    reading.notes.append(f"the model is that of {config_json}")
    return make_model({"config": str(config_json.absolute())}, Path())[0]


def _folder(path: Path, kind: str | None, world: int | None) -> tuple[Configuration, Config]:
    """Read a folder with a program: its configuration, with the model and the sequence length of other files."""
    framework, config = folder.tables(path, document, kind_of)
    if kind not in (None, framework.reads):
        raise InputError("--kind", kind, f"{path} holds a configuration of {framework.reads}", "leave it out")
    c = configured(config, framework.reads, world)
    seq = c.layout.seq or folder.sequence_in(path)
    model = c.spec or (folder.model_in(path) if framework.model_beside else None)
    return replace(c, layout=replace(c.layout, seq=seq), spec=model, open_model="" if model else c.open_model), config


def named(path: Path) -> tuple[Path, str]:
    """Split `config_registry.py::llama3_8b` into a file and the function of it that is meant."""
    file, _, function = str(path).partition(".py::")
    return (Path(f"{file}.py"), function) if function else (path, "")


def document(path: Path) -> dict[str, Any]:
    """Return a file's tables alone; of what it starts {launch, env, args}. Raises InputError."""
    source = _source(path, _Reading(Companions(named(path)[0].parent)))
    return dict(source.config) if source.started is None else as_tables(source.started)


def as_tables(started: Started) -> dict[str, Any]:
    """Return {launch, env, args} of a training that is started."""
    args = {name: _plain(settled(value, False)) for name, value in {**started.args, **started.assigned}.items()}
    return {"launch": _typed(started.launch.options), "env": _typed(started.environment), "args": args}


def kind_in(path: Path, config: Config) -> str | None:
    """Return the framework of a file's tables: one alone is configured in Python, others say it by their keys."""
    return _IN_PYTHON.reads if named(path)[0].suffix == ".py" else kind_of(config)


def kind_of(config: Config) -> str | None:
    """Return the framework that a configuration is of, by its keys; None if it is of none."""
    clues = sorted(
        ((c.order, i, c, f) for i, f in enumerate(FRAMEWORKS.values()) for c in f.clues), key=lambda x: x[:2]
    )
    return next((framework.reads for *_, clue, framework in clues if clue.holds(config)), None)
