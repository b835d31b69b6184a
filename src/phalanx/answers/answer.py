"""What every answer has: a plain form, a table for pandas, and how a notebook shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import singledispatch
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

if TYPE_CHECKING:
    from phalanx.frameworks.caveats import Caveat

DRAWN = {"plain": False}
"""Metadata of a field that is not part of the plain answer."""


@singledispatch
def plain(value: Any) -> Any:
    """Return a value as numbers, words, lists and dicts. Raises TypeError for a type without a plain form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value):
        if whole := getattr(value, "plain_field", ""):
            return plain(getattr(value, whole))
        shown = (f.name for f in fields(value) if f.metadata.get("plain", True))
        return {name: plain(getattr(value, name)) for name in shown}
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no plain form")


@plain.register
def _(value: Strategy) -> str:
    return str(value)


@plain.register
def _(value: StackOptions) -> dict[str, Any]:
    return value.changed()


@plain.register
def _(value: ModelSpec) -> dict[str, Any]:
    return {"family": value.family, "parameters": value.parameter_count}


@plain.register
def _(value: ClusterSpec) -> str:
    return value.name


@plain.register
def _(value: Path) -> str:
    return str(value)


@plain.register
def _(value: Enum) -> Any:
    return value.value


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

    plain_field: ClassVar[str] = ""
    """The field that is the whole plain answer; "" where all fields are."""
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
        """Return the rows of a data frame; numbers in mappings become columns (see `flat`)."""
        return [flat(plain(row)) for row in (getattr(self, self.rows_of) if self.rows_of else (self,))]

    def to_pandas(self) -> Any:
        """Return a DataFrame of the records. Raises ImportError without pandas."""
        return frame(self.records())

    def plot(self) -> Page:
        """Return the report as a page, which `--save FILE.html` writes."""
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
