"""The event loop: arrivals, ends of steps, caches that have moved; then workers that are free plan what is next.

All that happens at one time is taken together before anybody plans, so that requests that come together are batched
together. The same seed gives the same history.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from phalanx.simulate.serving.deployment import Deployment, outstanding_least, require_fits
from phalanx.simulate.serving.requests import Floats, Requests
from phalanx.simulate.serving.worker import Requested, Worker

_COMES, _STEP_ENDS, _CACHE_MOVED = range(3)


@dataclass(frozen=True)
class History:
    """What became of n requests; times in seconds from the start."""

    requests: Requests
    arrival: Floats
    """(n,)"""
    admitted: Floats
    """(n,) the end of queueing for a slot and pages."""
    first: Floats
    """(n,) the first token is out."""
    done: Floats
    """(n,) the last token is out."""
    sent: Floats
    """(runs, 3): end, seconds, tokens of runs of steps, of all workers, by end."""
    gaps: Floats
    """(runs, 3): tokens, seconds between a sequence's tokens at the first and at the last step of each run."""
    preemptions: int


def simulate(deployment: Deployment, requests: Requests, seed: int = 0) -> History:
    """Serve all requests. Raises InputError for a request that no cache can hold."""
    require_fits(deployment, requests)
    n = len(requests)

    def listed(column: Any) -> list[int]:
        return [0] * n if column is None else column.tolist()

    shared = Requested(
        requests.input.tolist(),
        requests.output.tolist(),
        listed(requests.reused),
        listed(requests.priority),
        listed(requests.adapter),
    )
    events: list[tuple[float, int, int, int, int]] = []  # heap of (time, number, kind, request or worker, version)
    count = 0

    def push(time: float, kind: int, who: int, version: int = 0) -> None:
        nonlocal count
        count += 1
        heappush(events, (time, count, kind, who, version))

    arrival = [0.0] * n if requests.arrival is None else requests.arrival.tolist()
    closed = requests.arrival is None
    coming = min(requests.users, n) if closed else 1
    for request in range(min(coming, n)):
        if closed:
            arrival[request] = request * requests.ramp_s / coming
        push(arrival[request], _COMES, request)

    def done(request: int, now: float) -> None:
        nonlocal coming
        shared.done[request] = now
        if closed and coming < n:
            arrival[coming] = now
            push(now, _COMES, coming)
            coming += 1

    link_free = [0.0] * len(deployment.workers)
    came_from = [0] * n

    def computed(request: int, now: float) -> None:
        """Hand on a cache: over the link of its worker, after those before it."""
        assert deployment.transfer is not None
        here = came_from[request]
        link_free[here] = max(now, link_free[here]) + deployment.transfer.seconds(shared.input[request])
        push(link_free[here], _CACHE_MOVED, request)

    workers = [Worker(spec, shared, seed + i, computed, done) for i, spec in enumerate(deployment.workers)]
    entry = [i for i, w in enumerate(workers) if w.spec.role != "decode"]
    decoders = [i for i, w in enumerate(workers) if w.spec.role == "decode"]

    while events:
        now = events[0][0]
        touched: dict[int, None] = {}
        while events and events[0][0] == now:
            _, _, kind, who, version = heappop(events)
            if kind == _STEP_ENDS:
                worker = workers[who]
                if version == worker.version and worker.busy:
                    worker.finish()
                    touched[who] = None
                continue
            if kind == _COMES:
                to = entry[outstanding_least([workers[i].load for i in entry])] if len(entry) > 1 else entry[0]
                came_from[who] = to
                workers[to].add(who)
                if not closed and who + 1 < n:
                    push(arrival[who + 1], _COMES, who + 1)
            else:
                shared.first[who] = now
                workers[came_from[who]].handed_on(shared.input[who])
                touched[came_from[who]] = None
                to = decoders[outstanding_least([workers[i].load for i in decoders])]
                workers[to].add(who, shared.input[who])
            touched[to] = None
        for i in touched:
            worker = workers[i]
            if worker.busy:
                if worker.run > 1 and worker.admits() and worker.cut(now):
                    push(max(now, worker.ends), _STEP_ENDS, i, worker.version)
            elif worker.plan(now):
                push(worker.ends, _STEP_ENDS, i, worker.version)

    sent = sorted(row for worker in workers for row in worker.sent)
    gaps = [row for worker in workers for row in worker.gaps if row[0]]
    return History(
        requests,
        np.array(arrival),
        np.array(shared.admitted),
        np.array(shared.first),
        np.array(shared.done),
        np.array(sent, float).reshape(-1, 3),
        np.array(gaps, float).reshape(-1, 3),
        shared.preemptions,
    )
