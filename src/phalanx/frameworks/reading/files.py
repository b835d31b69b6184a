"""A user's file as a Configuration, with the files that it names or that are given with it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.frameworks.accelerate import launch as accelerate
from phalanx.frameworks.companions import MISSING, Companions
from phalanx.frameworks.configuration import Config, Configuration, Partial, shown
from phalanx.frameworks.deepspeed.neox import is_neox
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.launchers.launcher import ProgramLaunch
from phalanx.frameworks.reading import folder, others
from phalanx.frameworks.reading.launch_tables import (
    FileReading,
    as_tables,
    is_named,
    known_kinds,
    launched_tables,
    override,
    with_files,
    with_options,
)
from phalanx.frameworks.reading.parts import reader
from phalanx.frameworks.reading.recipes import MODEL, RECIPE
from phalanx.frameworks.reading.source import DATA, FRAMEWORK_BY_KIND, kind_of, source_of, split_function
from phalanx.frameworks.tables import merge_tables, resolve_references, tables_of_paths
from phalanx.frameworks.values import product
from phalanx.schedule.pipeline.schedules import facts_of
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model import presets
from phalanx.spec.model.spec import ModelSpec

READERS: dict[str, Callable[[Config, int | None], Configuration]] = {
    kind: reader(framework) for kind, framework in FRAMEWORK_BY_KIND.items()
}
"""The reader of each kind of configuration."""


def read(paths: Sequence[Path], kind: str | None = None, world: int | None = None) -> tuple[Configuration, Config]:
    """Return the configuration of files, and its tables. `paths`: a configuration with the files that it names, or a
    folder; `kind`: its framework, None to tell it by the keys; `world`: ranks, for a file that does not state them.
    Raises InputError for a file that is no configuration."""
    if kind is not None and kind not in READERS:
        raise InputError("--kind", kind, "is not a kind of configuration", nearest(kind, READERS))
    if len(paths) == 1 and paths[0].is_dir():
        return _folder(paths[0], kind, world)
    if len(paths) == 1 and folder.is_started_by(paths[0]):
        return _folder(paths[0].absolute().parent, kind, world)
    main, given = _main(paths)
    guessed = kind is None
    reading = FileReading(Companions(main.parent, given), world)
    source = source_of(main, reading.files)
    reading.notes += [f"{path.name}, which it names, is read too" for path in dict.fromkeys(reading.files.opened)]
    if source.started is not None:
        kind, config = launched_tables(source.started, kind, reading, main)
        launched = config.get("launched", source.started.launch)
        world = launched.world or world
    else:
        if kind is None and (other := others.tables(source.config)) is not None:
            raise other.error(str(main))
        config = reading.over_base(override(source.config, {}), "")
        kind = kind or source.kind or kind_of(source.config) or kind_of(config)
        if kind is None:
            raise InputError("file", str(main), "is not a configuration of a known framework", known_kinds())
        if kind == "hf" and {"accelerate_config", "num_processes"} & config.keys():  # TRL's
            config = with_options(type(config)({"args": config}), "", reading)
        config = with_files(config, FRAMEWORK_BY_KIND[kind], "", reading)
    if RECIPE in config:
        reading.missing.append(f"{config[RECIPE]}, its recipe, is not known here: set its degrees too")
    kind, config = _with_given(kind, type(config)(resolve_references(config)), reading)
    c = _with_schedule(configured(config, kind, world), reading.files)
    if guessed and source.kind is None and not (source.started and is_named(source.started, FRAMEWORK_BY_KIND[kind])):
        _require_its_own(c, str(main))
    model, why = (c.spec, "") if c.spec else _model(c, reading, str(config.get(MODEL, "")))
    notes = (*(source.started.notes if source.started else source.notes), *reading.asks, *c.notes)
    c = replace(c, notes=notes, companions=tuple(reading.notes), missing=(*c.missing, *reading.missing))
    return replace(c, spec=model, open_model="" if model else why or c.open_model), config


def _with_schedule(c: Configuration, files: Companions) -> Configuration:
    """Return a configuration with the path and the chunks of the file that its pipeline schedule names, if it names
    one. Raises InputError for a file that is no schedule."""
    name = c.layout.schedule or ""
    if not name.endswith(".csv"):
        return c
    path = files.find(name)
    if path is None:
        missing = f"{name}, its pipeline schedule, {MISSING}"
        return replace(c, layout=replace(c.layout, schedule=None), missing=(*c.missing, missing))
    facts = facts_of(str(path))
    virtual = facts.chunks if facts.takes_virtual else None
    return replace(c, layout=replace(c.layout, schedule=str(path), virtual=virtual))


def _require_its_own(c: Configuration, path: str) -> None:
    """Require that at least half of the keys are the framework's that was guessed from some. Raises InputError."""
    keys = [
        key
        for key in (*c.understood, *c.without_effect, *c.not_modelled, *c.unknown)
        if not key.startswith(("launch.", "env.")) and key not in ("args", "launch", "env")
    ]
    others = [key for key in keys if key in c.unknown]
    if 2 * len(others) > len(keys) > 2 and c.understood:
        listed = ", ".join(map(shown, others[:4]))
        reason = f"has keys of {c.kind}, but {len(others)} of its {len(keys)} are none: {listed}"
        raise InputError(
            "file",
            path,
            reason,
            f"it seems to be of a program of its own, whose layout predict takes by --strategy; "
            f"if it is not, --kind {c.kind}",
        )


