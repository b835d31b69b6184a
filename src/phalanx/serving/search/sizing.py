"""The fewest GPUs for an open load: the smallest deployments first, with more workers until they keep the limits."""

import heapq
from collections import Counter
from dataclasses import replace

from phalanx.serving.search.question import ServingCandidate, ServingQuestion
from phalanx.serving.search.search import Search

OTHERS = 2
"""How many more are simulated, to show what else would do."""
_SIZED, _ALIKE = 20, 2
"""The most deployments that are simulated to find the fewest GPUs, and of those that begin alike."""
_STEP = 0.05
"""By how much the workers of one kind are more than before, where they were too few."""


def fewest(
    search: Search, bounds: list[ServingCandidate], gpus: int, others: int = 0, sure: bool = True
) -> list[ServingCandidate]:
    """Return the deployment of the fewest GPUs, at most `gpus`, that keeps an open load within the limits, then
    the candidates of `others` further families that do, as far as they come next. `sure`: the first keeps them ten
    times as long.

    `bounds`: one of each family, with as many workers as its steady state and a formula of queues say. The smallest
    is simulated; what misses a limit comes again with more workers, and from what keeps them workers are taken as
    long as it does: nothing depends on how many GPUs are offered beyond those."""
    q, kept = search.q, list[ServingCandidate]()
    heap = [(c.spent(q), _whole(q, c), i, c) for i, c in enumerate(_families(q, bounds)) if c.gpus <= gpus]
    heapq.heapify(heap)
    number, left = len(bounds), _SIZED if sure else OTHERS
    while heap and left > 0:
        _, _, _, c = heapq.heappop(heap)
        left -= 1
        seen = search.simulate(c)
        if search.keeps(seen):
            if kept or not sure:
                kept.append(seen)
                continue
            if (long := _thinned(search, seen)) is not None:
                kept.append(long)
                left = others
                continue
        more = _with_more(q, seen)
        if more.gpus <= gpus:
            number += 1
            heapq.heappush(heap, (more.spent(q), _whole(q, seen), number, more))
    return kept


def _families(q: ServingQuestion, bounds: list[ServingCandidate]) -> list[ServingCandidate]:
    """Return the smallest candidates, no more than two whose requests begin on the same kind of workers."""
    kept, alike = list[ServingCandidate](), Counter[object]()
    for c in sorted(bounds, key=lambda c: (c.spent(q), _whole(q, c))):
        key = (c.weights, len(c.groups), c.groups[0].layout)
        if alike[key] < _ALIKE:
            alike[key] += 1
            kept.append(c)
    return kept[:_SIZED]


def _thinned(search: Search, c: ServingCandidate) -> ServingCandidate | None:
    """Return a deployment with the fewest workers that still keep the limits, ten times as long where requests come
    without end: one by one is taken from it. None if it does not keep them that long itself."""
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
    """Seconds of a whole request, as a candidate's steady state or simulation has it."""
    return c.ttft_s(50) + (q.output - 1) * c.tpot_s(50)


def _with_more(q: ServingQuestion, c: ServingCandidate) -> ServingCandidate:
    """Return a simulated candidate that misses a limit, with more workers where requests wait."""
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
