"""The neighbours of the best deployment: twice the tensor parallelism, a pipeline instead, separate prefill and
decode.

Each is given its own best batch under the same limits, and simulated; what it misses, or loses, is said in a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.search.answering import ServingAnswer
from phalanx.serving.search.copies import Copy
from phalanx.serving.search.misses import NAMES
from phalanx.serving.search.question import ServingCandidate
from phalanx.serving.search.queued import excess, reached
from phalanx.serving.search.search import Search
from phalanx.serving.search.sizing import fewest
from phalanx.serving.search.space import illegal


@dataclass(frozen=True)
class ServingNeighbour:
    """A deployment one change away from the best."""

    change: str
    """The difference in words."""
    candidate: ServingCandidate | None
    """The neighbour at its best batch within the limits; None if there is none."""
    reason: str


def _changes(x: ServingLayout, experts: bool) -> Iterator[tuple[str, ServingLayout]]:
    """Yield layouts one step away from `x`, on as many GPUs, twice or half as many."""

    def with_width(tp: int, pp: int, attention_dp: int) -> ServingLayout:
        width = tp * attention_dp
        return (
            ServingLayout(tp, pp, attention_dp, 1, width)
            if x.moe_ep > 1
            else ServingLayout(tp, pp, attention_dp, width, 1)
        )

    yield "twice the tensor parallelism", with_width(2 * x.tp, x.pp, x.attention_dp)
    if x.tp % 2 == 0:
        yield "half the tensor parallelism", with_width(x.tp // 2, x.pp, x.attention_dp)
        yield "a pipeline in its place", with_width(x.tp // 2, 2 * x.pp, x.attention_dp)
    elif x.pp == 1:
        yield "a pipeline of two", with_width(x.tp, 2, x.attention_dp)
    if x.pp > 1 and x.pp % 2 == 0:
        yield "tensor parallelism for the pipeline", with_width(2 * x.tp, x.pp // 2, x.attention_dp)
    if experts:
        width = x.tp * x.attention_dp
        if width > 1:
            split = replace(x, moe_tp=width, moe_ep=1) if x.moe_ep > 1 else replace(x, moe_tp=1, moe_ep=width)
            yield ("experts cut by tensor parallelism" if x.moe_ep > 1 else "expert parallelism"), split
            if x.attention_dp > 1:
                yield "tensor-parallel attention", replace(x, tp=width, attention_dp=1)
            else:
                yield "attention data parallelism", replace(x, tp=1, attention_dp=width)


def neighbours(search: Search, answer: ServingAnswer) -> list[ServingNeighbour]:
    """Return the neighbours of the best with the reason against each."""
    q, best = search.q, answer.best
    group = best.groups[-1]
    first = search.copy_of(best.weights, best.groups[0].layout)
    out = []
    for change, layout in _changes(group.layout, q.model.experts is not None):
        reason = illegal(q.model, layout, q.engine, q.block_of(best.weights))
        together = layout.gpus + (first.layout.gpus if len(best.groups) > 1 else 0)
        if not reason and together > q.gpus:
            reason = f"takes {layout.gpus} GPUs of {q.gpus}"
            reason += ": none are left to prefill" if together - layout.gpus and layout.gpus <= q.gpus else ""
        if reason:
            out.append(ServingNeighbour(change, None, reason))
            continue
        copy = search.copy_of(best.weights, layout)
        if copy.missing:
            out.append(ServingNeighbour(change, None, copy.missing))
            continue
        out.append(_judged(search, best, change, _candidates(search, best, first, copy)))
    for other in q.weights:
        if other != best.weights:
            copy = search.copy_of(other, group.layout)
            if copy.missing:
                out.append(ServingNeighbour(f"{other} weights", None, copy.missing))
            else:
                before = search.copy_of(other, first.layout)
                change = f"{other} weights"
                if before.missing:
                    out.append(ServingNeighbour(change, None, f"to prefill, {before.missing}"))
                else:
                    out.append(_judged(search, best, change, _candidates(search, best, before, copy)))
    mode = "disaggregated" if len(best.groups) == 1 else "aggregated"
    if mode in q.modes:
        change = "prefill and decode apart" if mode == "disaggregated" else "prefill and decode together"
        copies = [c for c in search.copies() if c.weights == best.weights]
        if mode == "disaggregated":
            candidates = list(search.disaggregated(copies))
        else:
            candidates = [c for copy in copies for c in search.aggregated(copy)]
        out.append(_judged(search, best, change, candidates))
    return out


def _candidates(search: Search, best: ServingCandidate, first: Copy, copy: Copy) -> list[ServingCandidate]:
    """Return candidates with `copy` in place of the best's workers, or of its decode workers if `first` prefills."""
    if len(best.groups) == 1:
        return list(search.aggregated(copy))
    return list(search.after(first, copy, best.groups[0].step_tokens))


def _judged(
    search: Search, best: ServingCandidate, change: str, candidates: list[ServingCandidate]
) -> ServingNeighbour:
    """Return the best of some candidates as a neighbour, compared with the best of all."""
    q = search.q
    promising = sorted((c for c in candidates if search.keeps(c, 1.15)), key=search.score)
    if q.sized:
        kept = iter(fewest(search, promising[:2], q.gpus, sure=False))
    else:
        kept = (seen for c in promising[:3] if (seen := search.refined(c)) is not None)
    for seen in kept:
        return ServingNeighbour(change, seen, _against(search, best, seen))
    if not candidates:
        return ServingNeighbour(change, None, "leaves no GPUs for the other part, or no room for a request")
    nearest = search.simulate(min(candidates, key=lambda c: excess(q, c)))
    parts = [
        f"{NAMES[name]} {reached(q, nearest, name) * 1e3:,.0f} ms of {most * 1e3:,.0f}"
        for name, most in q.limits.items()
        if reached(q, nearest, name) > most
    ]
    missed = " and ".join(parts) or f"{nearest.outcome.requests_per_s if nearest.outcome else 0:.2f} requests/s"
    return ServingNeighbour(change, None, f"at best {missed} ({nearest.title}, {nearest.users} at once)")


def _against(search: Search, best: ServingCandidate, other: ServingCandidate) -> str:
    here, there = best.tokens_per_s / best.gpus, other.tokens_per_s / other.gpus
    share = there / here - 1
    words = f"{abs(share):.0%} {'fewer' if share < 0 else 'more'} tokens/s per GPU"
    if search.q.objective == "latency":
        mine, its = (c.ttft_s(50) + (search.q.output - 1) * c.tpot_s(50) for c in (best, other))
        words = f"a request takes {its:.3g} s, not {mine:.3g}; {words}"
    if len(best.groups) == len(other.groups) == 1:
        a, b = best.groups[0], other.groups[0]
        if a.layout != b.layout:
            batch = max(1, a.slots * b.layout.gpus // a.layout.gpus)
            mine = search.copy_of(best.weights, a.layout).decode_s(a.slots)
            its = search.copy_of(other.weights, b.layout).decode_s(batch)
            words += (
                f"; {batch} requests get a token every {its * 1e3:.1f} ms, {a.slots} here every {mine * 1e3:.1f} ms"
            )
    if (best.tokens_per_s - other.tokens_per_s) < 0 and search.q.objective == "throughput" and best.gpus > other.gpus:
        words += "; on fewer GPUs"
    return words