def again(config: Config, c: Configuration, world: int | None) -> Configuration:
    """Return a configuration as it is read for another number of ranks, with the same model. Raises InputError."""
    other = configured(config, c.kind, world)
    spec = other.spec or c.spec
    other = replace(other, notes=c.notes, companions=c.companions, missing=c.missing)
    return replace(other, spec=spec, open_model="" if spec else other.open_model)


def with_model_fields(
    config: Config, c: Configuration, values: Mapping[str, Any], world: int | None
) -> tuple[Configuration, Config]:
    """Return a configuration that leaves its model open, with fields of the model that the user states (`vocab`:
    50304) as if its file had them, and its tables. Raises InputError."""
    keys = key_table(FRAMEWORK_BY_KIND[c.kind].folder).fields("model")
    stated = {keys[name].lstrip("-"): value for name, value in values.items() if name in keys}
    if not stated:
        return c, config
    args = config.get("args")
    tables = tables_of_paths(stated)
    more = {**config, "args": merge_tables(args, tables)} if isinstance(args, dict) else merge_tables(config, tables)
    more = Partial(more) if isinstance(config, Partial) else more
    return again(more, c, world), more


def configured(config: Config, kind: str, world: int | None) -> Configuration:
    """Return the configuration of tables, in which options of launchers are keys too. Raises InputError where nothing
    of it is understood."""
    launch = config.get("launch")
    own = {
        n: value
        for n, value in config.items()
        if n not in ("launched", "launch", MODEL, RECIPE) and not (n == "env" and not value)
    }
    tables = Partial(own) if isinstance(config, Partial) else own
    launched = config.get("launched")
    if not isinstance(launched, ProgramLaunch):
        return READERS[kind](tables if "launch" not in config else {"launch": launch, **tables}, world)
    c = READERS[kind](tables, world)
    inner = product(c.layout.tp, c.layout.pp, c.layout.cp) or 1
    if world == launched.world == 1 < inner and not launched.counted:  # unless the environment says more
        c = READERS[kind](tables, None)
    c = _sharded_in_nodes(c, launched)
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


def _sharded_in_nodes(c: Configuration, launched: ProgramLaunch) -> Configuration:
    """Return a configuration with the ranks of a node as those over which its state is sharded, where it says so."""
    world, each = c.layout.world or 0, launched.per_node
    if not c.within_node or world <= (each or 0):
        return c
    if each:
        return replace(c, layout=replace(c.layout, shard=each))
    return replace(c, notes=(*c.notes, "the ranks of a node are not said: state that is sharded in each is over all"))


def _main(paths: Sequence[Path]) -> tuple[Path, list[Path]]:
    """Return the file that names the others (a script or a manifest first, then a framework's file), and the
    others."""
    if len(paths) == 1:
        return paths[0], []
    ranks = {path: _rank(path) for path in paths}
    main = min(paths, key=lambda path: ranks[path])
    return main, [path for path in paths if path != main]


def _rank(path: Path) -> int:
    if path.suffix.lower() not in (*DATA, ".py"):
        return 0
    if path.suffix.lower() == ".py":
        return 2
    config = document(path)
    kind = "manifest" if "args" in config and "launch" in config else kind_of(config)
    return {"manifest": 0, "hf": 1, "deepspeed": 5, "accelerate": 4, None: 6}.get(kind, 2)


