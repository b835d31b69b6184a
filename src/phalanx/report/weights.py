"""Weights that were imported or exported, and texts that a model continued, in lines."""

from __future__ import annotations

from phalanx.answers.generate import Continuations
from phalanx.answers.weights import ExportedWeights, ImportedWeights
from phalanx.report.view import View


def view(a: ImportedWeights | ExportedWeights | Continuations) -> View:
    """Name the run or the files that were written, or show the texts."""
    if isinstance(a, ImportedWeights):
        return View([f"run: {a.run}/"])
    if isinstance(a, ExportedWeights):
        return View([f"{a.folder}/: {', '.join(a.files[:3])}{' ...' if len(a.files) > 3 else ''}, config.json"])
    return View([c.text for c in a.texts])
