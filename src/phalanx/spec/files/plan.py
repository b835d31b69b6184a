"""The Plan: everything that a run was decided to be, as `plan.json` keeps it.

Written before the first rank starts, read by every rank, by resume and by whoever compares afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files.job_file import ClusterChoice, JobFile, build
from phalanx.spec.job import Job, Train
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """`choices`: what was decided beside the strategy (transport, bucket, threads). `prediction`: the figures that
    the run will be held against: step_time_s, memory_bytes, bytes_per_axis, flops."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    strategy: Strategy
    train: Train
    choices: dict[str, Any]
    prediction: dict[str, Any]

    @property
    def collectives(self) -> tuple[Choice, ...]:
        """Which transport and algorithm serve which collective."""
        return tuple(build(Choice, c, "choices.collectives") for c in self.choices.get("collectives", ()))


def write(plan: Plan, path: Path) -> None:
    write_json(path, {"version": VERSION, **asdict(plan)})


def from_dict(given: Any, where: str) -> Plan:
    """A Plan from what `write` wrote. Raises InputError for an unknown version or a damaged file."""
    if not isinstance(given, dict) or "version" not in given:
        raise InputError("plan", where, "is not a plan.json")
    if given["version"] != VERSION:
        raise InputError("plan", where, f"has version {given['version']}", f"this Phalanx reads version {VERSION}")
    return build(Plan, {k: v for k, v in given.items() if k != "version"}, "plan")


def _unreadable(path: Path, error: Exception) -> InputError:
    if path.suffix == ".toml" and isinstance(error, json.JSONDecodeError):
        mend = f"phalanx plan {path} writes its plan.json"
        return InputError("plan", str(path), "is TOML, as job files are; a plan is JSON", mend)
    return InputError("plan", str(path), f"cannot be read ({error})")


def read(path: Path) -> Plan:
    try:
        return from_dict(json.loads(path.read_text()), str(path))
    except FileNotFoundError:
        raise InputError("plan", str(path), "no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _unreadable(path, error) from None


def job_of(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """What to run, with `table.field=value` laid over it: a job file, or a plan (a plan.json, or a folder with one)
    that was made of a job. One that was made of names and numbers says nothing of data and steps: then these must be
    among the overrides. Raises InputError."""
    if path.is_dir():
        path = path / "plan.json"
    if path.suffix != ".json":
        return job_file.load(path, overrides)
    given = read(path)
    if not given.train.name:
        missing = [f"--set {name}=..." for name in _UNPLANNED if not any(o.startswith(f"{name}=") for o in overrides)]
        if missing:
            reason = "says what to train, not on which data nor how long: it was planned with --model"
            raise InputError("plan", str(path), reason, f"add {' '.join(missing)}")
        given = replace(given, train=replace(given.train, name=path.stem))
    return as_job(given, overrides)


_UNPLANNED = ("train.data", "train.steps")


def as_job(given: Plan, overrides: Sequence[str] = ()) -> JobFile:
    """The job that a plan was made of, its strategy as it was chosen. Raises InputError."""
    choice = build(ClusterChoice, given.choices["cluster"], "cluster")
    tables = job_file.to_tables(JobFile(given.model, choice, given.job, given.strategy, given.train))
    return job_file.from_tables(job_file.override(json.loads(json.dumps(tables)), overrides), Path())


def write_model(spec: ModelSpec, folder: Path) -> None:
    """What an imported model's folder has instead of a plan: model.json."""
    write_json(folder / "model.json", {"version": VERSION, "model": asdict(spec)})


def model_of(folder: Path) -> ModelSpec:
    """The model of a run, or of a folder that `phalanx import` made. Raises InputError."""
    path = folder / "model.json"
    trained = (folder / "plan.json").exists()
    if not trained and not path.exists() and (folder / "config.json").exists():
        raise InputError("RUN", str(folder), "is no run", "phalanx import makes one of Hugging Face weights")
    if trained or not path.exists():
        return read(folder / "plan.json").model
    try:
        given = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("model", str(path), f"cannot be read ({error})") from None
    if not isinstance(given, dict) or given.get("version") != VERSION:
        raise InputError("model", str(path), f"is not a model.json of version {VERSION}")
    return build(ModelSpec, given.get("model"), "model")


def write_json(path: Path, content: Any) -> None:
    """Write whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)
