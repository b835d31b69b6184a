"""Cleanup after a killed run in its checkpoints' folder."""

import shutil
from pathlib import Path


def sweep(folder: Path) -> None:
    """Remove checkpoints that were half written or half removed."""
    for part in (*folder.glob(".writing-*"), *folder.glob(".old-*")):
        shutil.rmtree(part, ignore_errors=True)
