"""A training that a command starts as the tables that its framework's reader takes.

launch     options of its launchers
env        variables that are exported to it
args       flags of its program; where flags are keys (`flat` in facts.toml), they replace values of its file
accelerate, deepspeed_json, fsdp_json    tables of files that it names (`named` in facts.toml)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from phalanx.frameworks.accelerate import launch as accelerate
from phalanx.frameworks.companions import LARGEST, MISSING, Companions
from phalanx.frameworks.configuration import Config, Partial
from phalanx.frameworks.deepspeed.shipped import shipped
from phalanx.frameworks.framework import Framework
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.launchers.started import Started, open_flags, value_of, without_open_flags
from phalanx.frameworks.reading import others
from phalanx.frameworks.reading import torchtitan_repository as torchtitan
from phalanx.frameworks.reading.dialects import METHOD, Dialect, dialect_of
from phalanx.frameworks.reading.python import declared, parsed
from phalanx.frameworks.reading.recipes import MODEL, model_of, recipe
from phalanx.frameworks.reading.source import (
    DATA,
    FRAMEWORK_BY_KIND,
    FileSource,
    framework_named,
    framework_of,
    kind_of,
    of_python,
    split_function,
)
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.frameworks.shell.scope import plain
from phalanx.frameworks.tables import documents, merge_tables, tables_of_paths, without_entry
from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError

BASES = re.compile(r"\.(ya?ml|json|toml)$")
"""Ends of names of base files."""
_DEFAULTS = frozenset(name for framework in FRAMEWORKS.values() for name in framework.default_bases)
"""Names of base files whose values readers have as defaults."""
_DEEPEST = 8
"""Base files of base files."""
_BEYOND_FLAGS = "fsdp_json"
"""The file of a Trainer's --fsdp_config, which adds to the level that --fsdp names which modules are units."""


