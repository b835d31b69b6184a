"""The view of an answer: lines, tables, pictures and a page, each made when needed; and the table of all views."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.html.page import Section, page, section, with_section
from phalanx.report.pictures.figure import Picture
from phalanx.spec.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text


def report(sheets: Sequence[Sheet], pictures: Sequence[Picture] = ()) -> str:
    """Return the page of tables, with pictures of their subject first."""
    titles = {sheet.title for sheet in sheets}
    drawn = [p for p in pictures if p.title not in titles]
    sections = [Section(p.title, f"{p.note} Source: {p.source}".strip(), panels=p.panels) for p in drawn]
    return page((sheets[0] if sheets else pictures[0]).title, "tables", [*sections, *map(section, sheets)])


_UNKNOWN = "What this does not know"
ViewPart = str | Sheet | Callable[[int], "Text"]
"""A line, a table, or a drawing in characters of at most a number of columns."""


@dataclass(frozen=True)
class View:
    """Lines, tables and drawings in the order in which they are read."""

    parts: Sequence[ViewPart]
    subject: str = ""
    """The command without `phalanx`, which names a picture of the tables."""
    pictures: Callable[[], list[Picture]] | None = None
    """Function that returns pictures of the subject; None where only columns can be drawn."""
    html: Callable[[], str] | None = None
    """Function that returns the page; None where it has the tables alone."""
    doubts: tuple[str, ...] = ()
    """Lines on what the answer does not know, which begin a page and a CSV; `parts` have them already."""

    @property
    def sheets(self) -> list[Sheet]:
        """The tables."""
        return [part for part in self.parts if isinstance(part, Sheet)]

    def page(self) -> str:
        """Return the page: one HTML file that needs nothing else."""
        if self.html is None and not self.sheets:
            return page(_UNKNOWN, "tables", [Section(_UNKNOWN, text=self.doubts)])
        whole = self.html() if self.html is not None else report(self.sheets, self._pictures())
        return with_section(whole, Section(_UNKNOWN, text=self.doubts)) if self.doubts else whole

    def csv(self) -> str:
        """Return the tables as CSV, one after the other, the table of doubts first. Raises InputError where there are
        none."""
        if not self.sheets and not self.doubts:
            raise InputError("save", "csv", "has no table to write", "name a .html file, or --json")
        unknown = [Sheet(_UNKNOWN, columns("caveat"), [(line,) for line in self.doubts])] if self.doubts else []
        return "\n".join(sheet.as_csv() for sheet in (*unknown, *self.sheets))

    def write(self, file: Path) -> None:
        """Write the tables (.csv), the page (.html) or the pictures, by the file's suffix; without pictures of the
        subject, the columns are drawn. Raises InputError."""
        from phalanx.report.pictures.files import write
        from phalanx.report.plots import picture

        if file.suffix.lower() == ".csv":
            file.write_text(self.csv())
        elif file.suffix.lower() == ".html" and (self.sheets or self.doubts or self.html is not None):
            file.write_text(self.page())
        else:
            write(self._pictures() or [picture(self.sheets, self.subject)], file)

    def _pictures(self) -> list[Picture]:
        return self.pictures() if self.pictures is not None else []


_VIEWS = {
    name: place
    for place, names in {
        "phalanx.report.collectives:proof": "CollectiveProof",
        "phalanx.report.collectives:algorithm": "CollectiveSteps",
        "phalanx.report.collectives:proof_count": "ProofCount",
        "phalanx.report.collectives:own_reduction": "OwnReduction",
        "phalanx.report.collectives:bound": "AllReduceBound",
        "phalanx.report.collectives:algorithms": "CollectiveComparison",
        "phalanx.report.collectives:measurement": "CollectiveMeasurement",
        "phalanx.report.compare": "Comparison",
        "phalanx.reliability.report": "Goodput",
        "phalanx.reliability.report:scores": "GoodputScores",
        "phalanx.report.compare:stacks": "StackComparison",
        "phalanx.report.measured.diagnosis": "Diagnosis",
        "phalanx.report.measured.measure": "Measurement",
        "phalanx.report.measured.measure:calibration": "Calibrated",
        "phalanx.report.measured.measure:machine_state": "MachineState",
        "phalanx.report.mesh": "MeshGroups RankMap RankPlace",
        "phalanx.report.models": "ModelShape PresetModels",
        "phalanx.report.models:clusters": "PresetClusters",
        "phalanx.report.observation:observation": "Observation",
        "phalanx.report.observation:differences": "PlanDifferences",
        "phalanx.report.observation:findings": "ObservedFindings",
        "phalanx.report.observation:improvement": "ObservedImprovement",
        "phalanx.report.observation:price": "ObservedPrice",
        "phalanx.report.pipeline": "PipelineComparison PipelineDrawing PipelineProofs",
        "phalanx.report.plan": "ModelPlan",
        "phalanx.report.plan:job_plan": "JobPlan",
        "phalanx.report.predict": "Prediction",
        "phalanx.report.predict:explanation": "Explanation",
        "phalanx.report.read": "Reading",
        "phalanx.report.read:export": "Export",
        "phalanx.report.read:findings": "Findings",
        "phalanx.report.read:improvement": "Improvement",
        "phalanx.report.read:tries_view": "TriedChanges",
        "phalanx.report.measured.runs:expert_balance": "ExpertBalance",
        "phalanx.report.measured.runs:outcome": "Outcome",
        "phalanx.report.measured.runs:continuations": "Continuations",
        "phalanx.report.measured.runs:weights": "ExportedWeights ImportedWeights",
        "phalanx.report.simulation": "SimulatedStep",
        "phalanx.report.tables": "Tables",
        "phalanx.report.validate": "PredictionScores",
        "phalanx.report.validate:choices": "ChoiceScores",
        "phalanx.report.validate:kernels": "KernelScores",
        "phalanx.report.validate:collectives": "CollectiveScores",
        "phalanx.report.measured.verify": "Verification",
        "phalanx.report.measured.verify:parity": "Parity",
        "phalanx.report.measured.verify:program_parity": "ProgramParity",
        "phalanx.textbook.answers:drawing_view": "Drawing",
        "phalanx.textbook.answers:picture_list": "PictureList",
        "phalanx.textbook.answers:path": "DecisionPath",
        "phalanx.textbook.answers:quiz": "Quiz",
    }.items()
    for name in names.split()
}
"""Name of an answer's class -> `module:function` of its view; the function is `view` where none is named. Modules are
imported when they are needed, so that this room does not depend on the verticals."""


def view_of(answer: Any, **details: Any) -> View:
    """Return the view of an answer. `details`: further arguments of its function, such as more=True."""
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