def _with_given(kind: str, config: dict[str, Any], reading: FileReading) -> tuple[str, dict[str, Any]]:
    """Return tables completed by the given files that no file names: the model's config.json, DeepSpeed's or
    accelerate's file, a base file. Raises InputError for one that is none of these."""
    framework = FRAMEWORK_BY_KIND[kind]
    for path in reading.files.given:
        if path in reading.files.opened:
            continue
        other_table = document(path)
        other_kind = kind_of(other_table)
        place = {"deepspeed": "deepspeed_json", "accelerate": "accelerate"}.get(other_kind or "")
        if "model_type" in other_table or "architectures" in other_table:  # the model's, which `_model` reads
            continue
        if place and place in (*framework.named.values(), "accelerate") and place not in config:
            config = config if isinstance(config.get("args"), dict) else {"args": config}
            config = {
                **config,
                place: accelerate.tables(other_table, {}) if place == "accelerate" else other_table,
            }
        elif (other_kind == kind and isinstance(config, Partial)) or (  # the base that was not found
            other_kind in (None, kind) and kind == "deepspeed" and is_neox(config)  # whose command takes several
        ):
            config = merge_tables(other_table, config)
        else:
            reason = "is not named by the other file, and is none that belongs to it"
            raise InputError("file", str(path), reason, "name one training's files")
    return kind, config


def _model(c: Configuration, reading: FileReading, named: str) -> tuple[ModelSpec | None, str]:
    """Return the model, or None and why a file that has it cannot be read: of a config.json that was given or lies
    in the folder that the file names as its model; else the published model of that name; else of a config.json next
    to the file. `named`: the name that a recipe has for it. A note says so where two of them differ."""
    given = [p for p in reading.files.given if p not in reading.files.opened and p.suffix == ".json"]
    config_json = next((p for p in given if "model_type" in document(p) or "architectures" in document(p)), None)
    is_meant = config_json is not None
    if config_json is None and c.model_name:
        config_json, home = reading.files.find(f"{c.model_name}/config.json"), reading.files.home
        is_copy = config_json is not None and config_json.absolute().parent == home.absolute()
        is_meant = not is_copy or (home / c.model_name).is_dir()
    name = named or c.model_name
    known = _preset_of(name)
    if config_json is None:
        return (_published(name, known, reading) if known else None), ""
    try:
        model = make_model({"config": str(config_json.absolute())}, Path())[0]
    except InputError as error:
        if is_meant or not known:
            return None, f"{config_json} {error.reason}"
        return _published(name, known, reading), ""
    of_name = make_model({"preset": known}, Path())[0] if known else model
    sizes = [f"{spec.parameter_count / 1e9:.3g}B parameters" for spec in (model, of_name)]
    if of_name.parameter_count != model.parameter_count:
        left = "is taken" if is_meant else "is left aside"
        reading.asks.append(
            f"{config_json} has {sizes[0]}, {name}, which the file names, {sizes[1]}: the former {left}"
        )
    if not is_meant and known:
        return _published(name, known, reading), ""
    reading.notes.append(f"the model is that of {config_json}")
    return model, ""


def _preset_of(name: str) -> str | None:
    """Return the preset of a model's name; None where there is none."""
    return name if name in presets.PRESETS else presets.published(name) if name else None


def _published(name: str, known: str, reading: FileReading) -> ModelSpec:
    """Return a published model, with a note where the name is that of a folder, or of a model with images."""
    said = "" if name == known or (name.count("/") == 1 and name[0] not in "./~") else f", by the name of {name}"
    said = f", the text part of {name}: its images are not priced" if re.search(r"(?i)-vl\b", name) else said
    (reading.asks if said else reading.notes).append(f"the model is {known}{said}")
    return make_model({"preset": known}, Path())[0]


def _folder(path: Path, kind: str | None, world: int | None) -> tuple[Configuration, Config]:
    """Read a folder with a program: its configuration, completed by config.json and train.py."""
    framework, config = folder.tables(path, document, kind_of)
    if kind not in (None, framework.reads):
        raise InputError("--kind", kind, f"{path} holds a configuration of {framework.reads}", "leave it out")
    c = _with_schedule(configured(config, framework.reads, world), Companions(path))
    seq = c.layout.seq or folder.sequence_in(path)
    model = c.spec or (folder.model_in(path) if framework.model_beside else None)
    return replace(c, layout=replace(c.layout, seq=seq), spec=model, open_model="" if model else c.open_model), config


def document(path: Path) -> dict[str, Any]:
    """Return a file's tables without other files; of a script {launch, env, args}. Raises InputError."""
    source = source_of(path, Companions(split_function(path)[0].parent))
    return dict(source.config) if source.started is None else as_tables(source.started)
