"""The answer of `phalanx serve plan`: a ServingPlan, what it costs, and launch files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.launch import dynamo, sglang, trtllm, vllm
from phalanx.serving.launch.arguments import refused
from phalanx.serving.launch.launch import Launch
from phalanx.serving.plan_file import LatencyLimits, ServedLoad, ServingPlan, Workers
from phalanx.serving.question import NamedQuestion
from phalanx.serving.search.neighbours import ServingNeighbour, neighbours
from phalanx.serving.search.question import ServingCandidate
from phalanx.serving.search.search import Search, ServingAnswer, answer
from phalanx.spec.errors import InputError

_LAUNCH = {"vllm": vllm.launch, "sglang": sglang.launch, "trtllm": trtllm.launch}


def decide(query: NamedQuestion) -> tuple[ServingAnswer, list[ServingNeighbour]]:
    """Search, and judge the neighbours of the best. Raises InputError."""
    search = Search(query.question, query.layout)
    answered = answer(search)
    return answered, neighbours(search, answered)


def money(c: ServingCandidate, price: float) -> float:
    """Return what a million generated tokens cost at this price of a GPU-hour."""
    return price * c.gpus / 3600 / c.tokens_per_s * 1e6


def cache_of(answered: ServingAnswer) -> tuple[float, int]:
    """Return (bytes of KV cache per token of the whole model, requests of the load whose caches fit at once)."""
    q, best = answered.question, answered.best
    group = best.groups[-1]
    per_token = ServingPrice(q.model, q.cluster, q.engine.name, best.weights, q.cache).cache_bytes_per_token
    return per_token, group.count * (group.cache_tokens // (q.input + q.output))


def as_plan(query: NamedQuestion, c: ServingCandidate) -> ServingPlan:
    """Return a candidate as the plan that serving.json holds."""
    q = query.question
    assert c.outcome is not None
    workers = tuple(
        Workers(
            g.role,
            g.count,
            g.layout.tp,
            g.layout.pp,
            g.layout.attention_dp,
            g.layout.moe_tp,
            g.layout.moe_ep,
            g.slots,
            g.step_tokens,
            g.cache_tokens,
        )
        for g in c.groups
    )
    prediction: dict[str, Any] = {
        **asdict(c.outcome),
        "tokens_per_s_per_gpu": c.tokens_per_s / c.gpus,
        "tokens_per_s_per_user": 1 / c.outcome.tpot.p50 if c.outcome.tpot.p50 else None,
        "steady": asdict(c.steady),
        "origin": "simulated on estimated prices of steps",
    }
    if q.price is not None:
        prediction["money_per_million_tokens"] = money(c, q.price)
    return ServingPlan(
        model_name=query.model_name,
        model=q.model,
        cluster=query.cluster_name,
        node_gpus=q.cluster.ranks_per_node,
        gpus=c.gpus,
        engine=q.engine.name,  # type: ignore[arg-type]
        weights=c.weights,  # type: ignore[arg-type]
        cache=q.cache,  # type: ignore[arg-type]
        page_tokens=q.page_tokens,
        longest=q.longest,
        draft_tokens=q.draft_tokens,
        adapters=q.adapter_slots,
        workers=workers,
        load=ServedLoad(q.input, q.output, 0 if q.open_load else c.users, q.rate, query.trace, q.reuse),
        limits=LatencyLimits(q.ttft_s, q.tpot_s, q.percentile),  # type: ignore[arg-type]
        prediction=prediction,
    )


def launch(plan: ServingPlan) -> Launch:
    """Return what starts a plan, checked against the arguments that the engine publishes. Raises InputError."""
    line = _LAUNCH[plan.engine](plan)
    for command in line.commands:
        if command.checked_by and (problem := refused(command.checked_by, command.options)):
            raise InputError("launch", command.title, problem)
    return line


def manifest(plan: ServingPlan) -> str:
    """Return Dynamo's manifest of a plan, checked against the arguments that its workers publish. Raises
    InputError."""
    from phalanx.serving.launch.launch import places

    for place in places(plan):
        options = dynamo.worker_options(plan, place)
        owners = (f"dynamo.{plan.engine}", plan.engine) if plan.engine != "trtllm" else ("dynamo.trtllm",)
        if problem := refused(owners, options):
            raise InputError("launch", place.name, problem)
    return dynamo.manifest(plan)
