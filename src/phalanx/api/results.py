"""What the functions return: frozen dataclasses that a notebook shows and pandas takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.report.sheets import written
from phalanx.report.style import seconds as written_seconds
from phalanx.report.style import size

if TYPE_CHECKING:
    from phalanx.planning.tables.table import Sheet
    from phalanx.spec.files.plan import Plan


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


@dataclass(frozen=True)
class Table:
    """A table of raw numbers: bytes, seconds, shares of one, bytes/s."""

    title: str
    note: str
    records: tuple[dict[str, Any], ...]
    """A row each, by column: keys as in the command's --json, which end in the unit."""
    _sheet: Sheet = field(repr=False, compare=False)

    def to_pandas(self) -> Any:
        """Return a DataFrame, a row each. Raises ImportError without pandas."""
        return _frame(self.records)

    def _repr_html_(self) -> str:
        s = self._sheet
        rows = [[written(value, c.unit) for value, c in zip(row, s.columns, strict=True)] for row in s.rows]
        return _html(self.title, [c.name for c in s.columns], rows, self.note)


def table(sheet: Sheet) -> Table:
    """Return a sheet as a Table."""
    return Table(sheet.title, sheet.note, tuple(sheet.records()), sheet)


@dataclass(frozen=True)
class Prediction:
    """A strategy's step and memory under a software stack."""

    strategy: str
    stack: str
    seconds: float
    """Of a step: the sum of `terms_s`."""
    tokens_per_s: float
    """Of all GPUs."""
    gpus: int
    mfu: float | None
    """Model FLOP/s as a share of the peak; None where our own runtime is priced exactly."""
    memory_bytes: float
    """Reserved on the fullest rank."""
    usable_bytes: float
    terms_s: Mapping[str, float]
    memory_terms: Mapping[str, float]
    _page: Callable[[], str] = field(repr=False, compare=False)
    options: str = ""
    """Options of the stack that are not as released, such as cross_entropy=fused: a search chooses some."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has the memory."""
        return self.memory_bytes <= self.usable_bytes

    def to_pandas(self) -> Any:
        """Return a DataFrame of a row, with a column for each term. Raises ImportError without pandas."""
        return _frame([self.record()])

    def record(self) -> dict[str, Any]:
        """Return all figures as a flat dict."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return figures | {f"{name}_s": value for name, value in self.terms_s.items()}

    def plot(self) -> Page:
        """Return a page with time and memory drawn."""
        return Page(self._page())

    def _repr_html_(self) -> str:
        rows = [
            [name, written_seconds(value), f"{value / self.seconds:.1%}"]
            for name, value in self.terms_s.items()
            if value
        ]
        rows.append(["the step", written_seconds(self.seconds), "100.0%"])
        fits = "fits" if self.fits else "does not fit"
        held = f"memory {size(self.memory_bytes)} of {size(self.usable_bytes)}: {fits}"
        note = f"{held}; {self.tokens_per_s:,.0f} tokens/s" + (f"; {self.options}" if self.options else "")
        return _html(f"{self.strategy} ({self.stack})", ["", "takes", "of the step"], rows, note)


_FIGURES = (
    "strategy",
    "stack",
    "seconds",
    "tokens_per_s",
    "gpus",
    "mfu",
    "memory_bytes",
    "usable_bytes",
    "fits",
    "options",
)


@dataclass(frozen=True)
class PlanResult:
    """The answer of a search."""

    ranked: tuple[Prediction, ...]
    """Best first."""
    families: Mapping[str, Prediction]
    """The fastest of each family of strategies."""
    front: tuple[Prediction, ...]
    """Fastest first, each with less memory than all before it."""
    rejected: tuple[tuple[str, str], ...]
    """(strategy, why not)."""
    evaluated: int
    """Legal strategies."""
    file: Plan = field(repr=False)
    """What `save` writes: train, verify, explain, lint and export read it."""
    _page: Callable[[], str] = field(repr=False, compare=False)

    @property
    def best(self) -> Prediction:
        """The best strategy."""
        return self.ranked[0]

    @property
    def strategy(self) -> str:
        """The best strategy's line."""
        return self.best.strategy

    def save(self, file: str | Path = "plan.json") -> Path:
        """Write the plan and return its path. Raises OSError."""
        from phalanx.spec.files import plan

        plan.write(self.file, Path(file))
        return Path(file)

    def to_pandas(self) -> Any:
        """Return a DataFrame of the ranked strategies. Raises ImportError without pandas."""
        return _frame([p.record() for p in self.ranked])

    def plot(self) -> Page:
        """Return the report, as `phalanx plan --report` writes it."""
        return Page(self._page())

    def _repr_html_(self) -> str:
        rows = [
            [p.strategy, written_seconds(p.seconds), "" if p.mfu is None else f"{p.mfu:.1%}", size(p.memory_bytes)]
            for p in self.ranked
        ]
        return _html("the best", ["strategy", "step", "MFU", "memory"], rows, f"{self.evaluated:,} legal strategies")


