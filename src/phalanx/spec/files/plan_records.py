"""Types of plan.json's contents in addition to its specs: choices made with the strategy, and predictions. Programs
keep both as tables; a file's tables are checked against these records when it is read, so that readers find numbers
where they expect them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import ClusterChoice, build
from phalanx.spec.ranges import Name, Natural, Range, Seconds, Share, require_ranges

_Amount = Annotated[int, Range(0, 10**40)]  # bytes or FLOPs of a whole step
_Part = Annotated[float, Range(-1e24, 1e24)]  # of a sum of seconds or bytes


@dataclass(frozen=True)
class _Bucket:
    bytes: _Amount
    reason: Name = ""


@dataclass(frozen=True)
class _Chunks:
    imbalance: Annotated[float, Range(0, 1e9)] = 0.0
    reason: Name = ""
    blocks: tuple[Natural, ...] | None = None


@dataclass(frozen=True)
class _Chosen:
    cluster: ClusterChoice
    tokens: Name
    transport: Literal["auto", "native", "p2p", "shm"]
    peak_flops_per_s: Annotated[float, Range(0, 1e24, above=True)]
    rates_origin: Name = ""
    stack: Name | None = None
    precision: Name | None = None
    collectives: tuple[Choice, ...] = ()
    launchers: tuple[Name, ...] = ()


@dataclass(frozen=True)
class _Predicted:
    step_time_s: Annotated[float, Range(0, 1e9, above=True)]
    memory_bytes: _Amount
    stack: Name | None = None
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    optimizer_s: Seconds = 0.0
    communication_s: Seconds = 0.0
    exposed_communication_s: Seconds = 0.0
    bubble_fraction: Share = 0.0
    mfu: Annotated[float, Range(0, 100)] = 0.0
    flops: _Amount = 0
    model_flops: _Amount = 0
    state_bytes: _Amount = 0
    activation_bytes: _Amount = 0
    bytes_per_axis: dict[str, _Amount] | None = None
    terms_s: dict[str, _Part] | None = None
    memory_terms: dict[str, _Part] | None = None


def require_typed(choices: Any, prediction: Any) -> None:
    """Require that the known keys of a plan.json's tables have the right types; other keys are ignored. Raises
    InputError with the field."""
    _require(_Chosen, choices, "choices")
    _require(_Predicted, prediction, "prediction")
    if choices.get("bucket") is not None:
        _require(_Bucket, choices["bucket"], "choices.bucket")
    if choices.get("chunks") is not None:
        _require(_Chunks, choices["chunks"], "choices.chunks")


def _require(kind: type[Any], table: Any, where: str) -> None:
    if not isinstance(table, dict):
        raise InputError(where, table, "must be a table of key = value")
    names = {f.name for f in fields(kind)}
    require_ranges(build(kind, {key: value for key, value in table.items() if key in names}, where), where)
