"""A user's file as tables or as the training that it starts, and the framework that it is for.

JSON, YAML and TOML are parsed as data; scripts, command lines and manifests are read as text (launchers/), Python by
its syntax tree. Nothing is run.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.frameworks.companions import LARGEST, Companions
from phalanx.frameworks.configuration import Config
from phalanx.frameworks.framework import Framework
from phalanx.frameworks.launchers.launcher import ProgramLaunch
from phalanx.frameworks.launchers.manifest import is_manifest
from phalanx.frameworks.launchers.started import Started, in_manifest, in_script
from phalanx.frameworks.reading.dialects import dialect_of
from phalanx.frameworks.reading.dumps import flagscale_launch, settings_in_log, unwrapped_settings
from phalanx.frameworks.reading.parts import python_tables
from phalanx.frameworks.reading.python import PythonFile, parsed
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.frameworks.tables import documents, texts
from phalanx.spec.documents import read_text, require_finite, require_shallow
from phalanx.spec.errors import InputError

FRAMEWORK_BY_KIND = {framework.reads: framework for framework in FRAMEWORKS.values() if framework.reads}
"""Frameworks by the kind of configuration that they read."""
CONFIGURED_IN_PYTHON = tuple(framework for framework in FRAMEWORKS.values() if framework.python)
"""The frameworks that are configured in Python."""
_MANIFEST = re.compile(r"\A(?:[ \t]*(?:#.*)?\n|---.*\n)*apiVersion: ")
"""How a manifest begins, whatever its file is called."""
_MAGIC = re.compile(r"\A\s*%%\w.*\n|^!(?=[A-Za-z])", re.M)
"""Marks of a notebook's cell: the line above a file that it writes, and `!` in front of a command."""
DATA = (".json", ".yaml", ".yml", ".toml")
"""Suffixes of files that are data."""


@dataclass(frozen=True)
class FileSource:
    """What a file holds: tables in `config`, or the training that it starts."""

    path: Path
    config: Config
    started: Started | None = None
    kind: str | None = None
    """Its framework, where the file's form tells it."""
    notes: tuple[str, ...] = ()
    """What was assumed."""


def source_of(path: Path, files: Companions) -> FileSource:
    """Return a file's tables, or the training that it starts. Raises InputError where it cannot be read."""
    file, function = split_function(path)
    text = _MAGIC.sub("", read_text(file, "file", LARGEST))
    suffix = file.suffix.lower()
    place = str(file)
    if suffix == ".py":
        return of_python(path, text, place, function)
    if suffix not in DATA and _MANIFEST.search(text) and re.search(r"(?m)^kind: ", text):  # a template of one
        suffix = ".yaml"
    if suffix in DATA or text.lstrip().startswith("{"):
        tables = documents(text, suffix, place)
        if is_manifest(tables):
            return FileSource(path, {}, _located(place, partial(in_manifest, tables, files.text, _knows)))
        if len(tables) > 1:
            raise InputError(
                "file", place, f"has {len(tables)} documents", "keep the one that configures the training"
            )
        if not tables or not isinstance(tables[0], dict):
            raise InputError("file", place, "is not a table of settings")
        if (experiment := flagscale_launch(tables[0])) is not None:
            return _experiment(path, files, *experiment)
        return FileSource(path, unwrapped_settings(tables[0]))
    if args := settings_in_log(text):
        return FileSource(path, {"launch": {}, "env": {}, "args": texts(args)} if _is_flat(args) else texts(args))
    started = _located(place, partial(in_script, text, files.text, _knows, file.name))
    if (hydra := _named_experiment(started, files)) is not None:
        return hydra
    if not started.args and not started.assigned and _looks_like_yaml(text):
        tables = documents(text, ".yaml", place)
        if tables and isinstance(tables[0], dict):
            return FileSource(path, unwrapped_settings(tables[0]))
    return FileSource(path, {}, started)


