"""The fewest GPUs for an open load: the smallest deployments first, with added workers until they keep the limits."""

import heapq
from collections import Counter
from dataclasses import replace

from phalanx.serving.search.question import ServingCandidate, ServingQuestion
from phalanx.serving.search.search import Search

ALTERNATIVES = 2
"""Simulated deployments after the best one, as alternatives."""
_SIZED, _ALIKE = 20, 2
"""The most deployments to simulate for the fewest GPUs; the most with equal workers for the start of requests."""
_STEP = 0.05
"""Relative increase of the workers of one kind after a miss."""


def fewest_gpus(
    search: Search, bounds: list[ServingCandidate], gpus: int, others: int = 0, sure: bool = True
) -> list[ServingCandidate]:
    """Return the deployment with the fewest GPUs, at most `gpus`, that keeps the limits under an open load, then up
    to `others` deployments of other families that do. `sure`: the first keeps them for ten times as many requests.

    `bounds`: a candidate of each family, with as many workers as its steady state and a queueing formula require. The
    smallest is simulated; one that misses a limit returns to the heap with more workers, and one that keeps the
    limits loses workers as long as it does. So the result does not depend on the number of unused GPUs."""
    q, kept = search.q, list[ServingCandidate]()
    heap = [(c.spent(q), _whole(q, c), i, c) for i, c in enumerate(_families(q, bounds)) if c.gpus <= gpus]
    heapq.heapify(heap)
    number, left = len(bounds), _SIZED if sure else ALTERNATIVES
    while heap and left > 0:
        _, _, _, c = heapq.heappop(heap)
        left -= 1
        simulated = search.simulate(c)
        if search.keeps(simulated):
            if kept or not sure:
                kept.append(simulated)
                continue
            if (long := _thinned(search, simulated)) is not None:
                kept.append(long)
                left = others
                continue
        more = _with_more(q, simulated)
        if more.gpus <= gpus:
            number += 1
            heapq.heappush(heap, (more.spent(q), _whole(q, simulated), number, more))
    return kept


def _families(q: ServingQuestion, bounds: list[ServingCandidate]) -> list[ServingCandidate]:
    """Return the smallest candidates, at most two whose requests begin on equal workers."""
    kept, alike = list[ServingCandidate](), Counter[object]()
    for c in sorted(bounds, key=lambda c: (c.spent(q), _whole(q, c))):
        key = (c.weights, len(c.groups), c.groups[0].layout)
        if alike[key] < _ALIKE:
            alike[key] += 1
            kept.append(c)
    return kept[:_SIZED]


def _thinned(search: Search, c: ServingCandidate) -> ServingCandidate | None:
    """Return a deployment without its spare workers, which are removed one by one while it keeps the limits; under an
    endless load, for ten times as many requests. None: it does not keep them for that long."""
    q, passed = search.q, [c]
    for i in reversed(range(len(c.groups))):
        while c.groups[i].count > 1 + q.workers_lost(c.groups[i].layout.gpus):
            groups = list(c.groups)
            groups[i] = replace(groups[i], count=groups[i].count - 1)
            seen = search.simulate(replace(c, groups=tuple(groups), outcome=None))
            if not search.keeps(seen):
                break
            c = seen
            passed.append(c)
    if not q.sustained:
        return c
    return next((long for each in dict.fromkeys((passed[-1], passed[0])) if (long := search.lasts(each))), None)


def _whole(q: ServingQuestion, c: ServingCandidate) -> float:
    """Return the seconds of a whole request, by a candidate's steady state or simulation."""
    return c.ttft_s(50) + (q.output - 1) * c.tpot_s(50)


def _with_more(q: ServingQuestion, c: ServingCandidate) -> ServingCandidate:
    """Return a simulated candidate that misses a limit, with more workers in the group where requests wait."""
    assert c.outcome is not None
    groups = list(c.groups)
    waiting = c.outcome.queueing.at(q.percentile)
    late = q.ttft_s is None or waiting > 0.3 * q.ttft_s
    grown = 0 if len(groups) == 1 or late else 1
    if len(groups) > 1 and q.tpot_s is not None and c.tpot_s(q.percentile) > q.tpot_s:
        grown = 1
    count = groups[grown].count
    groups[grown] = replace(groups[grown], count=count + max(1, round(_STEP * count)))
    return replace(c, groups=tuple(groups), outcome=None)
