"""What a step's time means for a whole training: tokens, days, GPU-hours, money."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec

OPTIMAL = 20
"""Tokens per parameter at which a given number of FLOPs trains best (Hoffmann et al. 2022, table 3)."""
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Goal:
    """`price_per_gpu_hour` in whatever currency it is given."""

    tokens: float
    gpus: int
    price_per_gpu_hour: float | None = None

    def steps(self, job: Job) -> float:
        return self.tokens / (job.global_batch * job.seq)

    def days(self, job: Job, step_s: float) -> float:
        return self.steps(job) * step_s / 86_400

    def gpu_hours(self, job: Job, step_s: float) -> float:
        return self.steps(job) * step_s / 3600 * self.gpus

    def money(self, job: Job, step_s: float) -> float | None:
        return None if self.price_per_gpu_hour is None else self.gpu_hours(job, step_s) * self.price_per_gpu_hour


def tokens(text: str, model: ModelSpec) -> float:
    """`300B`, `1.4T`, or `optimal`: 20 for each parameter that a token meets. Raises InputError."""
    if text.strip().lower() == "optimal":
        return float(OPTIMAL * model.active_count)
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise InputError("--tokens", text, "is not a number of tokens", "write 300B, 1.4T, or optimal")
    return float(found[1]) * _SCALE[found[2].upper()]
