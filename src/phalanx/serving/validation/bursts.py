"""Published benchmarks of a finite number of requests, and the answer of `serve plan --from` to their command lines.

Rows have the published command lines of a server and of a benchmark, and the benchmark's output. Where the lines do
not have the lengths of requests (ShareGPT), they follow from its totals; the standard deviation of ShareGPT's lengths
is assumed to equal their mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.serving.answer import as_request
from phalanx.serving.likely import Slowed, kind_of, slowed, slowness
from phalanx.serving.lines.programs import lines
from phalanx.serving.lines.reading import read_lines
from phalanx.serving.question import ask
from phalanx.serving.search.search import Search, best_of_each
from phalanx.spec.errors import InputError
from phalanx.validate.records import Row, load, readable

BURSTS = Path(__file__).parent / "data" / "bursts.csv.xz"
_NEEDED = ("source", "family", "framework", "gpu", "server", "benchmark", "requests")
_CLUSTERS = {gpu: f"dgx-{gpu.lower()}" for gpu in ("A100", "H100", "H200", "B200")} | {
    "RTX-PRO-6000": "rtx-pro-6000",
    "GB10": "dgx-spark",
}
_ACCEPT_S = {("vllm", "0.11.0"): 8.6e-3}
"""Seconds for a request to the chat endpoint in releases that parse the model's template each time:
vllm-project/vllm, pull request 25794 (`it's called by each request`); 20065 has 6 to 8 ms for releases before 0.9.2.
Fitted: the median of ten servers, whose bursts of 1,000 prompts of 128 tokens, or 500 of 2,000, begin later than
their steps take."""
FIGURES = ("makespan_s", "ttft_s", "tpot_s")
_NO_TEMPLATE = "gpt-oss"
"""A model whose prompts do not use a template."""


@dataclass(frozen=True)
class Burst:
    """A published benchmark and its prediction."""

    row: Row
    kind: str
    """Engine and kind of load."""
    measured: Mapping[str, float]
    """Figure -> seconds: makespan_s, and the medians ttft_s and tpot_s."""
    slowed: Slowed = field(repr=False, compare=False)
    """The predicted figures by slowness."""

    @property
    def predicted(self) -> Mapping[str, float]:
        """Figure -> predicted seconds."""
        return self.slowed(1)

    def ratio(self, figure: str) -> float | None:
        """Return measured over predicted; None: the figure is not published."""
        return self.measured[figure] / self.predicted[figure] if figure in self.measured else None

    def slowness(self, figure: str) -> float:
        """Return the factor on all times of the engine that a measured figure says."""
        return slowness(self.slowed, figure, self.measured[figure])


def rows() -> list[Row]:
    """Read the published benchmarks."""
    return load(BURSTS, _NEEDED)


def bursts(of: Sequence[Row]) -> tuple[list[Burst], list[tuple[Row, str]]]:
    """Return benchmarks with their predictions, and (row, reason) of the others."""
    return readable(of, _burst, InputError)


@cache
def published() -> tuple[list[Burst], list[tuple[Row, str]]]:
    """Return `bursts` of the published benchmarks, cached."""
    return bursts(rows())


def scores(of: Sequence[Burst], refused: Sequence[tuple[Row, str]]) -> dict[str, Any]:
    """Return the scores for `phalanx serve validate --json`: by kind and figure, quantiles of measured over
    predicted."""
    out: dict[str, Any] = {}
    for kind in sorted({b.kind for b in of}):
        mine = [b for b in of if b.kind == kind]
        out[kind] = {}
        for figure in FIGURES:
            ratios = [r for b in mine if (r := b.ratio(figure)) is not None]
            if ratios:
                low, median, high = map(float, np.quantile(ratios, (0.1, 0.5, 0.9)))
                out[kind][figure] = {"n": len(ratios), "p10": low, "p50": median, "p90": high}
    return {"by_kind": out, "predicted": len(of), "skipped": {row.name: why for row, why in refused}}


def _burst(row: Row) -> Burst:
    kind, slow = _answer(row)
    measured = {"makespan_s": row.number("duration_s") or 0.0}
    measured |= {f"{name}_s": (row.number(f"{name}_p50_ms") or 0.0) / 1e3 for name in ("ttft", "tpot")}
    return Burst(row, kind, {k: v for k, v in measured.items() if v}, slow)


def _answer(row: Row) -> tuple[str, Slowed]:
    """Return the kind of load of a row's lines, and the figures of the best candidate of `serve plan --from` for
    them. Raises InputError."""
    requests = row.number("requests") or 1.0
    given: dict[str, Any] = {"cluster": _CLUSTERS.get(row["gpu"], row["gpu"])}
    if row["variation"]:
        given["variation"] = row.number("variation")
        given |= {k: round((row.number(f"{k}_tokens") or 0.0) / requests) for k in ("input", "output")}
    if row["layout"]:
        given["layout"] = row["layout"]
    started = lines(f"{row['server']}\n{row['benchmark']}\n", row.name)
    query = ask(as_request(read_lines(started, given).fields))
    q = query.question
    chat = "openai-chat" in row["benchmark"] and _NO_TEMPLATE not in row["server"]
    if chat and (seconds := _ACCEPT_S.get((row["framework"], row["framework_version"]))):
        q = replace(q, accept_s=seconds)
    search = Search(q, query.layout)
    candidates = search.candidates()
    if not candidates:
        raise InputError("layout", row["server"], next((c.missing for c in search.known.values()), "serves nothing"))
    best = search.simulate(best_of_each(candidates, search)[0])
    kind = kind_of(q, best)
    assert kind is not None, row.name
    return kind, slowed(q, best, search.copy_of)