@dataclass
class FileReading:
    """The files of one configuration while it is read, and what there is to say about them."""

    files: Companions
    ranks: int | None = None
    """Number of ranks that the user gives along with the files."""
    notes: list[str] = field(default_factory=list)
    """Files that were read, a sentence each."""
    asks: list[str] = field(default_factory=list)
    """Assumptions that the user should check, a sentence each."""
    missing: list[str] = field(default_factory=list)
    """Files of settings that are named and were not given, a sentence each."""

    def tables_of(self, name: str, directory: str, what: str, depth: int = 0) -> dict[str, Any] | None:
        """Return the tables of a file that is named, over its bases; None where it is missing, which is noted.
        `directory`: where its path begins; `what`: what to call it in notes; `depth`: bases above it. Raises
        InputError for a file that cannot be read."""
        name = plain(name)
        path, function = split_function(Path(name))
        text = self.files.text(str(path), directory)
        if text is None and (known := shipped(name)) is not None:
            self.asks.append(f"{name} is not here: it shards and offloads as that of {known[1]}")
            return known[0]
        for tables, by in (
            (torchtitan.shipped(name), torchtitan.REVISION),
            (accelerate.shipped(name), accelerate.REVISION),
        ):
            if text is None and tables is not None and "/" in name:
                self.asks.append(f"{name} is not here: it is taken as that of {by}")
                return tables
        if text is None:
            said = f"{name}, {what}, {self.files.why(str(path))}"
            self.missing += [said] if said not in self.missing else []
            return None
        if path.suffix == ".py":
            return dict(of_python(path, text, str(path), function).config)
        read = documents(text, path.suffix.lower(), name)
        config = read[0] if read and isinstance(read[0], dict) else {}
        self.notes.append(f"{name}, {what}, is read too")
        folder = str(self.files.opened[-1].absolute().parent) if self.files.opened else directory
        return self.over_base(config, folder, depth)

    def over_base(self, config: dict[str, Any], directory: str, depth: int = 0) -> dict[str, Any]:
        """Return tables merged into the bases that they name: MaxText's `base_config`, NeMo-RL's `defaults`
        (nemo_rl/utils/config.py:75), of which a later one overrides an earlier one. Partial where one is missing."""
        stated = [config.get("base_config"), *_listed(config.get("defaults"))]
        names = [name for name in stated if isinstance(name, str)]
        defaults = [name for name in names if {name.rpartition("/")[2], f"{name}.yaml"} & _DEFAULTS]
        bases = [name for name in names if BASES.search(name) and name not in defaults]
        if bases and depth >= _DEEPEST:
            raise InputError("file", bases[0], f"is the base of a base, {_DEEPEST} deep", "does one include itself?")
        below: dict[str, Any] = {}
        for name in bases:
            if (tables := self.tables_of(name, directory, "its base", depth + 1)) is None:
                return Partial(config)
            below = merge_tables(below, tables)
        if not bases and not (defaults and "defaults" in config):
            return config
        below |= {"config_name": defaults[-1]} if "defaults" in config and defaults else {}
        return override(below, {n: value for n, value in config.items() if n not in ("defaults", "hydra")})


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def launched_tables(
    started: Started, kind: str | None, reading: FileReading, path: Path
) -> tuple[str, dict[str, Any]]:
    """Return the kind and the tables of a training that a command starts. Raises InputError for one of an unknown
    framework."""
    reading.files.written |= started.files
    if (script := torchtitan.script_launch(started.launch.program, started.args, started.environment)) is not None:
        world = reading.ranks or (started.launch.nodes or 1) * script[1]  # of each node that starts it
        reading.asks.append(
            f"run_train.sh is not here: it starts torchtitan.train on NGPU ranks, as that of {torchtitan.REVISION}"
        )
        launch = replace(started.launch, program="torchtitan.train", world=world)
        started = replace(started, launch=launch, args=script[0], missing=())
    launch, flags = started.launch, {**started.args, **started.assigned}
    dialect = dialect_of(launch.program, started.positional, flags)
    if dialect is not None:
        kind = kind or dialect.reads
    elif kind is None:
        own = "" if framework_named(launch.program) else plain(launch.program)  # a name that several frameworks have
        other = others.program(own, started.positional if own else (), flags)
        if other is not None:
            raise other.error(str(path))
    framework = FRAMEWORK_BY_KIND[kind] if kind else framework_of(launch.program, flags)
    framework = framework or _of_settings(started, reading)
    program = None if framework else _program(started, reading)
    if program is not None:
        framework = FRAMEWORK_BY_KIND[str(program.kind)]
    if framework is None and (engine := _engine_file(started, reading)) is not None:
        framework, config = engine
        return framework.reads, {**config, "launch": _typed(launch.options), "launched": launch}
    of_its_own = framework is None and bool(launch.kept or launch.config)
    if of_its_own:  # a program on what accelerate set up
        framework = FRAMEWORK_BY_KIND["accelerate"]
        reading.asks.append(f"flags of {plain(launch.program)} are its own: batch, length and model are open")
        started = replace(started, args={}, assigned={}, positional=())
    if framework is None:
        raise _not_known(started, path)
    switches = key_table(framework.folder).switches
    args = {
        name: _plain(without_open_flags(value, name.replace("-", "_") in switches))
        for name, value in started.args.items()
    }
    args = {**_declared(framework, started, reading), **args} if program is None else args
    unset = [w for name, value in started.args.items() for w in open_flags(value, name.replace("-", "_") in switches)]
    if unset:
        names = ", ".join(dict.fromkeys(plain(word) for word in unset))
        reading.asks.append(f"{names} of the environment could bring flags: taken as unset")
    assigned = {name: _plain(value) for name, value in started.assigned.items()}
    launched = {"launch": _typed(launch.options), "env": _typed(started.environment), "launched": launch}
    reading.missing += started.missing
    if launch.missing:
        reading.asks += [f"{name}, its list of hosts, {reading.files.why(name)}" for name in launch.missing]
    config = _over_base(framework, args, assigned, started, reading, program)
    if dialect is not None:
        config, model = _as_read(config, dialect, framework, launch.program, reading)
    if framework.flat:
        config |= {k: v for k, v in launched.items() if k != "env" or "env" in framework.companions}
    else:
        config = type(config)({**launched, **config})
    config = with_files(config, framework, started.directory, reading)
    if dialect is not None and model:
        config[MODEL] = model
    if isinstance(config.get("args"), Mapping) and dialect is not None and dialect.launcher:
        config = with_options(config, started.directory, reading)
    elif launch.kept or launch.config:
        tables = reading.tables_of(launch.config, started.directory, "accelerate's file") if launch.config else {}
        config["accelerate"] = accelerate.tables(tables or {}, _typed(launch.kept), missing=tables is None)
        config = with_files(config, framework, started.directory, reading)
        if framework.reads == "accelerate":  # a dialect of its file
            own = config.pop("accelerate")
            config = (Partial if of_its_own else type(own))({**own, **config})
    return framework.reads, config