def _experiment(
    path: Path, files: Companions, name: str, launch: dict[str, Any], environment: dict[str, Any]
) -> FileSource:
    """Return FlagScale's experiment with the tables of the file that it names. Raises InputError without that
    file."""
    text = files.text(name)
    tables = documents(text, ".yaml", name) if text is not None else []
    if not tables or not isinstance(tables[0], dict):
        raise InputError("file", str(path), f"starts a training whose settings are in {name}", files.why(name))
    return FileSource(path, {**unwrapped_settings(tables[0]), "launch": launch, "env": environment})


def _named_experiment(started: Started, files: Companions) -> FileSource | None:
    """Return FlagScale's experiment that a command names by hydra's --config-path and --config-name (run.py); None
    for other commands."""
    folder, name = (started.args.get(key) for key in ("config-path", "config-name"))
    if not isinstance(folder, str) or not isinstance(name, str):
        return None
    path = files.find(f"{folder}/{name.removesuffix('.yaml')}.yaml")
    tables = documents(read_text(path, "file", LARGEST), ".yaml", str(path)) if path is not None else []
    if path is None or not tables or not isinstance(tables[0], dict) or flagscale_launch(tables[0]) is None:
        return None
    return source_of(path, Companions(path.parent, files.given, files.written, files.opened))


def _located(where: str, make: Callable[[], Started]) -> Started:
    """Return make(), with the file named in an error about its text."""
    try:
        return make()
    except InputError as error:
        if error.field == "script" or (error.field == "file" and error.value is None):
            raise InputError("file", where, error.reason, error.remedy) from None
        raise


def _looks_like_yaml(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and sum(bool(re.match(r"\s*(- )?[\w.-]+:(\s|$)", line)) for line in lines) > len(lines) / 2


def of_python(path: Path, text: str, where: str, function: str = "") -> FileSource:
    """Return the tables of a configuration or a program in Python. Raises InputError where it has none."""
    try:
        file = PythonFile(parsed(text, where), where, function)
        for framework in CONFIGURED_IN_PYTHON:
            if (value := python_tables(framework, file)) is not None:
                require_finite(value)
                require_shallow(value)
                notes = tuple(file.program.notes) if "program" in file.__dict__ else ()
                return FileSource(path, type(value)(texts(value)), kind=framework.reads, notes=notes)
    except RecursionError:
        raise InputError("file", where, "is nested too deep") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError("file", where, f"cannot be parsed: {' '.join(str(error).split())[:160]}") from error
    reason = "is Python, which is not run, and makes no configuration that is known"
    raise InputError("file", where, reason, "name the file of its settings, or its command")


def _is_flat(args: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, dict) for value in args.values())


def _knows(launch: ProgramLaunch) -> bool:
    return (
        dialect_of(launch.program, launch.words[:1]) is not None
        or framework_of(launch.program, {w.lstrip("-").partition("=")[0]: True for w in launch.words}) is not None
    )


def framework_of(program: str, args: Mapping[str, Any]) -> Framework | None:
    """Return the framework of a program: by its flags, else by its name; by its name first where the framework's
    scripts rename flags; None: unknown."""
    by_name = framework_named(program)
    by_flags = kind_of({"launch": {}, "args": dict(args)})
    return by_name if by_flags is None or (by_name and by_name.renamed) else FRAMEWORK_BY_KIND[by_flags]


def framework_named(program: str) -> Framework | None:
    """Return the framework with the longest pattern that a program's name ends with; None: no pattern fits."""
    name = re.sub(r"\.py$", "", program)
    lengths = [
        (len(match[0]), -framework.position, framework)
        for framework in FRAMEWORKS.values()
        for pattern in framework.programs
        if (match := re.search(rf"(^|[./]){pattern}$", name))
    ]
    return max(lengths, key=lambda each: each[:2])[2] if lengths else None


def split_function(path: Path) -> tuple[Path, str]:
    """Split `config_registry.py::llama3_8b` into the file and the function; "" for a path without one."""
    file, _, function = str(path).partition(".py::")
    return (Path(f"{file}.py"), function) if function else (path, "")


def kind_of(config: Config) -> str | None:
    """Return the kind of a configuration by its keys; None for an unknown one."""
    clues = sorted(((clue, f.reads) for f in FRAMEWORKS.values() for clue in f.clues), key=lambda pair: pair[0].order)
    return next((kind for clue, kind in clues if clue.holds(config)), None)
