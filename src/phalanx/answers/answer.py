"""What every answer has: a plain form, a table for pandas, and how a notebook shows it.

How people see an answer is a View (report/views.py), which is found by the answer's type when it is needed: the
floors below know nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.answers.encode import plain

if TYPE_CHECKING:
    from phalanx.frameworks.caveats import Caveat


@dataclass(frozen=True)
class Page:
    """A report as one HTML file."""

    html: str

    def save(self, file: str | Path) -> Path:
        """Write the page and return its path. Raises OSError."""
        path = Path(file)
        path.write_text(self.html)
        return path

    def _repr_html_(self) -> str:
        return f'<iframe style="width:100%;height:40rem;border:0" srcdoc="{escape(self.html)}"></iframe>'


class Answer:
    """The answer to a question: a frozen dataclass whose fields name their units."""

    rows_of: ClassVar[str] = ""
    """The field that has a data frame's rows; "" where the answer is one row."""

    @property
    def doubts(self) -> tuple[Caveat, ...]:
        """What matters to the answer and is not modelled, not judged, assumed or missing."""
        of_question: tuple[Caveat, ...] = getattr(getattr(self, "question", None), "caveats", ())
        return getattr(self, "caveats", of_question)

    def to_dict(self) -> Any:
        """Return the answer as `--json` prints it."""
        return plain(self)

    def records(self) -> list[dict[str, Any]]:
        """Return the rows that a data frame has, with mappings as columns: `terms_s` of a term becomes `term_s`."""
        return [flat(plain(row)) for row in (getattr(self, self.rows_of) if self.rows_of else (self,))]

    def to_pandas(self) -> Any:
        """Return a DataFrame of the records. Raises ImportError without pandas."""
        return frame(self.records())

    def plot(self) -> Page:
        """Return the report: what `--save FILE.html` writes."""
        return Page(_views().view_of(self).page())

    def _repr_html_(self) -> str:
        return str(_views().notebook_html(self))


def _views() -> Any:
    return import_module("phalanx.report.view")


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose mappings of numbers are columns: {"terms_s": {"tp": 1.0}} becomes {"tp_s": 1.0}."""
    row: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and value and all(isinstance(v, int | float) for v in value.values()):
            row |= {f"{name}_s" if key == "terms_s" else f"{key}.{name}": v for name, v in value.items()}
        elif not isinstance(value, dict | list):
            row[key] = value
    return row


def frame(records: list[dict[str, Any]]) -> Any:
    """Return records as a DataFrame. Raises ImportError without pandas."""
    try:
        pandas = import_module("pandas")
    except ModuleNotFoundError:
        raise ImportError("to_pandas needs pandas: pip install pandas") from None
    return pandas.DataFrame.from_records(records)
