"""A trace of jobs, read from CSV.

Columns, by name: `submit` or `timestamp` (seconds, or a date and time as 2017-10-09 07:01:55), `gpus` or
`num_gpus`, and `duration` (s), or `end` (as `submit`: the end of the job's run, which then began when it was
submitted). Optional: `limit` (s, by which schedulers plan), `widths` (`2:0.3;4:0.55`: narrower widths at which an
elastic job can run as well, and its speed there), `priority` (a whole number, the higher the sooner; 0), `plan` (a
plan.json, whose speed follows from the placement) with `steps`, and in place of `widths` for a plan `min_gpus`: the
planner finds the speeds of narrower widths. Others are ignored.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from phalanx.spec.documents import csv_of, read_packed
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class TraceJob:
    """A job of a trace: a gang of GPUs, which starts with all of them or not at all."""

    row: int
    """Line number in the trace."""
    submit: float
    """Seconds since the first submission."""
    duration: float
    """Seconds on `gpus` well-placed GPUs."""
    gpus: int
    limit: float = 0.0
    """Seconds after which the scheduler kills it, and by which it plans; at least the duration. 0: the duration."""
    widths: tuple[tuple[int, float], ...] = ()
    """(GPUs, speed relative to that on `gpus`) of narrower widths of an elastic job, ascending."""
    plan: str = ""
    """The plan.json by which its speed under a placement is priced; empty: placement does not change its speed."""
    priority: int = 0
    """Jobs of higher priority go first, whatever the policy."""
    tokens: float = field(default=0.0)
    """Tokens that it trains on; 0: unknown."""

    @property
    def planned(self) -> float:
        """Seconds that a scheduler reserves: at least one, because a reservation cannot be empty."""
        return max(self.limit or self.duration, 1.0)


_ALIASES = {"submit": ("submit", "timestamp"), "gpus": ("gpus", "num_gpus"), "duration": ("duration",)}


@dataclass(frozen=True)
class PlanFacts:
    """The size and speed of a plan.json's job."""

    gpus: int
    step_s: float
    """Seconds of a step on well-placed GPUs."""
    tokens: float
    """Tokens of a step."""
    widths: tuple[tuple[int, float], ...] = ()
    """(GPUs, relative speed) of narrower widths."""


PlanReader = Callable[[str, int], PlanFacts]
"""Reader of a plan.json: (path, fewest GPUs of an elastic job, or 0) -> its facts."""


@dataclass(frozen=True)
class Trace:
    """Jobs in order of submission, and the skipped rows: (line, reason)."""

    jobs: tuple[TraceJob, ...]
    skipped: tuple[tuple[int, str], ...]


def read(path: Path, widest: int, plan_of: PlanReader, skip_bad: bool = False) -> Trace:
    """Read a trace, plain or compressed by xz, for a cluster whose widest gang has `widest` GPUs.

    `plan_of` reads the plans that it names. Raises InputError for the first bad row, unless `skip_bad`; and for a
    file without a usable row.
    """
    with csv_of(path, "trace"):
        return _read(
            csv.DictReader(read_packed(path, "trace", _LARGEST).splitlines()), path, widest, plan_of, skip_bad
        )


def _read(rows: csv.DictReader[str], path: Path, widest: int, plan_of: PlanReader, skip_bad: bool) -> Trace:
    names = rows.fieldnames or []
    missing = [name for name in ("submit", "gpus") if not any(a in names for a in _ALIASES[name])]
    by_plan = "plan" in names
    if (missing and not (by_plan and missing == ["gpus"])) or not {"duration", "end", "plan"} & set(names):
        need = "submit, gpus and duration (or timestamp, num_gpus; end; plan and steps)"
        raise InputError("trace", str(path), f"has columns {', '.join(names) or 'none'}", f"it needs {need}")
    parsed: list[TraceJob] = []
    skipped: list[tuple[int, str]] = []
    for row in rows:
        try:
            parsed.append(_job(row, rows.line_num, widest, plan_of))
        except InputError as error:
            if not skip_bad:
                remedy = f"{error.remedy}, or --skip-bad" if error.remedy else "fix the row, or --skip-bad"
                raise InputError(
                    f"trace row {rows.line_num}: {error.field}", error.value, error.reason, remedy
                ) from None
            skipped.append((rows.line_num, str(error)))
    if not parsed:
        raise InputError("trace", str(path), "has no job" + (" that can be used" if skipped else ""))
    first = min(job.submit for job in parsed)
    jobs = sorted((replace(j, submit=j.submit - first) for j in parsed), key=lambda job: (job.submit, job.row))
    return Trace(tuple(jobs), tuple(skipped))


_LARGEST = 2**28
"""Bytes of the largest trace."""


