"""The view of each answer, by its type. A view's module is imported when an answer of its type is shown."""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import Any

from phalanx.planning.tables.table import Sheet
from phalanx.report.view import View

_VIEWS = {
    "ChoiceScores": "phalanx.report.choices",
    "AllReduceBound": "phalanx.report.collectives",
    "CollectiveComparison": "phalanx.report.collectives",
    "CollectiveProof": "phalanx.report.collectives",
    "CollectiveSteps": "phalanx.report.collectives",
    "Comparison": "phalanx.report.compare",
    "ExpertBalance": "phalanx.report.experts",
    "Explanation": "phalanx.report.explain",
    "Continuations": "phalanx.report.weights",
    "DecisionPath": "phalanx.textbook.answers",
    "Drawing": "phalanx.textbook.answers",
    "ExportedWeights": "phalanx.report.weights",
    "Export": "phalanx.report.export",
    "Findings": "phalanx.report.findings",
    "ImportedWeights": "phalanx.report.weights",
    "Improvement": "phalanx.report.improve",
    "JobPlan": "phalanx.report.job_plan",
    "KernelScores": "phalanx.report.validate_kernels",
    "MachineState": "phalanx.report.doctor",
    "MeasuredCollective": "phalanx.report.collectives",
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
    "Parity": "phalanx.report.parity",
    "PictureList": "phalanx.textbook.answers",
    "PipelineComparison": "phalanx.report.pipeline",
    "PipelineDrawing": "phalanx.report.pipeline",
    "PipelineProofs": "phalanx.report.pipeline",
    "PlanDifferences": "phalanx.report.observed",
    "PredictionScores": "phalanx.report.validate",
    "PresetClusters": "phalanx.report.clusters",
    "PresetModels": "phalanx.report.models",
    "Prediction": "phalanx.report.predict",
    "ProofCount": "phalanx.report.collectives",
    "Quiz": "phalanx.textbook.answers",
    "RankMap": "phalanx.report.mesh",
    "RankPlace": "phalanx.report.mesh",
    "Reading": "phalanx.report.read",
    "StackComparison": "phalanx.report.stacks",
    "Tables": "phalanx.report.tables",
    "Verification": "phalanx.report.verify",
}
"""By the name of an answer's class the module whose `view` shows it. Those of the verticals are named here and not
imported: a common room does not know them."""


def view_of(answer: Any, **details: Any) -> View:
    """Return how people see an answer. `details`: what to show beyond the usual, such as more=True."""
    view: View = import_module(_VIEWS[type(answer).__name__]).view(answer, **details)
    return view


def notebook_html(answer: Any) -> str:
    """Return an answer's lines and tables as HTML."""
    from phalanx.report.sheets import html_table

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
