"""The simulation of a candidate under the load of the question."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from phalanx.schedule.generation import BatchingPolicy
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.search.copies import Copy
from phalanx.serving.search.question import ServingCandidate, ServingQuestion, WorkerGroup
from phalanx.serving.simulation.deployment import Deployment, Speculation, Transfer, WorkerSpec
from phalanx.serving.simulation.outcome import ServingOutcome, outcome
from phalanx.serving.simulation.requests import (
    Requests,
    closed_loop,
    gamma_requests,
    uniform_requests,
    with_adapters,
    with_arrivals,
    with_reuse,
)
from phalanx.serving.simulation.simulation import simulate
from phalanx.spec.errors import InputError

CopyOf = Callable[[str, ServingLayout], Copy]


def load(q: ServingQuestion, users: int, stay_s: float, longer: int = 1) -> Requests:
    """Return the requests to simulate: the trace, or enough requests for a steady state of a closed loop of `users`,
    who begin within `stay_s`, the seconds of a request; requests at a rate arrive over at least eight times that.
    `longer`: a factor on their number."""
    if q.trace is not None:
        requests = q.trace
    else:
        steady = np.clip(8 * q.rate * stay_s, 3000, 20000) if q.rate else np.clip(12 * users, 400, 6000)
        n = (q.requests or int(steady)) * longer
        if q.ranges:
            requests = uniform_requests(n, *q.ranges, q.seed)
        else:
            requests = gamma_requests(n, q.input, q.output, q.variation, q.longest, q.seed)
        if q.rate:
            requests = with_arrivals(requests, q.rate, q.seed, q.burstiness, q.concurrency)
        else:
            requests = closed_loop(requests, users, 0.0 if q.finite else stay_s)
    if q.reuse:
        requests = with_reuse(requests, q.reuse, q.page_tokens)
    return with_adapters(requests, q.adapters, q.seed) if q.adapters else requests


def worker(q: ServingQuestion, group: WorkerGroup, copy: Copy) -> WorkerSpec:
    """Return a worker of a group, for the simulation."""
    return WorkerSpec(
        copy.table(group.step_tokens),
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


def transfer(q: ServingQuestion, copy: Copy, gpus: int) -> Transfer:
    """Return the link between prefill and decode, over which every GPU of a copy sends its part of the cache.

    A deployment of `gpus` GPUs within a node uses the node's links, a larger one the network.
    """
    within = gpus <= q.cluster.ranks_per_node
    tier = q.cluster.tiers[0 if within else -1]
    rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
    if not within and tier.uplink_bandwidth_bytes_per_s_per_direction:
        rate = min(rate, tier.uplink_bandwidth_bytes_per_s_per_direction / q.cluster.ranks_per_node)
    # Each rank of tp has MLA's latents in full: one of them sends.
    senders = copy.layout.gpus if q.model.latent is None else copy.layout.pp * copy.layout.attention_dp
    return Transfer(copy.pricing.cache_bytes(q.input) / q.input, rate * senders, tier.latency_s)


def _remaining_workers(q: ServingQuestion, c: ServingCandidate) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of workers of each group that remain after the question's loss, which hits one group: prefill
    and decode workers are on different nodes."""
    counts = tuple(g.count for g in c.groups)
    if not q.lost[0]:
        yield counts
        return
    for i, group in enumerate(c.groups):
        rest = group.count - q.workers_lost(group.layout.gpus)
        yield (*counts[:i], rest, *counts[i + 1 :])


def with_outcome(q: ServingQuestion, c: ServingCandidate, copy_of: CopyOf, longer: int = 1) -> ServingCandidate:
    """Return a candidate with its outcome, over `longer` times as many requests; if workers may be lost, the outcome
    of the worst loss.

    In a sustained closed loop equal workers have equal shares of the users, so one of them is simulated.
    """
    seen = [
        replace(c, outcome=_outcome(q, c, left, copy_of, longer))
        for left in _remaining_workers(q, c)
        if min(left) > 0
    ]
    if not seen:
        raise InputError("survive", None, f"nothing is left of {c.title}", "more GPUs, or smaller copies")
    return max(seen, key=lambda each: (excess(q, each), -each.tokens_per_s))


def capacity(q: ServingQuestion, c: ServingCandidate, copy_of: CopyOf) -> float:
    """Return the requests/s of an open load that a candidate answers at most: when all its slots are taken. Of a
    trace, requests of its mean lengths."""
    users = sum(g.slots * g.count for g in c.groups if g.role != "prefill")
    full = replace(q, rate=0.0, requests=0, concurrency=users, trace=None)
    o = with_outcome(full, replace(c, users=users, outcome=None), copy_of).outcome
    assert o is not None
    return o.requests_per_s


def _outcome(
    q: ServingQuestion, c: ServingCandidate, counts: tuple[int, ...], copy_of: CopyOf, longer: int
) -> ServingOutcome:
    """Return the outcome of a candidate with these numbers of workers."""
    together = len(c.groups) > 1 or q.open_load or q.finite
    specs: list[WorkerSpec] = []
    for group, count in zip(c.groups, counts, strict=True):
        specs += [worker(q, group, copy_of(c.weights, group.layout))] * (count if together else 1)
    first = copy_of(c.weights, c.groups[0].layout)
    link = transfer(q, first, c.gpus) if len(c.groups) > 1 else None
    users = c.users if together else -(-c.users // counts[0])
    stay = c.steady.ttft_s + c.steady.tpot_s * (q.output - 1)
    constants = first.pricing.constants
    # In a benchmark prompts are tokenised one after the other; otherwise a prompt waits for its own tokenising only.
    each = float(constants.accept_s) if q.accept_s is None else q.accept_s
    accept = (each, float(constants.token_s)) if q.finite else (0.0, 0.0)
    history = simulate(Deployment(tuple(specs), link, *accept), load(q, users, stay, longer), q.seed)
    dp = first.layout.attention_dp if len(c.groups) == 1 else 1
    seconds, steps = constants.way(0.0 if q.finite else q.input, dp, each=q.finite or q.open_load)
    seen = outcome(history, way_s=seconds, way_steps=steps, finite=q.finite, limits=q.limits)
    if together:
        return seen
    return replace(
        seen,
        tokens_per_s=seen.tokens_per_s * counts[0],
        requests_per_s=seen.requests_per_s * counts[0],
        in_flight=seen.in_flight * counts[0],
    )


def latency_of(q: ServingQuestion, c: ServingCandidate, limit: str) -> float:
    """Return the seconds of a candidate's ttft, tpot or deadline, at the question's percentile."""
    if limit == "ttft":
        return c.ttft_s(q.percentile)
    if limit == "tpot":
        return c.tpot_s(q.percentile)
    return c.outcome.latency.at(q.percentile) if c.outcome else c.steady.ttft_s + c.steady.tpot_s * (q.output - 1)


def excess(q: ServingQuestion, c: ServingCandidate) -> float:
    """Return the largest ratio of a candidate's latency to its limit; at most 1 if it keeps all limits."""
    parts = [0.0, *(latency_of(q, c, limit) / most for limit, most in q.limits.items())]
    if q.sustained and c.tokens_per_s < 0.97 * q.offered * q.output:  # the queue grows
        parts.append(q.offered * q.output / max(c.tokens_per_s, 1e-9))
    return max(parts)
