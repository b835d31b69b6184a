"""The neighbours of the best deployment: twice the tensor parallelism, a pipeline instead, separate prefill and
decode.

Each is simulated at its own best batch under the same limits, and rejected with a line on the limit that it misses,
or on its disadvantage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.search.answering import ServingAnswer
from phalanx.serving.search.misses import NAMES
from phalanx.serving.search.question import ServingCandidate
from phalanx.serving.search.queued import excess, latency_of
from phalanx.serving.search.search import Search
from phalanx.serving.search.sizing import fewest_gpus
from phalanx.serving.search.space import layout_error


@dataclass(frozen=True)
class ServingNeighbour:
    """A deployment one change away from the best."""

    change: str
    """The difference, in words."""
    candidate: ServingCandidate | None
    """The neighbour at its best batch within the limits; None: there is none."""
    reason: str


def _changes(x: ServingLayout, experts: bool) -> Iterator[tuple[str, ServingLayout]]:
    """Yield (change in words, layout) for layouts one step away from `x`, on as many GPUs, twice or half as many."""

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
    """Return the neighbours of the best deployment, with the reason against each."""
    q, best = search.q, answer.best
    if q.pair:
        return []
    group = best.groups[-1]
    changes = [(c, best.weights, x) for c, x in _changes(group.layout, q.model.experts is not None)]
    changes += [(f"{other} weights", other, group.layout) for other in q.weights if other != best.weights]
    out = [_neighbour(search, best, change, _relaid(search, best, weights, x)) for change, weights, x in changes]
    copies = [c for c in search.copies() if c.weights == best.weights]
    if len(best.groups) == 1 and "disaggregated" in q.modes:
        out.append(_neighbour(search, best, "prefill and decode apart", list(search.disaggregated(copies))))
    if len(best.groups) > 1 and "aggregated" in q.modes:
        together = [c for copy in copies for c in search.aggregated(copy)]
        out.append(_neighbour(search, best, "prefill and decode together", together))
    return out


def _with_tokens_of(search: Search, layout: ServingLayout, other: ServingLayout) -> Search:
    """Return a search in which the layout `other` has as many tokens in a step of prompts as `layout`: SGLang's
    `chunked_prefill_size` is shared by all attention groups, so more groups have less each."""
    q = search.q
    if q.engine.name != "sglang" or q.step_tokens is None or layout.attention_dp == other.attention_dp:
        return search
    each = max(1, q.step_tokens * layout.attention_dp // other.attention_dp)
    return Search(replace(q, step_tokens=each, chunks=(each,)))


def _relaid(
    search: Search, best: ServingCandidate, weights: str, layout: ServingLayout
) -> list[ServingCandidate] | str:
    """Return candidates with another layout or type of weights in place of the best deployment's workers, or of its
    decode workers if prefill is separate; or why there are none."""
    disaggregated, before = len(best.groups) > 1, best.groups[0].layout
    search = _with_tokens_of(search, best.groups[-1].layout, layout)
    q = search.q
    if reason := layout_error(q.model, layout, q.engine, q.block_of(weights)):
        return reason
    if layout.gpus + (before.gpus if disaggregated else 0) > q.gpus:
        left = ": none are left to prefill" if layout.gpus <= q.gpus else ""
        return f"takes {layout.gpus} GPUs of {q.gpus}{left}"
    first, copy = search.copy_of(weights, before), search.copy_of(weights, layout)
    if copy.missing:
        return copy.missing
    if disaggregated and first.missing:
        return f"to prefill, {first.missing}"
    return list(search.after(first, copy, best.groups[0].step_tokens) if disaggregated else search.aggregated(copy))


def _neighbour(
    search: Search, best: ServingCandidate, change: str, candidates: Sequence[ServingCandidate] | str
) -> ServingNeighbour:
    """Return the best of `candidates` as a neighbour, compared with the best deployment. `candidates`: a text says
    why there are none."""
    if isinstance(candidates, str):
        return ServingNeighbour(change, None, candidates)
    q = search.q
    promising = sorted((c for c in candidates if search.keeps(c, 1.15)), key=search.score)
    if q.sized:
        kept = iter(fewest_gpus(search, promising[:2], q.gpus, sure=False))
    else:
        kept = (seen for c in promising[:3] if (seen := search.refined(c)) is not None)
    for seen in kept:
        return ServingNeighbour(change, seen, _against(search, best, seen))
    if not candidates:
        return ServingNeighbour(change, None, "leaves no GPUs for the other part, or no room for a request")
    nearest = search.simulate(min(candidates, key=lambda c: excess(q, c)))
    parts = [
        f"{NAMES[name]} {latency_of(q, nearest, name) * 1e3:,.0f} ms of {most * 1e3:,.0f}"
        for name, most in q.limits.items()
        if latency_of(q, nearest, name) > most
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
            words += f"; a step that decodes {batch} requests takes {its * 1e3:.1f} ms, one of {a.slots} here"
            words += f" {mine * 1e3:.1f} ms"
    if (best.tokens_per_s - other.tokens_per_s) < 0 and search.q.objective == "throughput" and best.gpus > other.gpus:
        words += "; on fewer GPUs"
    return words
