"""The answer of `phalanx plan --model` as its --json prints it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.planning.budget import Goal
    from phalanx.planning.search.condition_cost import ConditionCost
    from phalanx.planning.search.fewer_gpus import Offer
    from phalanx.planning.search.planner import Answer
    from phalanx.planning.search.refine import RankedStrategy


def answer_json(a: Answer, goal: Goal | None, offered: list[Offer]) -> dict[str, Any]:
    """Return a search's answer; with a goal, what the whole training takes."""
    p = a.pricing
    return {
        "model": {"family": p.model.family, "parameters": p.model.parameter_count},
        "cluster": p.cluster.name,
        "device": p.cluster.device.name,
        "gpus": a.gpus,
        "global_batch": p.job.global_batch,
        "seq": p.job.seq,
        "stack": p.stack,
        "options": p.extra.changed(),
        "strategies_evaluated": a.evaluated,
        "strategies_priced_one_by_one": a.examined,
        "seconds": a.seconds,
        "best": _one(a.to_run, a, goal),
        "alternatives": [_one(r, a, goal) for r in a.ranked[1:]],
        "chunks": {
            "blocks": list(a.lengths.blocks),
            "equal_step_time_s": a.lengths.equal_seconds,
        }
        if a.lengths
        else None,
        "number_types": [
            {
                "where": o.where,
                "options": o.types,
                "strategy": str(o.strategy),
                "step_time_s": o.seconds,
                "gain": o.gain,
                "memory_bytes": int(o.bytes_),
            }
            for o in a.types
        ],
        "fewer_gpus": {"gpus": a.fewer.gpus, "strategy": str(a.fewer.strategy), "step_time_s": a.fewer.seconds}
        if a.fewer
        else None,
        "headroom": p.headroom,
        "days_against_money": [
            {
                "gpus": o.gpus,
                "strategy": str(o.strategy),
                "step_time_s": o.seconds,
                "days": goal.days(p.job, o.seconds),
                "gpu_hours": replace(goal, gpus=o.gpus).gpu_hours(p.job, o.seconds),
                "cost": replace(goal, gpus=o.gpus).money(p.job, o.seconds),
            }
            for o in offered
            if goal is not None
        ],
        "families": {r.family: _one(r, a, goal) for r in a.families},
        "front": [_one(r, a, None) for r in a.front],
        "rejected": [
            {
                "strategy": str(r.priced.strategy),
                "family": r.family,
                "reason": r.reason,
                "fits": r.priced.fits,
                "memory_bytes": int(r.priced.bytes_),
                "step_time_s": r.priced.seconds,
            }
            for r in a.rejected
        ],
    }


def _one(r: RankedStrategy, a: Answer, goal: Goal | None) -> dict[str, Any]:
    job = a.pricing.job
    row: dict[str, Any] = {
        "strategy": str(r.strategy),
        "family": r.family,
        "step_time_s": r.seconds,
        "tokens_per_s": job.global_batch * job.seq / r.seconds,
        "tokens_per_s_per_gpu": job.global_batch * job.seq / r.seconds / r.strategy.world,
        "micro_batches": r.strategy.accumulation(job),
        "mfu": r.mfu,
        "memory_bytes": int(r.priced.bytes_),
        "usable_bytes": a.pricing.allocatable,
        "communication_share": r.priced.communication,
        "bubble_share": r.run.bubble / r.seconds,
        "imbalance": r.run.imbalance,
        "terms_s": r.priced.terms,
        "memory_terms": r.priced.memory_terms,
        "origin": "estimated: formulas with constants fitted on published runs",
    }
    if goal:
        row["training"] = {
            "tokens": goal.tokens,
            "steps": goal.steps(job),
            "days": goal.days(job, r.seconds),
            "gpu_hours": goal.gpu_hours(job, r.seconds),
            "cost": goal.money(job, r.seconds),
        }
    return row


def conditions_json(whole: ConditionCost | None, each: tuple[ConditionCost, ...]) -> dict[str, Any]:
    """Return the key `conditions`: what they cost together, and each on top of the others."""
    if whole is None:
        return {}

    def one(c: ConditionCost) -> dict[str, Any]:
        best = None if c.without is None else str(c.without)
        return {"condition": c.text, "cost": c.share, "without": best, "step_time_s": c.seconds}

    return {"conditions": {**one(whole), "each": [one(c) for c in each]}}