def _job(row: Mapping[str, str | None], line: int, widest: int, plan_of: PlanReader) -> TraceJob:
    if None in row:
        raise InputError("fields", len(row) - 1 + len(row[None] or ()), f"but the header names {len(row) - 1}")  # type: ignore[index]
    submit = _time(row, "submit")
    plan = (row.get("plan") or "").strip()
    tokens, widths, fewest = 0.0, _widths(row), _whole(row, "min_gpus")
    if fewest and widths:
        raise InputError("min_gpus", fewest, "and widths both say how narrow the job can run", "leave one out")
    if plan:
        facts = plan_of(plan, fewest)
        for name in ("duration", "end"):
            if _field(row, name):
                reason = f"is given in addition to the plan {plan}, whose steps say how long it takes"
                raise InputError(name, _field(row, name), reason, "leave it out")
        if _field(row, "gpus") and _whole(row, "gpus") != facts.gpus:
            raise InputError("gpus", _field(row, "gpus"), f"but {plan} has {facts.gpus} ranks", "leave it out")
        if fewest > facts.gpus:
            raise InputError("min_gpus", fewest, f"but {plan} has {facts.gpus} ranks", "name fewer, or leave it out")
        steps = _number(row, "steps")
        if steps < 0:
            raise InputError("steps", steps, "is not a number of steps")
        gpus, duration, tokens = facts.gpus, steps * facts.step_s, steps * facts.tokens
        widths = widths or facts.widths
    elif fewest:
        raise InputError("min_gpus", fewest, "needs a plan, whose speeds the planner knows", "write widths instead")
    else:
        if _field(row, "steps"):
            raise InputError("steps", _field(row, "steps"), "are of a plan, and the row names none", "name its plan")
        gpus = _whole(row, "gpus", None)
        ended = bool(_field(row, "end")) and not _field(row, "duration")
        duration = _time(row, "end") - submit if ended else _number(row, "duration")
    if gpus < 1:
        raise InputError("gpus", gpus, "must be at least 1")
    if gpus > widest:
        raise InputError("gpus", gpus, f"is wider than the cluster, whose widest gang has {widest} GPUs")
    if not 0 <= duration <= _LATEST:
        reason = "ends before it starts" if duration < 0 else f"is more than {_LATEST:.0e} s"
        raise InputError("duration", duration, reason)
    limit = _number(row, "limit", 0.0)
    if limit and limit < duration:
        raise InputError("limit", limit, f"is shorter than the duration, {duration:g} s")
    priority = _number(row, "priority", 0.0)
    if priority != int(priority) or abs(priority) > _MOST_URGENT:
        raise InputError("priority", priority, f"is not a whole number of at most {_MOST_URGENT:,}")
    if widths and widths[-1][0] >= gpus:
        reason = f"names {widths[-1][0]} GPUs, but the job asks for {gpus}"
        raise InputError("widths", _field(row, "widths"), reason, "list narrower widths only")
    return TraceJob(line, submit, duration, gpus, limit, widths, plan, int(priority), tokens)


_LATEST = 1e11
"""The latest submission and the longest job, s: doubles of this size are still tens of microseconds apart."""
_MOST_URGENT = 10**6
"""The largest absolute priority."""


def _field(row: Mapping[str, str | None], name: str) -> str:
    for alias in _ALIASES.get(name, (name,)):
        value = row.get(alias)
        if value is not None and value.strip():
            return value.strip()
    return ""


def _number(row: Mapping[str, str | None], name: str, default: float | None = None) -> float:
    text = _field(row, name)
    if not text:
        if default is None:
            raise InputError(name, None, "is missing")
        return default
    try:
        value = float(text)
    except ValueError:
        raise InputError(name, text, "is not a number") from None
    if value != value or abs(value) == float("inf"):
        raise InputError(name, text, "is not a number")
    return value


def _whole(row: Mapping[str, str | None], name: str, default: float | None = 0.0) -> int:
    """Return a number of GPUs. Raises InputError for a fraction or a negative number."""
    value = _number(row, name, default)
    if value != int(value) or value < 0:
        raise InputError(name, value, "is not a number of GPUs")
    return int(value)


def _time(row: Mapping[str, str | None], name: str) -> float:
    text = _field(row, name)
    try:
        time = datetime.fromisoformat(text).timestamp() if not _is_number(text) else _number(row, name)
        if abs(time) > _LATEST:
            raise InputError(name, text, f"is more than {_LATEST:.0e} s")
        return time
    except (ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(name, text or None, "is not a time", "write seconds, or 2017-10-09 07:01:55") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _widths(row: Mapping[str, str | None]) -> tuple[tuple[int, float], ...]:
    text = _field(row, "widths")
    pairs: list[tuple[int, float]] = []
    for part in text.split(";") if text else ():
        width, colon, speed = part.partition(":")
        if (
            not colon
            or not re.fullmatch("[0-9]{1,9}", width.strip())
            or not _is_number(speed)
            or not 0 < float(speed) <= 1
        ):
            raise InputError("widths", text, "does not list GPUs and speeds above 0, at most 1", "write 2:0.3;4:0.55")
        pairs.append((int(width), float(speed)))
    pairs.sort()
    if pairs and (pairs[0][0] < 1 or len(dict(pairs)) < len(pairs)):
        raise InputError("widths", text, "lists a width of 0 GPUs, or one twice", "write 2:0.3;4:0.55")
    return tuple(pairs)
