"""What a run that was killed leaves in its checkpoints' folder."""

from __future__ import annotations

import shutil
from pathlib import Path


def sweep(folder: Path) -> None:
    """Remove what was half written or half removed."""
    for part in (*folder.glob(".writing-*"), *folder.glob(".old-*")):
        shutil.rmtree(part, ignore_errors=True)
