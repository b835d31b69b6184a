"""Fit the constants of memory on published peaks: each stack on its own rows, with a prior from its code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from calibration.fit import Data, chain_of
from phalanx.cost.analytic.memory import memory
from phalanx.cost.analytic.profile import profile
from phalanx.cost.analytic.step import step
from phalanx.cost.hardware.columns import gather, take
from phalanx.cost.ledger.model_shape import gather_shapes
from phalanx.validate.from_row import Case, cases
from phalanx.validate.prediction_error import memory_kind
from phalanx.validate.records import GIB, RUNS, SMALL_RUNS, load

FITTED: dict[str, tuple[str, ...]] = {
    "nanotron": (
        "kept_hidden",
        "kept_qkv",
        "kept_ffn",
        "kept_logit",
        "idle_bytes",
        "fragments",
        "constant_bytes",
    ),
    "megatron-core": ("kept_logit", "constant_bytes"),
    "megatron-core-unfused": ("kept_score",),
    "megatron-deepspeed-2022": (
        "kept_bytes",
        "whole_bytes",
        "kept_hidden",
        "context_bytes",
        "kept_logit",
        "fragments",
    ),
    "megatron-deepspeed-2022-bf16": ("kept_bytes",),
    "torchtitan-compiled": ("kept_hidden",),
    "torchtitan-eager": ("kept_hidden",),
}
_START = {
    "megatron-deepspeed-2022.kept_bytes": 4.0,
    "megatron-deepspeed-2022-bf16.kept_bytes": 8.0,
    "nanotron.idle_bytes": 2.0,
}
_KINDS = ("last", "peak", "reserved", "first", "shown")
_PRIOR = 0.01
"""Cost of a constant that is e times its starting value."""


def fitted(times: Mapping[str, float], sweeps: int = 25) -> dict[str, float]:
    """Fit the constants of memory of all stacks in FITTED.

    `times` are the constants of step times: they tell how far the CPU launches ahead of the GPU, which keeps memory.
    """
    rows = [
        c for c in cases(load(RUNS) + load(SMALL_RUNS))[0] if c.row.number("peak_mem_gb") and c.row["status"] == "ok"
    ]
    constants: dict[str, float] = {}
    for owner, fields in FITTED.items():
        own = [c for c in rows if owner in chain_of(c.profile)]
        constants |= _fit_stack(owner, fields, own, {**times, **_START, **constants}, sweeps)
    return constants


def _fit_stack(
    owner: str, fields: tuple[str, ...], own: list[Case], known: Mapping[str, float], sweeps: int
) -> dict[str, float]:
    """Fit some fields of one stack on its own rows, with all other constants known."""
    names = sorted({c.profile for c in own})
    which = np.array([names.index(c.profile) for c in own])
    shapes, layouts = gather_shapes([c.shape for c in own]), gather([c.layout for c in own])
    measured = np.array([(c.row.number("peak_mem_gb") or 0) * GIB for c in own])
    steady = np.array([(c.row.number("mem_allocated_gb") or np.nan) * GIB for c in own])
    published = np.isfinite(steady)
    kinds = np.array([memory_kind(c.row) for c in own])
    families = [c.row.family for c in own]
    weight = np.array([1 / families.count(f) for f in families])
    data = Data(own, measured, weight)
    systems = data.systems(known)
    ahead = step(shapes, layouts, systems, data.stacks(known)).ahead
    start = {f: float(getattr(profile(owner, known), f)) for f in fields}

    def cost(x: Mapping[str, float]) -> float:
        constants = {**known, **{f"{owner}.{f}": v for f, v in x.items()}}
        stacks = take([profile(n, constants) for n in names], which)
        held = memory(shapes, layouts, stacks, ahead, systems.memory_bytes - stacks.context_bytes)
        predicted = np.choose([_KINDS.index(k) for k in kinds], [np.asarray(getattr(held, k)) for k in _KINDS])
        error = float((weight * np.abs(np.log(predicted / measured))).sum())
        error += float((weight * np.abs(np.log(np.asarray(held.steady) / steady)))[published].sum())
        return float(error + _PRIOR * sum(np.log(x[f] / start[f]) ** 2 for f in fields))

    x, steps = dict(start), dict.fromkeys(fields, 0.3)
    best = cost(x)
    for _ in range(sweeps):
        for f in fields:
            for sign in (1, -1):
                tried = {**x, f: x[f] * float(np.exp(sign * steps[f]))}
                value = cost(tried)
                if value < best - 1e-7:
                    best, x = value, tried
                    steps[f] *= 1.5
                    break
            else:
                steps[f] *= 0.5
    return {f"{owner}.{f}": v for f, v in x.items()}
