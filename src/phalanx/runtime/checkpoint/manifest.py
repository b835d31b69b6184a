"""The manifest of a checkpoint: what it holds, sealed with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = 2
MANIFEST = "phalanx.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written; the message names it and says why."""


@dataclass(frozen=True)
class Chunk:
    """A box of a logical tensor as one rank writes it; `fetch` returns its elements (sizes) in host memory."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]


def path_of(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def about(folder: Path, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises CheckpointError if it is unreadable or of an unknown version."""
    path = path_of(folder, step)
    try:
        manifest = read(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read ({error})") from None
    if manifest["version"] != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has version {manifest['version']}; this release reads version {VERSION}"
        )
    return manifest


def read(path: Path) -> dict[str, Any]:
    """Read a manifest. Raises OSError if the disk fails, ValueError if it differs from what was written."""
    text = (path / MANIFEST).read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(text)
        intact = manifest["version"] != VERSION or manifest["seal"] == seal(manifest)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise ValueError(f"{MANIFEST} differs from what was written")
    return manifest


def seal(about: dict[str, Any]) -> str:
    """Return the checksum of a manifest, without its seal."""
    rest = {key: value for key, value in about.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
