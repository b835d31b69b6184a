"""Hugging Face weights into a run's folder, and back: `phalanx runs import` and `phalanx runs export`.

runs/NAME/model.json                 the ModelSpec, where a trained run has plan.json
runs/NAME/checkpoint/step-00000000   the parameters, in the type they were stored in
runs/NAME/config.json, tokenizer...  copied unchanged, for the export
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.answers.answer import Answer
from phalanx.answers.machine.this_machine import Announce
from phalanx.runs.folder import RUNS, claim, move_aside
from phalanx.runs.initial_weights import TOKENIZER, companions
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file, plan
from phalanx.spec.job import require_folder_name
from phalanx.spec.model.families import to_hugging_face
from phalanx.spec.model.modules import require_modules
from phalanx.spec.model.spec import ModelSpec, buffers, parameters

if TYPE_CHECKING:
    from phalanx.nn.weight_source import Weights
    from phalanx.runtime.checkpoint.manifest import Chunk

TYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ImportedWeights(Answer):
    """The run that was made of imported weights. `run`: its folder, relative to the working folder."""

    run: str


@dataclass(frozen=True)
class ExportedWeights(Answer):
    """A folder that transformers loads; `files`: names of its files of weights."""

    folder: str
    files: tuple[str, ...]


def import_weights(source: Path, name: str, announce: Announce) -> ImportedWeights:
    """Import a Hugging Face folder as runs/NAME.

    Everything is checked before anything is written; one tensor at a time is in memory. Raises InputError.
    """
    from phalanx.nn.hugging_face import files
    from phalanx.nn.weight_files import describe, errors_about
    from phalanx.runtime.checkpoint import store

    if not source.is_dir():
        remedy = "name the folder that holds config.json and the weights"
        raise InputError("HF_DIR", str(source), "is not a folder", remedy)
    name = name or source.resolve().name
    require_folder_name("name", name)
    folder, origin = RUNS / name, source.resolve()
    if folder.resolve() in (origin, *origin.parents):
        raise InputError("name", name, f"{folder} is where the weights are read from", "choose another")
    spec, notes = job_file.make_model({"config": str(source.absolute() / "config.json")}, source)
    require_modules(spec)
    with errors_about("HF_DIR"):
        weights = files.read(source, spec)
        for note in notes:
            announce(f"note: {note}")
        needed = sum(p.numel * weights.dtype(p.fqn).itemsize for p in parameters(spec))
        free = shutil.disk_usage(RUNS if RUNS.exists() else RUNS.absolute().parent).free
        if needed > free:
            raise InputError("name", name, f"needs {write_bytes(needed)}, the disk has {write_bytes(free)} free")
        with ExitStack() as stack:
            try:
                claim(folder, stack, "name")
                part = folder.with_name(f".{name}.importing")
                shutil.rmtree(part, ignore_errors=True)  # left by an import that was killed
                stack.callback(shutil.rmtree, part, ignore_errors=True)
                part.mkdir()
                announce(f"importing {source} ({describe(weights, spec)})")
                store.write_alone(part / "checkpoint", 0, _chunks(weights, spec), {"imported": str(source)})
                for file in companions(source):
                    shutil.copyfile(file, part / file.name)
                plan.write_model(spec, part)
                move_aside(folder)  # an old run of that name, only now that the new one is complete
                os.replace(part, folder)
            except OSError as error:
                raise InputError("name", name, f"{folder} cannot be made ({error})") from None
    return ImportedWeights(os.path.relpath(folder))


def _chunks(weights: Weights, spec: ModelSpec) -> list[Chunk]:
    """Return parameters and buffers as chunks of a checkpoint, each read only when it is written."""
    from phalanx.runtime.checkpoint.manifest import Chunk

    kinds = [("parameters", p) for p in parameters(spec)]
    kinds += [("buffers", b) for b in buffers(spec) if weights.has(b.fqn)]
    return [
        Chunk(
            f"{kind}.{p.fqn}",
            p.shape,
            tuple(0 for _ in p.shape),
            p.shape,
            weights.dtype(p.fqn),
            lambda p=p: weights.slice(p.fqn, 0, p.numel).view(p.shape),  # type: ignore[misc]
        )
        for kind, p in kinds
    ]


def export_weights(
    run: Path, out: Path, dtype: str, step: int | None, shard_bytes: float, announce: Announce
) -> ExportedWeights:
    """Export a run's checkpoint as a folder that `transformers` loads.

    `step` None takes the newest checkpoint, an empty `dtype` keeps its type, no file exceeds `shard_bytes`. One
    tensor at a time is in memory. Raises InputError, CheckpointError.
    """
    from phalanx.nn.hugging_face import files
    from phalanx.nn.weight_files import describe, run_weights, widest_dtype
    from phalanx.runtime.comm.dtypes import DTYPE_NAMES, DTYPES

    if dtype and dtype not in TYPES:
        raise InputError("dtype", dtype, "is not a type for weights", f"use one of {', '.join(TYPES)}")
    files.require_place(out)
    spec = plan.model_of(run)
    weights = run_weights(run, spec, step)
    # No special tokens unless the run's own config names them: the family's defaults are ordinary tokens here.
    base: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if (run / "config.json").exists():
        imported, _ = job_file.make_model({"config": str(run.absolute() / "config.json")}, run)
        config = read_json(run / "config.json", "config")
        config.pop("torch_dtype", None)
        # A run that started from these weights may be another model; it keeps their special tokens alone.
        same = _plain(imported) == _plain(spec)
        base = config if same else base | {k: v for k, v in config.items() if k.endswith("_token_id")}
    config = {**base, **to_hugging_face(spec), "dtype": dtype or DTYPE_NAMES[widest_dtype(weights, spec)]}
    _require_expressible(config, spec)
    small = {file.name: file.read_bytes() for file in companions(run)}
    if TOKENIZER in small and "tokenizer_config.json" not in small:
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.max_seq}
        small["tokenizer_config.json"] = (json.dumps(about, indent=2) + "\n").encode()
    small["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    announce(f"exporting {run} ({describe(weights, spec)}) to {out}{f' in {dtype}' if dtype else ''}")
    written = files.write(out, spec, weights, DTYPES[dtype] if dtype else None, shard_bytes, small)
    return ExportedWeights(str(out), tuple(file.name for file in written))


def _require_expressible(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Require that a config.json expresses the whole model: `transformers` reads nothing else. Raises InputError."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        back = _plain(job_file.make_model({"config": str(path)}, path.parent)[0])
    for name, value in _plain(spec).items():
        if value != back[name]:
            reason = f"a {spec.family} config.json of transformers cannot express it (it would mean {back[name]})"
            raise InputError(f"model.{name}", value, reason)


def _plain(spec: ModelSpec) -> dict[str, Any]:
    """Return a model's fields in a normal form, which is equal for models with equal logits: defaults are filled in,
    and fields that only affect gradients are dropped."""
    if spec.experts is not None:
        balance_bias = None if spec.experts.balance_bias is None else 0.0
        spec = replace(spec, experts=replace(spec.experts, balance_loss=0.0, z_loss=0.0, balance_bias=balance_bias))
    windowed = tuple(i for i in range(spec.layers) if spec.window_of(i) is not None)
    window = spec.window if windowed else None
    return asdict(
        replace(spec, rotary_dim=spec.rotary_width, window=window, window_layers=windowed if window else None)
    )
