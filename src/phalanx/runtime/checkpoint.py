"""Checkpoints of logical tensors: single-process names, global shapes; the layout never appears.

    checkpoint/step-00000100/      torch.distributed.checkpoint's container, with
        parameters.<fqn>           in the master type
        optimizer.<fqn>.<state>    exp_avg, exp_avg_sq, momentum_buffer, step
    checkpoint/step-00000100/phalanx.json    {version, step, seed, data cursor, random state}

A checkpoint is written beside its final name and moved there when it is whole, so a crash leaves the previous
one. All randomness of a run is a function of (seed, step); that pair is the random state.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names it and says why."""


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending."""
    found = (p.name.removeprefix("step-") for p in folder.glob("step-*") if (p / "phalanx.json").exists())
    return sorted(int(name) for name in found if name.isdigit())


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = steps(folder)
    return _path(folder, found[-1]) if found else None


def save(folder: Path, step: int, tensors: dict[str, Tensor], about: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint from one rank that holds every tensor whole; keep the last `keep`."""
    final = _path(folder, step)
    part = folder / f".writing-{step:08d}-{os.getpid()}"
    for stale in folder.glob(".writing-*"):
        shutil.rmtree(stale)
    part.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), checkpoint_id=part, no_dist=True)
    (part / "phalanx.json").write_text(json.dumps({"version": VERSION, "step": step, **about}))
    for file in part.iterdir():
        _sync(file)
    _sync(part)
    if final.exists():
        shutil.rmtree(final)
    os.replace(part, final)
    _sync(folder)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(_path(folder, old))
    return final


def about(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError for an unknown version."""
    path = _path(folder, step) / "phalanx.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint {path.parent} cannot be read ({error})") from None
    if found.get("version") != VERSION:
        raise CheckpointError(f"checkpoint {path.parent} has version {found.get('version')}; this reads {VERSION}")
    return found  # type: ignore[no-any-return]


def load(folder: Path, step: int, tensors: dict[str, Tensor], optional: str | None = None) -> None:
    """Fill tensors in place, by name; every rank reads what it needs. What is not there and begins with `optional`
    stays as it is. Raises CheckpointError."""
    path = _path(folder, step)
    about(folder, step)
    try:
        there = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        wanted = {n: t for n, t in tensors.items() if n in there or optional is None or not n.startswith(optional)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(wanted, checkpoint_id=path, no_dist=True)
    except (OSError, RuntimeError, KeyError, ValueError, dcp.CheckpointException) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {first}") from None


def _sync(path: Path) -> None:
    """Ask the disk to have it, before the rename says that it is there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
