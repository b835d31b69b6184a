"""Errors of predicted serving times: by engine and mode, model and GPU; with left-out runs; and of another predictor.

The other predictor's figures are of other rows (other models and GPUs) from the same source as the measured runs. It
prices kernels by tables, and its type for each family was chosen on the measured values.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.serving.validation.predictions import LEFT_OUT, ServingCase, cases, predict, scorable
from phalanx.validate.records import Row
from phalanx.validate.scores import errors

OTHER_PREDICTOR: dict[str, dict[str, tuple[int, float, float]]] = {
    "vllm aggregated": {"tpot": (38, 23, 21), "ttft": (38, 37, 31)},
    "trtllm aggregated": {"tpot": (30, 41, 14), "ttft": (21, 78, 53)},
    "sglang aggregated": {"tpot": (37, 29, 23), "ttft": (37, 53, 52)},
    "trtllm disaggregated": {"tpot": (12, 10, 8), "ttft": (12, 82, 87)},
    "sglang disaggregated": {"tpot": (18, 56, 34), "ttft": (18, 83, 90)},
    "vllm disaggregated": {"tpot": (8, 52, 35), "ttft": (8, 84, 82)},
}
"""Errors of aiconfigurator-core 0.12.0, on rows that do not ship with Phalanx: (rows, mean, median of the absolute
error in percent)."""
_SAME = 0.01
"""Logarithm of the ratio of two values below which they are one measurement in two sources."""


@dataclass(frozen=True)
class ScoredPair:
    """A run with its (predicted, measured) times, in seconds; None: not scored."""

    case: ServingCase
    tpot: tuple[float, float] | None
    ttft: tuple[float, float] | None

    @property
    def kind(self) -> str:
        """Engine and mode."""
        return f"{self.case.engine} {self.case.row['mode']}"


def compare(rows: Sequence[Row]) -> tuple[list[ScoredPair], list[ScoredPair], list[tuple[Row, str]]]:
    """Return the runs with their predictions; the runs of the fit, with predictions by constants fitted without their
    (model, GPU, engine); and (row, reason) of rows without a prediction."""
    usable, skipped = cases(rows)
    pairs = _pairs(usable, *predict(usable)) if usable else []
    without = json.loads(LEFT_OUT.read_text())
    blind: list[ScoredPair] = []
    for name, constants in without.items():
        some = [c for c in usable if " | ".join(c.group) == name]
        if some:
            blind += _pairs(some, *predict(some, constants))
    return pairs, blind, skipped


def _pairs(use: Sequence[ServingCase], tpot: Any, ttft: Any) -> list[ScoredPair]:
    out = []
    for c, p, f in zip(use, tpot, ttft, strict=True):
        token, first = scorable(c.row)
        out.append(
            ScoredPair(
                c,
                (float(p), (c.row.number("tpot_ms") or 0.0) / 1e3) if token else None,
                (float(f), (c.row.number("ttft_ms") or 0.0) / 1e3) if first else None,
            )
        )
    return out


def floor(pairs: Sequence[ScoredPair], quantity: str = "tpot") -> float | None:
    """Return the least median absolute error, in percent, of any prediction by configuration: for configurations that
    were measured several times, the error of the median of their runs. None: there are none."""
    same: dict[tuple[object, ...], list[float]] = {}
    for p in pairs:
        if (value := getattr(p, quantity)) is not None:
            c = p.case
            key = (c.engine, c.shape, c.chip, c.load, c.prefill, c.decode, c.workers)
            same.setdefault(key, []).append(value[1])
    off = []
    for values in same.values():
        apart = {round(np.log(v) / _SAME): v for v in values}.values()
        off += [abs(float(np.median(list(apart))) / v - 1) for v in apart if len(apart) > 1]
    return 100 * float(np.median(off)) if off else None


def scores(
    pairs: Sequence[ScoredPair], blind: Sequence[ScoredPair], skipped: Sequence[tuple[Row, str]]
) -> dict[str, Any]:
    """Return the scores of a comparison, for `phalanx serve validate --json`."""
    groups: dict[str, Callable[[ScoredPair], str]] = {
        "by_engine": lambda p: p.kind,
        "by_model": lambda p: f"{p.kind} {p.case.row['model']}",
        "by_gpu": lambda p: f"{p.kind} {p.case.row['gpu']}",
    }
    out: dict[str, Any] = {}
    for name, key_of in groups.items():
        out[name] = {}
        for key in sorted({key_of(p) for p in pairs}):
            mine = [p for p in pairs if key_of(p) == key]
            left = [p for p in blind if key_of(p) == key]
            out[name][key] = {q: _errors(mine, q) for q in ("tpot", "ttft")}
            out[name][key]["left_out"] = {q: _errors(left, q) for q in ("tpot", "ttft")}
            if name == "by_engine":
                out[name][key]["floor"] = floor(mine)
                out[name][key]["ttft_floor"] = floor(mine, "ttft")
                if key in OTHER_PREDICTOR:
                    out[name][key]["other_predictor_on_other_rows"] = {
                        q: {"n": n, "mape": mean, "median": median}
                        for q, (n, mean, median) in OTHER_PREDICTOR[key].items()
                    }
    out["predicted"] = len(pairs)
    out["skipped"] = {
        "n": len(skipped),
        "reasons": dict(Counter(why for _, why in skipped).most_common()),
        "rows": {row.name: why for row, why in skipped},
    }
    return out


def _errors(pairs: Sequence[ScoredPair], quantity: str) -> dict[str, Any]:
    both = [v for p in pairs if (v := getattr(p, quantity)) is not None]
    return errors([p for p, _ in both], [m for _, m in both])
