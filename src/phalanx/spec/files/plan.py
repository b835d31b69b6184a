"""The Plan: all decisions about a run, as stored in `plan.json`.

Written before the first rank starts; read by every rank, by resume, and by commands that compare runs afterwards.

Its tables `choices` and `prediction` are plain dicts in memory. When a file is read they are checked against the
private records below, so that readers find numbers where they expect them.
"""

import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.documents import VERSION, read_json, tables_of
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files.job_file import ClusterChoice, JobFile, build
from phalanx.spec.job import Job, Train
from phalanx.spec.model.families import family_of
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.ranges import FilePath, Name, Natural, Range, Seconds, Share, require_ranges
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

_Amount = Annotated[int, Range(0, 10**40)]  # bytes or FLOPs of a whole step
_Share = Annotated[float, Range(-1e24, 1e24)]  # of a sum of seconds or bytes


@dataclass(frozen=True)
class _Bucket:
    bytes: _Amount
    reason: Name = ""


@dataclass(frozen=True)
class _Chunks:
    imbalance: Annotated[float, Range(0, 1e9)] = 0.0
    reason: Name = ""
    blocks: tuple[Natural, ...] | None = None


@dataclass(frozen=True)
class _Chosen:
    cluster: ClusterChoice
    tokens: Name
    transport: FilePath
    peak_flops_per_s: Annotated[float, Range(0, 1e24, above=True)]
    rates_origin: Name = ""
    calibrated: Name = ""
    stack: Name | None = None
    precision: Name | None = None
    collectives: tuple[Choice, ...] = ()
    launchers: tuple[Name, ...] = ()


@dataclass(frozen=True)
class _Predicted:
    step_time_s: Annotated[float, Range(0, 1e9, above=True)]
    memory_bytes: _Amount
    stack: Name | None = None
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    optimizer_s: Seconds = 0.0
    communication_s: Seconds = 0.0
    exposed_communication_s: Seconds = 0.0
    bubble_fraction: Share = 0.0
    mfu: Annotated[float, Range(0, 100)] = 0.0
    flops: _Amount = 0
    model_flops: _Amount = 0
    state_bytes: _Amount = 0
    activation_bytes: _Amount = 0
    bytes_per_axis: dict[str, _Amount] | None = None
    terms_s: dict[str, _Share] | None = None
    memory_terms: dict[str, _Share] | None = None


def require_typed(choices: Any, prediction: Any) -> None:
    """Require that the known keys of a plan.json's tables have the right types; other keys are ignored. Raises
    InputError with the field."""
    _require(_Chosen, choices, "choices")
    _require(_Predicted, prediction, "prediction")
    if choices.get("bucket") is not None:
        _require(_Bucket, choices["bucket"], "choices.bucket")
    if choices.get("chunks") is not None:
        _require(_Chunks, choices["chunks"], "choices.chunks")


def _require(kind: type[Any], table: Any, where: str) -> None:
    if not isinstance(table, dict):
        raise InputError(where, table, "must be a table of key = value")
    names = {f.name for f in fields(kind)}
    require_ranges(build(kind, {key: value for key, value in table.items() if key in names}, where), where)


@dataclass(frozen=True)
class Plan:
    """A planned run."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    strategy: Strategy
    train: Train
    choices: dict[str, Any]
    """Choices in addition to the strategy, with reasons: cluster, transports of collectives, bucket, threads."""
    prediction: dict[str, Any]
    """Prediction with which the run is compared: step_time_s, memory_bytes, bytes_per_axis, flops."""
    options: StackOptions = field(default_factory=StackOptions)
    """Options of the stack beyond the strategy. The file has the key only if some differ from the default."""

    @property
    def collectives(self) -> tuple[Choice, ...]:
        """The transport and algorithm chosen for each collective."""
        return tuple(build(Choice, c, "choices.collectives") for c in self.choices.get("collectives", ()))


def write(plan: Plan, path: Path) -> None:
    """Write a plan as plan.json, atomically."""
    write_json(path, to_dict(plan))


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as its JSON content: options by name, only those that differ from their defaults."""
    content = {"version": VERSION, **asdict(plan)}
    options = plan.options.changed()
    del content["options"]
    return content | ({"options": options} if options else {})


