"""Measured quantities of a run with their predictions, and how evenly tokens were spread over its experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.answers.answer import DRAWN, Answer, plain
from phalanx.runs.folder import metrics
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class MeasuredQuantity:
    """One quantity, predicted and measured."""

    name: str
    predicted: float
    measured: float | None
    """None if it was not measured."""
    text: str
    """Unit of the values: "s", "memory" or "bytes"."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if nothing was measured."""
        if self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


@plain.register
def _(value: MeasuredQuantity) -> dict[str, Any]:
    numbers = {"predicted": value.predicted, "measured": value.measured, "error": value.error}
    return {"name": value.name, **numbers}


STRETCHES = 8
"""The most stretches of steps into which a run is divided."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a run with their routing."""

    first_step: int
    last_step: int
    dropped: float
    """Share of tokens dropped, averaged over the steps."""
    busiest: Mapping[str, float]
    """Load of the busiest expert over the mean load, by layer."""
    chosen: Mapping[str, Sequence[int]]
    """Tokens that chose each expert, by layer."""


@dataclass(frozen=True)
class ExpertBalance(Answer):
    """How evenly tokens were spread over experts in the course of a run."""

    stretches: tuple[Stretch, ...]
    run: str = field(default="", metadata=DRAWN)


def expert_balance(run: Path) -> ExpertBalance:
    """Return the balance of a run's experts. Raises InputError."""
    parts = stretches(metrics(run))
    if not parts:
        reason = "its metrics hold nothing about experts"
        raise InputError("run", str(run), reason, "name a run of a model that has experts")
    return ExpertBalance(tuple(parts), str(run))


def stretches(rows: Sequence[Mapping[str, Any]]) -> list[Stretch]:
    """Divide a run's rows of metrics.jsonl that report experts into at most `STRETCHES` stretches.

    Raises InputError for rows that do not count."""
    reporting = [row for row in rows if "expert_tokens" in row]
    if not reporting:
        return []
    for row in reporting:
        _require_counts(row, reporting[0]["expert_tokens"])
    size = -(-len(reporting) // STRETCHES)
    result = []
    for start in range(0, len(reporting), size):
        part = reporting[start : start + size]
        chosen = {
            block: [sum(counts) for counts in zip(*(row["expert_tokens"][block] for row in part), strict=True)]
            for block in part[0]["expert_tokens"]
        }
        dropped = sum(row["expert_dropped"] for row in part) / len(part)
        loads = {block: busiest(counts) for block, counts in chosen.items()}
        result.append(Stretch(part[0]["step"], part[-1]["step"], dropped, loads, chosen))
    return result


def _require_counts(row: Mapping[str, Any], first: Any) -> None:
    """Require that a row counts the tokens of as many experts as the first one. Raises InputError."""
    tokens, dropped = row["expert_tokens"], row.get("expert_dropped")
    alike = (
        isinstance(tokens, dict)
        and isinstance(first, dict)
        and tokens.keys() == first.keys() != set()
        and all(_are_counts(counts) and len(counts) == len(first[block]) for block, counts in tokens.items())
    )
    if not alike or not isinstance(dropped, int | float) or not 0 <= dropped <= 1:
        raise InputError("run", f"step {row['step']}", "metrics.jsonl does not count the tokens of its experts")


def _are_counts(counts: Any) -> bool:
    return isinstance(counts, list) and counts != [] and all(type(n) is int and 0 <= n < 2**53 for n in counts)


def busiest(chosen: Sequence[int]) -> float:
    """Return the load of the busiest expert over the mean load."""
    return max(chosen) * len(chosen) / max(1, sum(chosen))
