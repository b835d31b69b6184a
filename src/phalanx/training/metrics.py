"""metrics.jsonl: a line per step, written by rank 0; the file goes on where a run is resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from phalanx.runtime.comm.timeline import StepTimes
from phalanx.spec.files.plan import Plan
from phalanx.training.expert_load import summary
from phalanx.training.training_step import StepResult


def line(
    plan: Plan, step: int, result: StepResult, lr: float, seconds: float, times: StepTimes | None, memory_bytes: int
) -> dict[str, Any]:
    """Return the line of step number `step` (from 0), which took `seconds`. `times`: of its communication; None if
    not measured."""
    peak, flops = plan.choices["peak_flops_per_s"], plan.prediction["flops"]
    axes = None if times is None else times.axes
    return {
        "step": step + 1,
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "lr": lr,
        "tokens": result.tokens,
        "step_time_s": seconds,
        "tokens_per_s": result.tokens / seconds,
        "mfu": plan.prediction.get("model_flops", flops) / seconds / peak,
        "hfu": flops / seconds / peak,
        "mem_bytes": memory_bytes,
        "exposed_communication_s": None if axes is None else {a: t.exposed_s for a, t in axes.items()},
        "overlap": None if axes is None else {a: t.overlap for a, t in axes.items()},
        "skipped": result.skips,
        "loss_scale": result.loss_scale,
        **({"skipped_because": result.skipped} if result.skipped else {}),
        **(summary(result.loads) if result.loads else {}),
    }


def _finite(x: float) -> float | None:
    """Return x, or None for NaN and infinities, which JSON does not have."""
    return x if math.isfinite(x) else None


@contextmanager
def lines_after(folder: Path, start: int, first: bool) -> Iterator[TextIO | None]:
    """Yield metrics.jsonl, open after the line of step `start`; later lines, of steps that run again, are dropped.
    Yields None on ranks other than the first."""
    if not first:
        yield None
        return
    path = folder / "metrics.jsonl"
    lines = []
    if start and path.exists():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start:
                    lines.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                continue  # the half-written last line of a killed run
    part = path.with_name(".metrics.jsonl")
    part.unlink(missing_ok=True)  # it may be a link
    part.write_text("".join(lines))
    os.replace(part, path)
    with path.open("a") as file:
        yield file