@dataclass(frozen=True)
class Explanation:
    """Where a strategy's time goes, and what each single change would do."""

    prediction: Prediction
    neighbours: tuple[tuple[str, float, float, str], ...]
    """(change, step seconds, bytes, why not or what it saves)."""
    axes: tuple[dict[str, Any], ...]
    """Each mesh axis on the communication roofline."""

    def to_pandas(self) -> Any:
        """Return a DataFrame of the neighbours. Raises ImportError without pandas."""
        names = ("change", "seconds", "memory_bytes", "reason")
        return _frame([dict(zip(names, row, strict=True)) for row in self.neighbours])

    def plot(self) -> Page:
        """Return a page with time and memory drawn."""
        return self.prediction.plot()

    def _repr_html_(self) -> str:
        rows = [[what, written_seconds(s), size(b), why] for what, s, b, why in self.neighbours]
        return self.prediction._repr_html_() + _html("its neighbours", ["change", "step", "memory", ""], rows, "")


@dataclass(frozen=True)
class Comparison:
    """Strategies or plans side by side."""

    sides: tuple[Prediction, ...]
    differing: tuple[tuple[str, tuple[str, ...]], ...]
    """(setting, its value on each side)."""
    _page: Callable[[], str] = field(repr=False, compare=False)

    def to_pandas(self) -> Any:
        """Return a DataFrame, a row for each side. Raises ImportError without pandas."""
        return _frame([p.record() for p in self.sides])

    def plot(self) -> Page:
        """Return the report, as `phalanx compare --report` writes it."""
        return Page(self._page())

    def _repr_html_(self) -> str:
        rows = [[p.strategy, p.stack, written_seconds(p.seconds), size(p.memory_bytes)] for p in self.sides]
        return _html("side by side", ["strategy", "stack", "step", "memory"], rows, "")


@dataclass(frozen=True)
class Verification:
    """The real program of each class of ranks, held against its plan."""

    proved: bool
    classes: tuple[dict[str, Any], ...]
    """As `phalanx verify --json` has them: ranks, events, bytes, memory, differences."""

    def to_pandas(self) -> Any:
        """Return a DataFrame, a row for each class. Raises ImportError without pandas."""
        return _frame(self.classes)

    def _repr_html_(self) -> str:
        verdict = "proved" if self.proved else "NOT proved"
        return f"<p>{verdict}: {len(self.classes)} classes of ranks</p>"


def _frame(records: Sequence[Mapping[str, Any]]) -> Any:
    try:
        pandas = import_module("pandas")
    except ModuleNotFoundError:
        raise ImportError("to_pandas needs pandas: pip install pandas") from None
    return pandas.DataFrame.from_records(list(records))


def _html(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    caption = f"<caption>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(note)}</p>"
