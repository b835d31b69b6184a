"""The search: every legal layout, batch and chunk in its steady state; the queue of the finalists; the best.

A candidate whose steady state misses a limit by more than `_SLACK` is pruned. Each of the finalists is simulated with
its batch raised, or lowered, to the largest that keeps the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.search.copies import Copy
from phalanx.serving.search.question import ServingCandidate, ServingQuestion, SteadyEstimate, WorkerGroup
from phalanx.serving.search.queued import queued, transfer
from phalanx.serving.search.space import layouts
from phalanx.spec.errors import InputError

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
_SLACK = 1.15
_FINALISTS = 8
_FRONT = 10
_PREFILL_USE = 0.8  # of a worker that prefills, at most: above it the queue before it grows fast


@dataclass(frozen=True)
class ServingAnswer:
    """The result of a search."""

    question: ServingQuestion
    best: ServingCandidate
    finalists: tuple[ServingCandidate, ...]
    """The best of each family within the limits, simulated; the best of all first."""
    front: tuple[ServingCandidate, ...]
    """The Pareto front of tokens/s per user and per GPU, simulated, whatever the limits."""
    evaluated: int
    """Candidates whose steady state was computed."""
    simulated: int
    cannot: dict[str, str]
    """Layouts that cannot serve, with the reason."""


class Search:
    """The candidates of a question. `copy_of` keeps the price tables."""

    def __init__(self, question: ServingQuestion, only: ServingLayout | None = None) -> None:
        self.q = question
        self.only = only
        self.simulated = 0
        self.evaluated = 0
        self.known: dict[tuple[str, ServingLayout], Copy] = {}
        self._pricing: dict[str, ServingPrice] = {}
        self._queued: dict[ServingCandidate, ServingCandidate] = {}

    def copy_of(self, weights: str, layout: ServingLayout) -> Copy:
        """Return a copy of the model under a layout."""
        key = (weights, layout)
        if key not in self.known:
            q = self.q
            if weights not in self._pricing:
                self._pricing[weights] = ServingPrice(
                    q.model, q.cluster, q.engine.name, weights, q.cache, memory_share=q.memory_share
                )
            self.known[key] = Copy(q, layout, weights, self._pricing[weights])
        return self.known[key]

    def copies(self) -> Iterator[Copy]:
        """Yield every copy that can serve."""
        for weights in self.q.weights:
            every = layouts(self.q.model, self.q.gpus, self.q.engine, self.q.cluster.ranks_per_node)
            for layout in every if self.only is None else (self.only,):
                copy = self.copy_of(weights, layout)
                if not copy.missing:
                    yield copy

    def aggregated(self, copy: Copy, batches: Iterable[int] = BATCHES) -> Iterator[ServingCandidate]:
        """Yield the candidates of one layout by batch and chunk, in as many replicas as the GPUs hold; also in fewer
        if the load is given and cost is the objective."""
        q, x = self.q, copy.layout
        most = q.gpus // x.gpus
        fewer = q.objective == "cost" and (q.open_load or q.concurrency > 0)
        for count in range(1 if fewer else most, most + 1):
            if q.open_load:
                yield from self._keeping_up(copy, count)
                continue
            if q.concurrency:
                batches = (max(1, min(-(-q.concurrency // count), copy.most)),)  # the others queue
            for batch in batches:
                if batch > copy.most or batch < min(x.attention_dp, *batches):
                    break
                for chunk in q.chunks:
                    enough = chunk * x.pp * x.attention_dp > batch * (1 + q.draft_tokens)
                    if not enough or (chunk > 2 * q.input and chunk > min(q.chunks)):
                        continue
                    s = copy.steady(batch, chunk)
                    self.evaluated += 1
                    group = WorkerGroup("both", x, count, batch, chunk, copy.cache_tokens)
                    steady = replace(s, tokens_per_s=s.tokens_per_s * count)
                    yield ServingCandidate(copy.weights, (group,), q.concurrency or batch * count, steady)

    def _keeping_up(self, copy: Copy, count: int) -> Iterator[ServingCandidate]:
        """Yield the candidates of a layout for an open load, with as many slots as fit. Their steady state is that of
        the smallest batch that keeps up with arrivals."""
        q, x = self.q, copy.layout
        arriving = q.offered * q.output
        batches = (*BATCHES, copy.most) if q.slots else BATCHES
        for chunk in q.chunks:
            able = [b for b in batches if b <= copy.most and chunk * x.pp * x.attention_dp > b * (1 + q.draft_tokens)]
            if not able or (chunk > 2 * q.input and chunk > min(q.chunks)):
                continue
            s = copy.steady(able[0], chunk)
            for batch in able:
                s = copy.steady(batch, chunk)
                self.evaluated += 1
                if s.tokens_per_s * count >= arriving:
                    break
            steady = replace(s, tokens_per_s=min(s.tokens_per_s * count, arriving))
            yield ServingCandidate(
                copy.weights,
                (WorkerGroup("both", x, count, able[-1], chunk, copy.cache_tokens),),
                able[-1] * count,
                steady,
            )

    def disaggregated(self, copies: list[Copy]) -> Iterator[ServingCandidate]:
        """Yield prefill and decode workers in every ratio that the GPUs hold, matched in their rates."""
        q = self.q
        chunk = max(c for c in q.chunks if c <= max(2 * q.input, min(q.chunks)))
        for first in copies:
            for then in copies:
                if then.weights == first.weights:
                    yield from self.after(first, then, chunk)

    def after(self, first: Copy, then: Copy, chunk: int) -> Iterator[ServingCandidate]:
        """Yield the candidates that prefill in chunks of this size on copies like `first`, and decode on others."""
        q = self.q
        ttft = first.prefill_s(chunk)
        moved = ttft + transfer(q, first).seconds(q.input)
        if q.ttft_s is None or moved <= q.ttft_s * _SLACK:
            yield from self.ratios(first, then, ttft, moved, chunk)

    def ratios(
        self, first: Copy, then: Copy, ttft: float, ttft_moved: float, chunk: int
    ) -> Iterator[ServingCandidate]:
        q, rate = self.q, _PREFILL_USE / ttft
        for batch in BATCHES:
            if batch > then.most:
                break
            tpot = then.decode_s(batch)
            if q.tpot_s is not None and tpot > q.tpot_s * _SLACK:
                break
            self.evaluated += 1
            each = batch / (q.output * tpot)  # requests/s of a worker that decodes
            counts = []
            for prefills in range(1, q.gpus // first.layout.gpus + 1):
                decodes = (q.gpus - prefills * first.layout.gpus) // then.layout.gpus
                if decodes > 0:
                    counts.append((min(prefills * rate, decodes * each), -prefills, prefills, decodes))
            if not counts:
                return
            served, _, prefills, decodes = max(counts)
            needed = -(-served // each)  # decode workers beyond that would idle
            decodes = max(1, min(decodes, int(needed)))
            waiting = max(1, round(served * ttft_moved))
            users = min(decodes * batch, max(1, round(served * q.output * tpot))) + waiting
            slots = max(2, -(-2 * waiting // prefills))
            cache = first.cache_tokens
            groups = (
                WorkerGroup("prefill", first.layout, prefills, min(slots, max(1, cache // q.longest)), chunk, cache),
                WorkerGroup(
                    "decode",
                    then.layout,
                    decodes,
                    batch,
                    max(chunk, 2 * batch * (1 + q.draft_tokens)),
                    then.cache_tokens,
                ),
            )
            if q.concurrency:
                users = q.concurrency
            if q.open_load:  # all that fit; the steady state is that of the smallest batch that keeps up
                if served < q.offered and batch < BATCHES[-1] and 2 * batch <= then.most:
                    continue
                most = max(b for b in BATCHES if b <= then.most)
                groups = groups[0], replace(groups[1], slots=most, step_tokens=max(chunk, 2 * most))
                users, served = most * decodes, min(served, q.offered)
            yield ServingCandidate(
                first.weights, groups, users, SteadyEstimate(ttft_moved + then.way_s(tpot), tpot, served * q.output)
            )
            if q.open_load:
                return

    def candidates(self) -> list[ServingCandidate]:
        """Return all candidates with their steady state."""
        copies = list(self.copies())
        priced_candidates: list[ServingCandidate] = []
        if "aggregated" in self.q.modes:
            for copy in copies:
                priced_candidates += self.aggregated(copy)
        if "disaggregated" in self.q.modes:
            priced_candidates += self.disaggregated(copies)
        return priced_candidates

    def simulate(self, c: ServingCandidate) -> ServingCandidate:
        """Return the candidate with its queue simulated."""
        if c not in self._queued:
            self._queued[c] = queued(self.q, c, self.copy_of)
            self.simulated += 1
        return self._queued[c]

    def keeps(self, c: ServingCandidate, slack: float = 1.0) -> bool:
        """Whether a simulated candidate is within the limits."""
        return excess(self.q, c) <= slack

    def score(self, c: ServingCandidate) -> tuple[float, ...]:
        """Sort key of simulated candidates; lower is better."""
        q = self.q
        latency = c.ttft_s(50) + (q.output - 1) * c.tpot_s(50)
        if q.open_load and not q.finite:  # whoever keeps up serves the same: the others come last
            behind = round(max(0.0, 1 - c.tokens_per_s / (0.95 * q.offered * q.output)), 2)
            return (behind, c.gpus, latency) if q.objective == "cost" else (behind, latency, c.gpus)
        if q.objective == "latency":
            return (latency, -c.tokens_per_s)
        if q.objective == "cost":
            return (-c.tokens_per_s / c.gpus, latency)
        return (-c.tokens_per_s, c.gpus, latency)

    def refined(self, c: ServingCandidate) -> ServingCandidate | None:
        """Return a candidate, simulated, with the largest batch within the limits; None if no batch is."""
        best = self.simulate(c)
        if self.q.open_load or self.q.concurrency or len(c.groups) > 1 or self.q.objective == "latency":
            return best if self.keeps(best) else self._smaller(c)
        if not self.keeps(best):
            return self._smaller(c)
        while (larger := self._with_batch(c, 1)) is not None:
            simulated = self.simulate(larger)
            if not self.keeps(simulated) or self.score(simulated) >= self.score(best):
                break
            c, best = larger, simulated
        return best

    def _smaller(self, c: ServingCandidate) -> ServingCandidate | None:
        for _ in range(6):
            smaller = self._with_batch(c, -1)
            if smaller is None:
                return None
            c = smaller
            here = self.simulate(c)
            if self.keeps(here):
                return here
        return None

    def _with_batch(self, c: ServingCandidate, by: int) -> ServingCandidate | None:
        """Return a candidate with the next larger or smaller batch; None if there is none."""
        group = c.groups[-1]
        if self.q.concurrency or self.q.open_load or group.slots not in BATCHES:
            return None
        place = BATCHES.index(group.slots) + by
        if not 0 <= place < len(BATCHES):
            return None
        batch = BATCHES[place]
        copy = self.copy_of(c.weights, group.layout)
        if len(c.groups) == 1:
            return next(
                (x for x in self.aggregated(copy, (batch,)) if x.groups[0].step_tokens == group.step_tokens), None
            )
        if batch > copy.most:
            return None
        users = max(1, round(c.users * batch / group.slots))
        return replace(c, users=users, groups=(c.groups[0], replace(group, slots=batch)))


def excess(q: ServingQuestion, c: ServingCandidate) -> float:
    """Return the largest ratio of a candidate's latency to its limit; at most 1 within the limits."""
    parts = [0.0]
    if q.ttft_s is not None:
        parts.append(c.ttft_s(q.percentile) / q.ttft_s)
    if q.tpot_s is not None:
        parts.append(c.tpot_s(q.percentile) / q.tpot_s)
    if q.sustained and c.tokens_per_s < 0.9 * q.offered * q.output:  # the queue grows
        parts.append(q.offered * q.output / max(c.tokens_per_s, 1e-9))
    return max(parts)


