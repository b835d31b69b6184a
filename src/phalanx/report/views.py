"""The view of each answer, by its type. A view's module is imported when an answer of its type is shown."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from importlib import import_module
from typing import Any

from phalanx.planning.tables.table import Sheet
from phalanx.report.view import View

_VIEWS = {
    "AllReduceBound": "phalanx.report.collectives",
    "Calibrated": "phalanx.report.calibration",
    "ChoiceScores": "phalanx.report.validate:choices",
    "CollectiveComparison": "phalanx.report.collectives",
    "CollectiveProof": "phalanx.report.collectives",
    "CollectiveSteps": "phalanx.report.collectives",
    "Comparison": "phalanx.report.compare",
    "Continuations": "phalanx.report.weights",
    "DecisionPath": "phalanx.textbook.answers",
    "Diagnosis": "phalanx.report.diagnosis",
    "Drawing": "phalanx.textbook.answers",
    "ExpertBalance": "phalanx.report.experts",
    "Explanation": "phalanx.report.predict:explanation",
    "Export": "phalanx.report.read:export",
    "ExportedWeights": "phalanx.report.weights",
    "Findings": "phalanx.report.read:findings",
    "ImportedWeights": "phalanx.report.weights",
    "Improvement": "phalanx.report.read:improvement",
    "JobPlan": "phalanx.report.plan:job_plan",
    "KernelScores": "phalanx.report.validate:kernels",
    "MachineState": "phalanx.report.measure:machine_state",
    "CollectiveMeasurement": "phalanx.report.collectives",
    "Measurement": "phalanx.report.measure",
    "MeshGroups": "phalanx.report.mesh",
    "ModelPlan": "phalanx.report.plan",
    "ModelShape": "phalanx.report.models",
    "Observation": "phalanx.report.observe",
    "ObservedFindings": "phalanx.report.observed",
    "ObservedImprovement": "phalanx.report.observed",
    "ObservedPrice": "phalanx.report.observed",
    "Outcome": "phalanx.report.train",
    "OwnReduction": "phalanx.report.collectives",
    "Parity": "phalanx.report.verify:parity",
    "PictureList": "phalanx.textbook.answers",
    "PipelineComparison": "phalanx.report.pipeline",
    "PipelineDrawing": "phalanx.report.pipeline",
    "PipelineProofs": "phalanx.report.pipeline",
    "PlanDifferences": "phalanx.report.observed",
    "PredictionScores": "phalanx.report.validate",
    "PresetClusters": "phalanx.report.models:clusters",
    "PresetModels": "phalanx.report.models",
    "Prediction": "phalanx.report.predict",
    "ProofCount": "phalanx.report.collectives",
    "ProgramParity": "phalanx.report.verify:program_parity",
    "Quiz": "phalanx.textbook.answers",
    "RankMap": "phalanx.report.mesh",
    "RankPlace": "phalanx.report.mesh",
    "Reading": "phalanx.report.read",
    "StackComparison": "phalanx.report.compare:stacks",
    "Tables": "phalanx.report.tables",
    "TriedChanges": "phalanx.report.read:tried",
    "Verification": "phalanx.report.verify",
}
"""By the name of an answer's class the function that shows it, `view` of the module where none is named. Those of the
verticals are named here and not imported: a common room does not know them."""


def view_of(answer: Any, **details: Any) -> View:
    """Return how people see an answer. `details`: what to show beyond the usual, such as more=True."""
    module, _, function = _VIEWS[type(answer).__name__].partition(":")
    view: View = getattr(import_module(module), function or "view")(answer, **details)
    lines = tuple(caveat.line for caveat in getattr(answer, "doubts", ()))
    return replace(view, doubts=lines) if lines else view


def notebook_html(answer: Any) -> str:
    """Return an answer's lines and tables as HTML."""
    from phalanx.report.style import html_table

    parts = view_of(answer).parts
    return "".join(
        f"<p>{escape(part)}</p>"
        if isinstance(part, str)
        else html_table(part)
        if isinstance(part, Sheet)
        else f"<pre>{escape(part(_COLUMNS).plain)}</pre>"
        for part in parts
    )


_COLUMNS = 100
"""Width of a drawing in characters in a notebook."""
