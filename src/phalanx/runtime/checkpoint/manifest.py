"""The manifest of a checkpoint: its table of contents, sealed with a checksum."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.runtime.checkpoint.regular_files import read_json, require_plain
from phalanx.spec.documents import seal

VERSION = 3
MANIFEST = "phalanx.json"
_LARGEST = 2**26  # bytes: half a million files


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


def open_manifest(folder: Path, step: int) -> dict[str, Any]:
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
    """Read a manifest. Raises OSError if the disk fails, ValueError if it differs from what was written. The seal
    only detects damage and proves no authorship: for the current version, the names and sizes of files are checked
    too."""
    try:
        manifest: dict[str, Any] = read_json(path / MANIFEST, _LARGEST)
        version = manifest["version"]
        intact = type(version) is int and (version != VERSION or manifest["seal"] == seal(manifest))
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError):
        intact = False
    if not intact:
        raise ValueError(f"{MANIFEST} differs from what was written")
    if version == VERSION:
        _require_files(manifest.get("files"))
        if type(step := manifest.get("step")) is not int or path.name != path_of(path.parent, step).name:
            raise ValueError(f"{MANIFEST} is of step {str(step)[:20]}, not of the folder's")
    return manifest


def _require_files(files: object) -> None:
    """Require {plain name: [bytes, checksum]}. Raises ValueError."""
    if not isinstance(files, dict):
        raise ValueError(f"{MANIFEST} names no files")
    for name, row in files.items():
        require_plain(name)
        if not isinstance(row, list) or [type(item) for item in row] != [int, str] or row[0] < 0:
            raise ValueError(f"{MANIFEST} does not give the size and checksum of {name}")
