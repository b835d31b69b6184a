"""Weights on disk: a Hugging Face folder, or the checkpoint of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from phalanx.nn.hugging_face import files
from phalanx.nn.hugging_face.container import FIELD
from phalanx.nn.weight_source import Weights
from phalanx.runtime.checkpoint import store
from phalanx.runtime.checkpoint.container import Reader
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.spec import MODEL_FIELDS, ModelSpec, parameters

RUN = "RUN"
"""Placeholder field of errors about a run's checkpoint, which `errors_about` replaces."""


@dataclass(frozen=True)
class CheckpointWeights:
    """The parameters and buffers of one checkpoint; implements Weights."""

    reader: Reader

    def has(self, fqn: str) -> bool:
        return self._name(fqn) in self.reader.contents

    def dtype(self, fqn: str) -> torch.dtype:
        return self.reader.contents[self._name(fqn)][1]

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        return self.reader.read(self._name(fqn), start, stop)

    def _name(self, fqn: str) -> str:
        name = f"parameters.{fqn}"
        return name if name in self.reader.contents else f"buffers.{fqn}"


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, as opposed to a folder of Hugging Face weights."""
    return any((path / name).exists() for name in ("plan.json", "model.json", "checkpoint"))


@contextmanager
def errors_about(field: str) -> Iterator[None]:
    """Re-raise errors about weights with `field`, the setting that names the weights."""
    try:
        yield
    except InputError as error:
        if error.field not in (FIELD, RUN):
            raise
        raise InputError(field, error.value, error.reason, error.remedy) from None


def open_weights(path: Path, spec: ModelSpec, step: int | None = None) -> Weights:
    """Open the weights that train.weights names: a Hugging Face folder, safetensors or index file, of which only
    headers are read, or a run (see `run_weights`). Raises InputError if the weights do not fit this model or are
    damaged, and CheckpointError."""
    with errors_about("train.weights"):
        return run_weights(path, spec, step) if is_run(path) else files.read(path, spec)


def run_weights(run: Path, spec: ModelSpec, step: int | None = None) -> CheckpointWeights:
    """Open the parameters in a run's checkpoint of `step`; None: the newest intact one, which is read in full to
    verify it. Raises InputError, CheckpointError."""
    saved = run / "checkpoint"
    done = store.intact_steps(saved)
    if not done:
        raise InputError(RUN, str(run), store.why_none_intact(saved))
    if step is not None and step not in done:
        raise InputError("step", step, f"{run} has no such checkpoint", f"it has {', '.join(map(str, done))}")
    if step is None:
        step = store.newest_verified_step(saved)
    reader = Reader(saved, step)
    for p in parameters(spec):
        there = reader.contents.get(f"parameters.{p.fqn}")
        if there is None or there[0] != p.shape:
            have = "lacks it" if there is None else f"has {list(there[0])}"
            raise InputError(RUN, str(run), f"the model needs {p.fqn} {list(p.shape)}, the checkpoint {have}")
    extra = len([name for name in reader.contents if name.startswith("parameters.")]) - len(parameters(spec))
    if extra:
        raise InputError(RUN, str(run), f"the checkpoint has {extra} parameters more than the model")
    return CheckpointWeights(reader)


def describe(weights: Weights, spec: ModelSpec) -> str:
    """Describe weights in a few words: `llama, bfloat16, 8,030,261,248 parameters`."""
    kinds = sorted({str(weights.dtype(p.fqn)).removeprefix("torch.") for p in parameters(spec)})
    return f"{spec.family}, {' and '.join(kinds)}, {spec.parameter_count:,} parameters"


def introduce(path: Path, spec: ModelSpec) -> list[str]:
    """Return the lines that a run prints about its initial weights: a description, and the settings (other than
    shapes) in which the model that they were trained with differs. Raises InputError, CheckpointError."""
    lines = [f"weights: {path} ({describe(open_weights(path, spec), spec)})"]
    config = (path if path.is_dir() else path.parent) / "config.json"
    if is_run(path):
        theirs = plan.model_of(path)
    elif config.exists():
        theirs, _ = make_model({"config": str(config.absolute())}, config.parent)
    else:
        return lines
    for name in MODEL_FIELDS:
        ours, trained = getattr(spec, name), getattr(theirs, name)
        if ours != trained:
            lines.append(f"note: model.{name} = {ours}, the weights were made with {trained}")
    return lines


def widest_dtype(weights: Weights, spec: ModelSpec) -> torch.dtype:
    """Return the smallest type that holds all parameters."""
    return reduce(torch.promote_types, (weights.dtype(p.fqn) for p in parameters(spec)))