def _as_read(
    config: dict[str, Any], dialect: Dialect, framework: Framework, program: str, reading: FileReading
) -> tuple[dict[str, Any], str]:
    """Return tables with a dialect's flags under the names of its framework, and the name of the model."""
    whole, flags = not isinstance(config, Partial), config if framework.flat else config.get("args", {})
    args = dialect.to_framework(flags, whole)
    stated = dialect.to_framework(flags, whole=False)
    if own := {name: value for name, value in args.items() if name not in stated and name != METHOD}:
        said = ", ".join(f"{name}={str(value).lower()}" for name, value in own.items())
        reading.asks.append(f"{said} where nothing says otherwise, as {plain(program)} has them by itself")
    return type(config)(args if framework.flat else {**config, "args": args}), dialect.model_of(flags)


def with_options(config: dict[str, Any], directory: str, reading: FileReading) -> dict[str, Any]:
    """Return tables in which the options of `accelerate launch` among the arguments are accelerate's file: they
    replace values of the file that `accelerate_config` names."""
    args, options, name = accelerate.split_arguments(config["args"])
    environment = args.pop("env", None)
    file = accelerate.shipped(name)
    if file is not None:
        reading.notes.append(f"{name}, accelerate's file, is the one that TRL ships")
    elif name:
        file = reading.tables_of(name, directory, "accelerate's file")
    config = type(config)({**config, "args": args})
    if isinstance(environment, Mapping):
        config["env"] = {**config.get("env", {}), **environment}
    if options or name:
        config["accelerate"] = accelerate.tables(file or {}, options, missing=bool(name) and file is None)
        config = with_files(config, FRAMEWORK_BY_KIND["hf"], directory, reading)
    return config


def is_named(started: Started, framework: Framework) -> bool:
    """Whether the name of the program tells its framework."""
    program = started.launch.program
    return dialect_of(program, started.positional, started.args) is not None or framework_named(program) is framework


def _over_base(
    framework: Framework,
    args: dict[str, Any],
    assigned: dict[str, Any],
    started: Started,
    reading: FileReading,
    program: FileSource | None = None,
) -> dict[str, Any]:
    """Return a program's flags merged into their base: the file or the recipe that they name, or what the program
    sets itself (`program`). Partial where that file is missing."""
    if program is not None:
        over = tables_of_paths(assigned) if framework.flat else {"args": args}
        return override(program.config, over)
    name = _base_of(framework, args, started)
    removed = [word[1:].partition("=")[0] for word in assigned if word.startswith("~")]
    flags = {**args, **{key: value for key, value in assigned.items() if not key.startswith("~")}}
    flags = {framework.renamed.get(key.replace("-", "_"), key): value for key, value in flags.items()}
    over = tables_of_paths(flags) if framework.flat else {"args": flags}
    known = recipe(framework.folder, name, *started.positional, str(flags.get("mode"))) if name else None
    if known is not None:
        reading.notes.append(f"{name}: as {known[1]} of its recipes has it")
        return merge_tables(known[0], over)
    if name.rpartition("/")[2] in framework.default_bases and reading.files.find(name, started.directory) is None:
        return over
    called = model_of(framework.folder, name) if name else ""
    what = "its recipe" if called else "its base configuration"
    base = reading.tables_of(name, started.directory, what) if name else None
    if base is None:
        return Partial({**over, MODEL: called} if called else over) if name or framework.needs_base else over
    for path in removed:
        base = without_entry(base, path)
    return merge_tables(base if framework.flat else {"args": base}, over)