def best_of_each(candidates: Iterable[ServingCandidate], search: Search) -> list[ServingCandidate]:
    """Return the best of each family, the best first."""
    best: dict[tuple[object, ...], ServingCandidate] = {}
    for c in candidates:
        if c.family not in best or search.score(c) < search.score(best[c.family]):
            best[c.family] = c
    return sorted(best.values(), key=search.score)


def pareto(candidates: Iterable[ServingCandidate]) -> list[ServingCandidate]:
    """Return the candidates that no other beats in both tokens/s per user and per GPU, the fastest per user first."""
    kept: list[ServingCandidate] = []
    for c in sorted(candidates, key=lambda c: (c.tpot_s(50), -c.tokens_per_s / c.gpus)):
        if not kept or c.tokens_per_s / c.gpus > 1.02 * kept[-1].tokens_per_s / kept[-1].gpus:
            kept.append(c)
    return kept


def answer(search: Search) -> ServingAnswer:
    """Search for the best deployment. Raises InputError if none serves the model or is within the limits, and names
    the nearest."""
    q = search.q
    everything = search.candidates()
    if not everything:
        raise InputError("gpus", q.gpus, *_why_none(search))
    promising = [c for c in everything if search.keeps(c, _SLACK)]
    finalists = []
    for c in best_of_each(promising, search)[:_FINALISTS]:
        seen = search.refined(c)
        if seen is not None:
            finalists.append(seen)
    if not finalists:
        raise _nearest(search, everything)
    finalists = best_of_each(finalists, search)
    front = pareto(everything)
    every = max(1, len(front) // _FRONT)
    drawn = [search.simulate(c) for c in front[::every]]
    cannot = {
        f"tp={x.tp},pp={x.pp},dp={x.attention_dp},ep={x.moe_ep}, {weights}": copy.missing
        for (weights, x), copy in search.known.items()
        if copy.missing
    }
    return ServingAnswer(
        q,
        finalists[0],
        tuple(finalists),
        tuple(pareto([*drawn, *finalists])),
        search.evaluated,
        search.simulated,
        cannot,
    )


def _why_none(search: Search) -> tuple[str, str]:
    copies = list(search.known.values())
    if not copies:
        return "no layout of the model is legal on them", "its heads, layers and experts must be divided evenly"
    largest = max(copies, key=lambda c: (c.cache_tokens, -c.pricing.weight_bytes(c.layout)))
    x = largest.layout
    if not largest.missing:
        return "a worker that prefills and one that decodes need more", "give more GPUs, or --mode aggregated"
    degrees = f"tp={x.tp},pp={x.pp},dp={x.attention_dp},ep={x.moe_ep}"
    return (
        f"no layout holds a request: on {degrees} in {largest.weights}, {largest.missing}",
        "more GPUs, smaller weights (--weights) or a smaller cache (--kv fp8)",
    )


def _nearest(search: Search, everything: list[ServingCandidate]) -> InputError:
    """Return the error that names the candidate nearest to the limits, and by how much it misses them."""
    q = search.q
    tried = sorted(everything, key=lambda c: excess(q, c))[:4]
    best = min((search.simulate(c) for c in tried), key=lambda c: excess(q, c))
    missed, limits = [], []
    for name, limit, reached in (
        ("ttft", q.ttft_s, best.ttft_s(q.percentile)),
        ("tpot", q.tpot_s, best.tpot_s(q.percentile)),
    ):
        if limit is not None:
            limits.append(name)
            if reached > limit:
                missed.append(f"{name.upper()} {_time(reached)} of {_time(limit)}, {reached / limit:.2f} x")
    if not missed:
        missed.append(f"{best.outcome.requests_per_s if best.outcome else 0:.2f} of {q.offered:.3g} requests/s")
        limits.append("trace" if q.trace is not None else "rate")
    users = "" if q.open_load else f" with {best.users} at once"
    reason = f"no layout keeps them for {q.percentile} % of requests; the nearest, {best.title}{users}: "
    reason += "; ".join(missed)
    return InputError(", ".join(limits), None, reason, "relax it, add GPUs, or shorten the prompts")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