def from_dict(content: Any, where: str) -> Plan:
    """Build a Plan from the JSON that `write` wrote; `where` names the file in messages.

    Raises InputError for another version or a damaged file.
    """
    if not isinstance(content, dict) or "version" not in content:
        raise InputError("plan", where, "is not a plan.json")
    plan = build(Plan, tables_of(content, content["version"], "plan", where), "plan")
    require_typed(plan.choices, plan.prediction)
    family_of(plan.model.family)
    return plan


def read(path: Path) -> Plan:
    """Read a plan.json. Raises InputError."""
    if path.suffix == ".toml":
        remedy = f"phalanx plan {path} writes its plan.json"
        raise InputError("plan", str(path), "is TOML, as job files are; a plan is JSON", remedy)
    return from_dict(read_json(path, "plan"), str(path))


def job_of(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Read the job to run from a job file or a plan (a plan.json, or a folder with one), and apply
    `table.field=value` overrides. A plan made from a model alone has neither data nor a number of steps: the
    overrides must give them. Raises InputError.
    """
    if path.is_dir():
        path = path / "plan.json"
    if path.suffix != ".json":
        return job_file.load(path, overrides)
    plan = read(path)
    if not plan.train.name:
        missing = [f"{name}=..." for name in _UNPLANNED if not any(o.startswith(f"{name}=") for o in overrides)]
        if missing:
            reason = "has neither data nor a number of steps, since it was planned from a model alone"
            raise InputError("plan", str(path), reason, f"set {' '.join(missing)}")
        plan = replace(plan, train=replace(plan.train, name=path.stem))
    return as_job(plan, overrides)


_UNPLANNED = ("train.data", "train.steps")


def as_job(plan: Plan, overrides: Sequence[str] = ()) -> JobFile:
    """Return the job file from which a plan was made, with the chosen strategy. Raises InputError for bad
    overrides."""
    choice = build(ClusterChoice, plan.choices["cluster"], "cluster")
    tables = job_file.to_tables(JobFile(plan.model, choice, plan.job, plan.strategy, plan.train))
    return job_file.from_tables(job_file.override(json.loads(json.dumps(tables)), overrides), Path())


def write_model(spec: ModelSpec, folder: Path) -> None:
    """Write model.json, which replaces a plan in the folder of an imported model."""
    write_json(folder / "model.json", {"version": VERSION, "model": asdict(spec)})


def model_of(folder: Path) -> ModelSpec:
    """Read the model of a run's folder, or of a folder made by `phalanx runs import`. Raises InputError."""
    path = folder / "model.json"
    trained = (folder / "plan.json").exists()
    if not trained and not path.exists() and (folder / "config.json").exists():
        raise InputError(
            "RUN", str(folder), "is not a run", "phalanx runs import makes one from Hugging Face weights"
        )
    if trained or not path.exists():
        return read(folder / "plan.json").model
    content = read_json(path, "model")
    if not isinstance(content, dict) or "version" not in content:
        raise InputError("model", str(path), "is not a model.json")
    model = build(ModelSpec, tables_of(content, content["version"], "model", str(path)).get("model"), "model")
    family_of(model.family)
    return model


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text atomically. A link at `path` is replaced, not followed; a device such as /dev/null is written to,
    and so is what /dev/stdout leads to. Raises OSError, which names `path`."""
    if path.is_block_device():
        raise OSError(errno.EINVAL, "is a disk", str(path))
    if str(path.parent) in ("/dev", "/dev/fd") or (path.is_char_device() and not path.is_symlink()):
        path.write_text(text)  # root would replace the machine's device with a file
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.unlink(missing_ok=True)  # it may be a link
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            part.unlink()
