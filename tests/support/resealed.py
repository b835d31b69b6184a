"""Manifests that agree with whatever the files of a checkpoint now are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from phalanx.runtime.checkpoint.manifest import MANIFEST
from phalanx.spec.documents import seal


def reseal(path: Path) -> None:
    """Write a manifest that the files in a checkpoint's folder agree with, as anybody can."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest.pop("seal", None)
    manifest["files"] = {
        file.name: [file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()]
        for file in sorted(path.iterdir())
        if file.name != MANIFEST
    }
    (path / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}))
