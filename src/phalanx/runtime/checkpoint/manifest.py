"""What a checkpoint says of itself: its manifest, sealed with a checksum."""

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
    """A checkpoint that cannot be used or written; the message names it and says why."""


@dataclass(frozen=True)
class Chunk:
    """A box of a logical tensor, as one rank writes it. `fetch` gives its elements, of these sizes, on the host."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def about(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError, for an unknown version too."""
    path = path_of(folder, step)
    try:
        found = read(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read ({error})") from None
    if found["version"] != VERSION:
        raise CheckpointError(f"checkpoint {path} has version {found['version']}; this reads {VERSION}")
    return found


def read(path: Path) -> dict[str, Any]:
    """Raises OSError where the disk does not give it, ValueError where it is not as it was written."""
    text = (path / MANIFEST).read_bytes()
    try:
        found: dict[str, Any] = json.loads(text)
        intact = found["version"] != VERSION or found["seal"] == seal(found)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise ValueError(f"{MANIFEST} is not as it was written")
    return found


def seal(about: dict[str, Any]) -> str:
    """The checksum of what a checkpoint says of itself."""
    rest = {key: value for key, value in about.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
