"""The search: the steady state of every legal layout, batch and chunk, and the simulated queue of promising ones.

A candidate whose steady state misses a limit by more than `SLACK` is pruned. Each finalist is simulated at the
largest batch that keeps the limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.search.copies import Copy
from phalanx.serving.search.pairs import BATCHES, SLACK, best_prefills, crowding, pairs, prompt_chunks
from phalanx.serving.search.question import (
    SPARING,
    Objective,
    ServingCandidate,
    ServingQuestion,
    SteadyEstimate,
    WorkerGroup,
)
from phalanx.serving.search.queued import excess, with_outcome
from phalanx.serving.search.space import layout_error, layouts

LONGER = 10
"""Factor on the simulated requests for the answer to an endless load at a rate, which must keep the limits for
all."""


class Search:
    """The candidates of a question, of one layout if there is an `only` one. `copy_of` caches price tables."""

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
                    *(q.model, q.cluster, q.engine.name, weights, q.cache),
                    large_ep=q.large_ep,
                    memory_share=q.memory_share,
                    step_tokens=q.step_tokens,
                    slots=q.slots or None,
                    graphs=q.graphs,
                )
            self.known[key] = Copy(q, layout, weights, self._pricing[weights])
        return self.known[key]

    def on(self, gpus: int, objective: Objective | None = None) -> Search:
        """Return the search of the same question on another number of GPUs, or for another objective, with the same
        price tables where they apply."""
        q = replace(self.q, gpus=gpus, objective=objective or self.q.objective)
        other = Search(q, self.only)
        other.known, other._pricing = (self.known, self._pricing) if gpus == self.q.gpus else ({}, self._pricing)
        return other

    def copies(self) -> Iterator[Copy]:
        """Yield every copy that can serve."""
        for weights in self.q.weights:
            q, block = self.q, self.q.block_of(weights)
            every = layouts(q.model, q.gpus, q.engine, q.cluster.ranks_per_node, not q.sized, block)
            only = {x for _, x in q.pair} if self.only is None else {self.only}
            legal = [x for x in only if not layout_error(q.model, x, q.engine, block)]
            for layout in legal if only else every:
                copy = self.copy_of(weights, layout)
                if not copy.missing:
                    yield copy

    def aggregated(self, copy: Copy, batches: Iterable[int] = BATCHES) -> Iterator[ServingCandidate]:
        """Yield the candidates of one layout by batch and chunk, with as many replicas as the GPUs hold; for a given
        load and a sparing objective also with fewer."""
        q, x = self.q, copy.layout
        most, lost = q.gpus // x.gpus, q.workers_lost(x.gpus)
        if q.open_load:
            yield from self._keeping_up(copy, most)
            return
        fewer = q.objective in SPARING and q.concurrency > 0
        for count in range(lost + 1 if fewer else max(most, lost + 1), most + 1):
            left = count - lost
            if q.concurrency:
                batches = (max(1, min(-(-q.concurrency // left), copy.most)),)  # the others queue
            for batch in batches:
                if batch > copy.most or batch < min(x.attention_dp, *batches):
                    break
                for chunk in self._chunks(copy, batch):
                    s = copy.steady(batch, chunk)
                    self.evaluated += 1
                    group = WorkerGroup("both", x, count, batch, chunk, copy.cache_tokens)
                    steady = replace(s, tokens_per_s=s.tokens_per_s * left)
                    yield ServingCandidate(copy.weights, (group,), q.concurrency or batch * left, steady)

    def _chunks(self, copy: Copy, batch: int) -> Iterator[int]:
        """Yield the token budgets to try: budgets with room for prompts and `batch` sequences, up to the tokens of
        two prompts; at least the smallest one with room."""
        q, x = self.q, copy.layout
        enough = [c for c in q.chunks if c * x.pp * x.attention_dp > batch * (1 + q.draft_tokens)]
        yield from (c for c in enough if c <= 2 * q.input or c == min(enough))

    def _keeping_up(self, copy: Copy, most: int) -> Iterator[ServingCandidate]:
        """Yield the candidates of a layout for an open load, with as many slots as fit: `most` copies, or for a
        sparing objective the fewest by the steady state, which is of the smallest batch that keeps up with
        arrivals."""
        q, x = self.q, copy.layout
        arriving, lost = q.offered * q.output, q.workers_lost(x.gpus)
        batches = (*BATCHES, copy.most) if q.slots else BATCHES
        for chunk in self._chunks(copy, 1):
            able = [b for b in batches if b <= copy.most and chunk * x.pp * x.attention_dp > b * (1 + q.draft_tokens)]
            best: SteadyEstimate | None = None
            for batch in able:
                s = copy.steady(batch, chunk)
                self.evaluated += 1
                if best is not None and q.tpot_s is not None and s.tpot_s > q.tpot_s * (1 if q.sized else SLACK):
                    break
                if best is None or s.tokens_per_s > best.tokens_per_s:
                    best = s
                if not q.sized and s.tokens_per_s * (most - lost) >= arriving:
                    break
            if best is None:
                continue
            count = most if not q.sized else math.ceil(arriving * crowding(q, best.tpot_s) / best.tokens_per_s) + lost
            if count <= lost:
                continue
            steady = replace(best, tokens_per_s=min(best.tokens_per_s * (count - lost), arriving))
            group = WorkerGroup("both", x, count, able[-1], chunk, copy.cache_tokens)
            yield ServingCandidate(copy.weights, (group,), able[-1] * (count - lost), steady)

    def disaggregated(self, copies: list[Copy]) -> Iterator[ServingCandidate]:
        """Yield candidates with separate prefill and decode workers, in numbers that match their rates or are
        given."""
        if self.q.pair:
            (_, before), (_, behind) = self.q.pair
            for first, then in product(copies, copies):
                if (first.layout, then.layout) == (before, behind) and first.weights == then.weights:
                    for chunk in prompt_chunks(self.q, before):
                        yield from self.after(first, then, chunk)
            return
        for first, chunk in best_prefills(self.q, copies):
            for then in copies:
                if then.weights == first.weights:
                    yield from self.after(first, then, chunk)

    def after(self, first: Copy, then: Copy, chunk: int) -> Iterator[ServingCandidate]:
        """Yield the candidates that prefill in chunks of `chunk` tokens on copies like `first`, and decode on copies
        like `then`."""
        for c in pairs(self.q, first, then, chunk):
            self.evaluated += 1
            yield c

    def candidates(self) -> list[ServingCandidate]:
        """Return all candidates, with their steady state."""
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
            self._queued[c] = with_outcome(self.q, c, self.copy_of)
            self.simulated += 1
        return self._queued[c]

    def lasts(self, c: ServingCandidate) -> ServingCandidate | None:
        """Return a simulated candidate with the outcome of ten times as many requests, if it keeps up with them, and
        keeps each limit for the question's percentile with 95 % confidence; else None."""
        self.simulated += 1
        seen = with_outcome(self.q, replace(c, outcome=None), self.copy_of, longer=LONGER)
        assert seen.outcome is not None
        sure = all(k.share - k.margin >= self.q.percentile / 100 for k in seen.outcome.kept)
        return seen if sure and self.keeps(seen) else None

    def keeps(self, c: ServingCandidate, slack: float = 1.0) -> bool:
        """Whether a candidate's latencies are at most `slack` times the limits."""
        return excess(self.q, c) <= slack

    def score(self, c: ServingCandidate) -> tuple[float, ...]:
        """Return the sort key of candidates; lower is better."""
        q = self.q
        latency = c.ttft_s(50) + (q.output - 1) * c.tpot_s(50)
        if q.open_load and not q.finite:  # all that keep up serve the same; the others come last
            behind = round(max(0.0, 1 - c.tokens_per_s / (0.95 * q.offered * q.output)), 2)
            return (behind, c.spent(q), latency) if q.objective in SPARING else (behind, latency, c.gpus)
        if q.objective == "latency":
            return (latency, -c.tokens_per_s)
        if q.objective in SPARING:
            return (-c.tokens_per_s / c.spent(q), latency)
        return (-c.tokens_per_s, c.gpus, latency)

    def refined(self, c: ServingCandidate) -> ServingCandidate | None:
        """Return a candidate, simulated, with the largest batch that keeps the limits; None: no batch does."""
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
        """Return a candidate whose batch is `by` places larger; None: there is none."""
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


def best_of_each(candidates: Iterable[ServingCandidate], search: Search) -> list[ServingCandidate]:
    """Return the best of each family, the best first."""
    best: dict[tuple[object, ...], ServingCandidate] = {}
    for c in candidates:
        if c.family not in best or search.score(c) < search.score(best[c.family]):
            best[c.family] = c
    return sorted(best.values(), key=search.score)


def pareto(candidates: Iterable[ServingCandidate]) -> list[ServingCandidate]:
    """Return the Pareto front of tokens/s per user and per GPU, the fastest per user first."""
    kept: list[ServingCandidate] = []
    for c in sorted(candidates, key=lambda c: (c.tpot_s(50), -c.tokens_per_s / c.gpus)):
        if not kept or c.tokens_per_s / c.gpus > 1.02 * kept[-1].tokens_per_s / kept[-1].gpus:
            kept.append(c)
    return kept