def override(config: Config, over: Config) -> dict[str, Any]:
    """Return `config` with values of `over` in place of its own; Partial where `config` is."""
    result = merge_tables(config, over)
    return Partial(result) if isinstance(config, Partial) else result


def _base_of(framework: Framework, args: dict[str, Any], started: Started) -> str:
    """Remove the flag that names the base file from `args` and return the name; "": none does."""
    plain_names = {name.replace("-", "_"): name for name in args}
    if {"config_path", "config_name"} <= set(plain_names):  # hydra's
        folder_, file = (str(args.pop(plain_names[name])) for name in ("config_path", "config_name"))
        return f"{folder_}/{file}{'' if BASES.search(file) else '.yaml'}"
    for name in framework.base:
        if isinstance(args.get(name), str) and ("" not in framework.base or BASES.search(args[name])):
            return str(args.pop(name))
    if framework.python_base and isinstance(args.get("config"), str):
        module, config = str(args.pop("module", "")), args.pop("config")
        own = f"{plain(module).replace('.', '/')}/{framework.python_base.rpartition('/')[2]}"
        return (own if "." in plain(module) else framework.python_base).format(module=module, config=config)
    positional = [word for word in started.positional if BASES.search(word)]
    return positional[-1] if "" in framework.base and positional else ""


def _program(started: Started, reading: FileReading) -> FileSource | None:
    """Return what a program in Python sets; None where its file is missing or of no known framework."""
    name = started.launch.program
    text = reading.files.text(name, started.directory) if name.endswith(".py") else None
    if text is None:
        return None
    try:
        program = of_python(Path(name), text, name)
    except InputError:
        return None
    reading.notes.append(f"{name}, its program, is read too")
    reading.asks += program.notes
    return program


def _declared(framework: Framework, started: Started, reading: FileReading) -> dict[str, Any]:
    """Return the defaults that the program of a Trainer declares for flags that have a price and are not set; none
    where its file is missing."""
    name = started.launch.program
    if framework.reads != "hf" or not name.endswith(".py"):
        return {}
    text = reading.files.text(name, started.directory)
    known, given = key_table(framework.folder), {flag.replace("-", "_") for flag in started.args}
    try:
        own = declared(parsed(text, name)) if text else {}
    except InputError:
        return {}
    priced = {key for key in own if (seen := known.verdict(key)) and seen.effect in ("layout", "time", "memory")}
    own = {key: own[key] for key in own if key in priced - given}
    if own:
        said = ", ".join(f"{key}={str(value).lower()}" for key, value in own.items())
        reading.asks.append(f"{said} where nothing says otherwise, as {plain(name)} declares them")
    return own


def _of_settings(started: Started, reading: FileReading) -> Framework | None:
    """Return the framework of the file of settings that a program is given: `train.py settings.yaml`, or
    `train.py --config settings.yaml`; None: unknown."""
    flag = next((name for name in ("config", "config_file", "config-file") if name in started.args), "")
    name = plain(str(started.args[flag])) if flag else started.positional[0] if len(started.positional) == 1 else ""
    if not BASES.search(name):
        return None
    text = reading.files.text(name, started.directory)
    tables = documents(text, Path(name).suffix.lower(), name) if text else []
    if text is None:
        return next(
            (f for f in FRAMEWORKS.values() if set(f.launched_by).intersection(started.launch.launchers)), None
        )
    kind = kind_of(tables[0]) if tables and isinstance(tables[0], dict) else None
    return FRAMEWORK_BY_KIND[kind] if kind and flag in FRAMEWORK_BY_KIND[kind].base else None


