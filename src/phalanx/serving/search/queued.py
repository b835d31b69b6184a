"""The simulation of a candidate: its deployment under the load of the question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from phalanx.schedule.generation import BatchingPolicy
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.search.copies import Copy
from phalanx.serving.search.question import ServingCandidate, ServingQuestion, WorkerGroup
from phalanx.serving.simulation.deployment import Deployment, Speculation, Transfer, WorkerSpec
from phalanx.serving.simulation.outcome import outcome
from phalanx.serving.simulation.requests import (
    Requests,
    closed_loop,
    spread,
    timed,
    uniform,
    with_adapters,
    with_reuse,
)
from phalanx.serving.simulation.simulation import simulate

CopyOf = Callable[[str, ServingLayout], Copy]


def load(q: ServingQuestion, users: int, stay_s: float) -> Requests:
    """Return the requests to simulate: the trace, or enough of them to be steady with `users` in a closed loop, who
    begin within the time that a request stays."""
    if q.trace is not None:
        requests = q.trace
    else:
        n = q.requests or (3000 if q.rate else int(np.clip(12 * users, 400, 6000)))
        if q.ranges:
            requests = uniform(n, *q.ranges, q.seed)
        else:
            requests = spread(n, q.input, q.output, q.variation, q.longest, q.seed)
        if q.rate:
            requests = timed(requests, q.rate, q.seed, q.burstiness, q.concurrency)
        else:
            requests = closed_loop(requests, users, 0.0 if q.finite else stay_s)
    if q.reuse:
        requests = with_reuse(requests, q.reuse, q.page_tokens)
    return with_adapters(requests, q.adapters, q.seed) if q.adapters else requests


def worker(q: ServingQuestion, group: WorkerGroup, copy: Copy) -> WorkerSpec:
    """Return a worker of a group as the simulation takes it."""
    return WorkerSpec(
        copy.table(group.slots, group.step_tokens),
        BatchingPolicy(
            slots=group.slots,
            chunk=group.step_tokens * group.layout.pp * group.layout.attention_dp,
            page=q.page_tokens,
            mixed=q.engine.mixed,
            reserve=q.engine.reserve,
        ),
        pages=group.cache_tokens // q.page_tokens,
        groups=group.layout.attention_dp,
        stages=group.layout.pp,
        role=group.role,
        speculation=Speculation(q.draft_tokens, q.acceptance) if q.draft_tokens and group.role != "prefill" else None,
        adapters=q.adapter_slots,
        adapter_load_s=q.adapter_load_s,
    )


def transfer(q: ServingQuestion, copy: Copy) -> Transfer:
    """Return the link between prefill and decode: every GPU of a copy sends its own part of the cache.

    Within a node over its links, else over the network; which of both, the whole deployment's size says.
    """
    within = q.gpus <= q.cluster.ranks_per_node
    tier = q.cluster.tiers[0 if within else -1]
    rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
    if not within and tier.uplink_bandwidth_bytes_per_s_per_direction:
        rate = min(rate, tier.uplink_bandwidth_bytes_per_s_per_direction / q.cluster.ranks_per_node)
    # MLA's latents are whole on each rank of tp: one of them sends.
    senders = copy.layout.gpus if q.model.latent is None else copy.layout.pp * copy.layout.attention_dp
    return Transfer(copy.pricing.cache_bytes(q.input) / q.input, rate * senders, tier.latency_s)


def queued(q: ServingQuestion, c: ServingCandidate, copy_of: CopyOf) -> ServingCandidate:
    """Return a candidate with its outcome.

    In a sustained closed loop equal workers have equal shares of the users: one of them is simulated.
    """
    together = len(c.groups) > 1 or q.open_load or q.finite
    specs: list[WorkerSpec] = []
    for group in c.groups:
        specs += [worker(q, group, copy_of(c.weights, group.layout))] * (group.count if together else 1)
    link = transfer(q, copy_of(c.weights, c.groups[0].layout)) if len(c.groups) > 1 else None
    users = c.users if together else -(-c.users // c.groups[0].count)
    stay = c.steady.ttft_s + c.steady.tpot_s * (q.output - 1)
    history = simulate(Deployment(tuple(specs), link), load(q, users, stay), q.seed)
    constants = copy_of(c.weights, c.groups[0].layout).pricing.constants
    seconds, steps = constants.way(q.input, c.groups[0].layout.attention_dp if len(c.groups) == 1 else 1)
    seen = outcome(history, way_s=seconds, way_steps=steps, finite=q.finite)
    if not together:
        scale = c.groups[0].count
        seen = replace(
            seen,
            tokens_per_s=seen.tokens_per_s * scale,
            requests_per_s=seen.requests_per_s * scale,
            in_flight=seen.in_flight * scale,
        )
    return replace(c, outcome=seen)