def _engine_file(started: Started, reading: FileReading) -> tuple[Framework, dict[str, Any]] | None:
    """Return DeepSpeed and the tables of its file, which a flag of an unknown program names; None without one. Raises
    InputError where that file is missing."""
    stated = started.args.get("deepspeed_config", "")
    first = plain(str(stated[0] if isinstance(stated, list) and stated else stated))
    if first.startswith("$"):  # the flag is DeepSpeed's own, and the file is known to the shell alone
        for path in reading.files.given:
            tables = reading.tables_of(path.name, started.directory, "its file") if path.suffix == ".json" else None
            if tables is not None and kind_of(tables) == "deepspeed":
                return FRAMEWORK_BY_KIND["deepspeed"], tables
        raise InputError("file", started.launch.program, f"hands {first} to DeepSpeed, a file", "give it too")
    for name, value in started.args.items():
        if isinstance(value, str) and value.endswith(".json"):
            tables = reading.tables_of(value, started.directory, "its file")
            if tables is None and "deepspeed" in name:
                reason = f"hands {plain(value)} to DeepSpeed, which {reading.files.why(value)}"
                raise InputError("file", started.launch.program, *reason.split(": ", 1))
            if tables is not None and kind_of(tables) == "deepspeed":
                return FRAMEWORK_BY_KIND["deepspeed"], tables
    return None


def _not_known(started: Started, path: Path) -> InputError:
    program, world = plain(started.launch.program), started.launch.world or 1
    missing = [note for note in (*started.notes, *started.missing) if note.endswith(MISSING)]
    if missing:
        return InputError("file", str(path), "starts no training that is known by itself", "; ".join(missing[:3]))
    ranked = program.endswith(".py") and bool(started.launch.launchers)
    if not (ranked or started.args or started.assigned):
        if other := others.written(read_text(split_function(path)[0], "file", LARGEST)):
            return other.error(str(path))
        return InputError(
            "file", str(path), "is not a configuration of a known framework, and starts no training", known_kinds()
        )
    flags = [f"--{name}" for name in started.args][:3]
    given = f" with {', '.join(flags)}" if flags else ""
    ranks = f"{world} ranks of " if world > 1 else ""
    reason = f"starts {ranks}{program or 'a program'}{given}, which is of no framework that is known"
    observed = f"phalanx observe --world {world} -- python {program} shows its step; " if ranked and world > 1 else ""
    return InputError("file", str(path), reason, f"{observed}give the file of its settings, or {known_kinds()}")


def known_kinds() -> str:
    """Return the remedy for a file whose framework is unknown."""
    return f"if it is one, name its framework with --kind: {', '.join(FRAMEWORK_BY_KIND)}"


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value_of(value) if isinstance(value, str) else value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return plain(value) if isinstance(value, str) else value


def with_files(config: dict[str, Any], framework: Framework, directory: str, reading: FileReading) -> dict[str, Any]:
    """Return tables completed by the tables of the files that they name (`named` of the framework)."""
    for path, place in framework.named.items():
        own, value = path.removeprefix("args."), cast(Any, config)
        alone = "args" not in config and own != path  # arguments without a launcher
        for part in (own if alone else path).split("."):
            value = value.get(part, value.get(part.replace("_", "-"))) if isinstance(value, Mapping) else None
        if not isinstance(value, str) or not value.endswith((*DATA, ".config", ".conf")) or place in config:
            continue
        what = f"its {path.rpartition('.')[2]}"
        if (tables := reading.tables_of(value, directory, what)) is not None:
            config = type(config)({**({"args": config} if alone else config), place: tables})
        elif place == _BEYOND_FLAGS and (config if alone else config["args"]).get("fsdp"):
            reading.missing = [said for said in reading.missing if not said.startswith(f"{plain(value)}, {what}")]
            reading.asks.append(f"{plain(value)}, {what}, is not here: --fsdp says what is sharded; units are blocks")
    return config


def as_tables(started: Started) -> dict[str, Any]:
    """Return {launch, env, args} of a training that is started."""
    args = {
        name: _plain(without_open_flags(value, False)) for name, value in {**started.args, **started.assigned}.items()
    }
    return {"launch": _typed(started.launch.options), "env": _typed(started.environment), "args": args}
