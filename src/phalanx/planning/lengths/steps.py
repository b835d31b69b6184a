"""The time of a step with sequences of unequal lengths: attention grows with the square of a document's length, and
ranks wait for the ones with long documents.

A micro-batch takes, in each chunk, the sum over its documents of tokens x seconds per token at that length, which the
stack's formulas give for documents of one length (option `document`). Ranks wait for each other as where some are
slow (planning/stragglers/): after every micro-batch if parameters or experts are shared, else once a step. Pipelines
run their schedule with each micro-batch's own seconds; of many micro-batches the first are run, and the rest is taken
to be as uneven. With equal documents a step is the predicted one.
"""

from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.ledger.pipeline_formulas import makespans, rounds
from phalanx.cost.ledger.policy import sharding as stack_sharding
from phalanx.cost.pipeline_time import Costs
from phalanx.planning.lengths.distribution import WAYS, Lengths, Way
from phalanx.planning.lengths.dynamic import document_groups, refusal
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import chunk_costs, refine
from phalanx.planning.search.strategy_columns import columns_of
from phalanx.planning.stragglers.lockstep import lockstep
from phalanx.schedule.packing import Floats, Ints, deal, first_fit
from phalanx.schedule.pipeline.schedules import facts_of
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

_DRAWS = 8
_POINTS = 15
"""Lengths of documents that are priced; between them seconds are interpolated."""
_POOL_TOKENS, _POOL = 10_000_000, 50_000
_RUN = 48
"""Micro-batches of a pipeline that are run."""


@dataclass(frozen=True)
class UnevenStep:
    """A step with sequences of unequal lengths: means over drawn steps."""

    way: str
    """How documents become sequences, and whether they are dealt by cost."""
    step_s: float
    step_low_s: float
    """A tenth of the drawn steps is below."""
    step_high_s: float
    even_s: float
    """Seconds of the step if every micro-batch were the mean one."""
    other_s: float
    """Seconds of it outside of passes: data-parallel communication and the update."""
    meeting_s: float
    """Seconds beyond `even_s` of waiting for the slowest of the replicas that meet in every micro-batch."""
    turns_s: float
    """Seconds beyond that for micro-batches of unequal cost in a pipeline; negative if short ones come last."""
    replicas_s: float
    """Seconds beyond that of waiting for the last pipeline, before gradients are reduced."""
    waiting_share: float
    """Share of the step of the last three."""
    tokens: float
    """Tokens trained per step, without padding."""
    padding_share: float
    """Share of padding in the computed tokens."""
    documents: float
    """Documents per step."""
    tokens_per_s: float
    attention_ratio: float
    """Query-key pairs of the rank with the most, over the mean rank's."""


@dataclass(frozen=True)
class _Draws:
    """Drawn steps; numbers are means over them."""

    way: str
    passes_s: Floats
    """Seconds from the first to the last pass, (draws, 3): of the mean pipeline if its micro-batches were equal, of
    the mean pipeline, of the last one."""
    even_s: float
    """Seconds of passes if every micro-batch were the mean one."""
    other_s: float
    trained: float
    """Tokens of documents."""
    computed: float
    """Tokens with padding."""
    documents: float
    attention_ratio: float

    @property
    def mean(self) -> UnevenStep:
        """The mean step."""
        steps = self.passes_s[:, 2] + self.other_s
        met, turned, last = self.passes_s.mean(axis=0)
        step, low, high = float(steps.mean()), *(float(np.percentile(steps, q)) for q in (10, 90))
        even = self.even_s + self.other_s
        return UnevenStep(
            way=self.way,
            step_s=step,
            step_low_s=low,
            step_high_s=high,
            even_s=even,
            other_s=self.other_s,
            meeting_s=_beyond(met + self.other_s, even),
            turns_s=_beyond(turned, met),
            replicas_s=_beyond(last, turned),
            waiting_share=_beyond(step, even) / step,
            tokens=self.trained,
            padding_share=1 - self.trained / self.computed,
            documents=self.documents,
            tokens_per_s=self.trained / step,
            attention_ratio=self.attention_ratio,
        )


class UnevenSteps:
    """A strategy under a distribution of lengths. Raises InputError where it cannot be priced."""

    def __init__(self, pricing: Pricing, s: Strategy, lengths: Lengths, seed: int = 0) -> None:
        seq = pricing.job.seq
        if lengths.slot is not None and lengths.slot != seq and lengths.way == "packed":
            reason = f"packs into other sequences than {seq:,} tokens"
            raise InputError("lengths", lengths.line, reason, f"ask for seq {lengths.slot}")
        if s.local:
            reason = "has replicas that step alone, whose waiting for each other has no price yet"
            raise InputError("strategy.local", s.local, reason, "leave it out")
        self.pricing, self.strategy, self.lengths, self.seq = pricing, s, lengths, seq
        self.random = np.random.default_rng(seed)
        drawn = lengths.draw(self.random, _POOL)
        mean = float(np.minimum(drawn, seq).mean())
        count = int(min(_POOL, max(_POOL_TOKENS / mean, 4 * pricing.job.global_batch, 1000)))
        self.raw = drawn[:count]
        self.pool: Ints = np.minimum(self.raw, seq)
        self.grid = np.unique(np.rint(np.geomspace(min(16, seq), seq, _POINTS))).astype(np.int64)
        self.micro_batches = s.accumulation(pricing.job)
        ((self.priced, run),) = refine(self._at(lengths.document(seq)), [s])
        self.other_s = self.priced.seconds - run.makespan
        self.blocks = run.blocks
        at = lockstep(s, stack_sharding(pricing.layout(columns_of([s])), pricing.profile.policy))
        self.pipeline = at.pipeline[np.unique(at.replica, return_index=True)[1]]
        self.alone = refusal(pricing, s, len(np.unique(self.pipeline)) < len(self.pipeline))
        if lengths.way == "dynamic" and self.alone:
            raise self.alone

    @property
    def ways(self) -> tuple[tuple[Way, bool], ...]:
        """The ways to make sequences that the strategy allows, each with whether sequences are dealt by cost."""
        fixed = tuple((way, by_cost) for way in WAYS[:-1] for by_cost in {False, way != "padded"})
        return fixed if self.alone else (*fixed, ("dynamic", False))

    def asked(self) -> UnevenStep:
        """Return the mean step in the way that the line of lengths states."""
        return self.step(self.lengths.way, self.lengths.balanced)

    @property
    def cut_share(self) -> float:
        """Share of the documents' tokens that exceed a sequence and are not trained."""
        stated = self.lengths.known or self.lengths.mean
        return 1 - float(self.pool.sum() / self.raw.sum()) if stated else 0.0

    def _at(self, document: int) -> Pricing:
        return replace(self.pricing, extra=replace(self.pricing.extra, document=document))

    def _of_micro_batch(self, p: Pricing) -> Floats:
        """Seconds of a micro-batch of sequences of one length, by kind of pass and chunk: (kinds x chunks,)."""
        s = self.strategy
        if s.pp == 1:
            return np.array([refine(p, [s])[0][1].makespan / self.micro_batches])
        c = chunk_costs(p, s, self.blocks)
        both = [i + w for i, w in zip(c.input_grad, c.weight_grad, strict=True)]
        return np.concatenate([c.forward, c.input_grad, c.weight_grad, both])

    def _price(self, way: Way) -> None:
        """Set `seconds` (kinds x chunks, points) of a micro-batch at each length of the grid, whose documents
        (packed) or sequences have that length, and `others` (points,), seconds of such a step outside of passes."""
        if way == "longest":
            by_length = [replace(self.pricing, job=replace(self.pricing.job, seq=int(g))) for g in self.grid]
            runs = [refine(p, [self.strategy])[0] for p in by_length]
            self.others = np.array([priced.seconds - run.makespan for priced, run in runs])
        else:
            packed = way == "packed"  # kernels of packed documents run, however long these are
            by_length = [self._at(int(g) if packed or g < self.seq else 0) for g in self.grid]
            self.others = np.full(len(self.grid), self.other_s)
        self.seconds = np.stack([self._of_micro_batch(p) for p in by_length], axis=-1)

    def _between(self, lengths: Ints) -> Floats:
        """Return weights of the priced lengths for linear interpolation at each length, (lengths, points)."""
        if len(self.grid) == 1:  # sequences of a few tokens
            return np.ones((len(lengths), 1))
        right = np.clip(np.searchsorted(self.grid, lengths), 1, len(self.grid) - 1)
        low, high = self.grid[right - 1], self.grid[right]
        part = np.clip((lengths - low) / (high - low), 0.0, 1.0)
        out = np.zeros((len(lengths), len(self.grid)))
        rows = np.arange(len(lengths))
        out[rows, right] = part
        out[rows, right - 1] += 1 - part
        return out

    def _sequences(self, way: Way) -> tuple[Floats, Floats, Ints]:
        """Return the pool's sequences: their parts of a micro-batch's weights (sequences, points), their tokens
        (sequences,), and the sequence of each document (documents,)."""
        size, whole = self.strategy.micro_batch, np.full_like(self.pool, self.seq)
        if way != "packed":
            weights = self._between(whole if way == "padded" else self.pool) / size
            return weights, self.pool.astype(float), np.arange(len(self.pool))
        place = first_fit(self.pool, self.seq)
        weights = np.zeros((int(place.max()) + 1, len(self.grid)))
        np.add.at(weights, place, self._between(self.pool) * self.pool[:, None] / (size * self.seq))
        tokens = np.bincount(place, self.pool).astype(float)
        weights[:, 0] += (self.seq - tokens) / (size * self.seq)  # padding attends to nothing
        return weights, tokens, place

    def step(self, way: Way, balanced: bool) -> UnevenStep:
        """Return the mean of drawn steps. `balanced`: whether sequences are dealt by cost."""
        if way == "dynamic":
            return self._dynamic()
        s, batch, size = self.strategy, self.pricing.job.global_batch, self.strategy.micro_batch
        self._price(way)
        weights, tokens, place = self._sequences(way)
        chosen = self.random.integers(len(tokens), size=(_DRAWS, batch))
        if balanced and size > 1:  # sequences of like cost share a micro-batch
            chosen = np.take_along_axis(chosen, np.argsort(-(weights @ self._whole)[chosen], axis=1), axis=1)
        chosen = chosen.reshape(_DRAWS, -1, size)
        computed = np.full(chosen.shape[:2], float(size * self.seq))
        of_each = weights[chosen].sum(axis=2)
        if way == "longest":
            at = np.argmax(tokens[chosen], axis=2)[..., None]
            longest = np.take_along_axis(chosen, at, axis=2)[..., 0]
            of_each, computed = size * weights[longest], size * tokens[longest]
        turns = deal(of_each @ self._whole, s.dp, balanced)
        mean = of_each.mean(axis=(0, 1))
        ran = np.array([self._run(of_each[draw][turn]) for draw, turn in enumerate(turns)])
        work = np.bincount(place, self.pool.astype(float) ** 2)[chosen].sum(axis=2)
        of_rank = work[np.arange(_DRAWS)[:, None, None], turns].sum(axis=1)
        return _Draws(
            f"{way}, balanced" if balanced else way,
            ran,
            float(self._equal(mean[None])[0]),
            float(self.others @ mean),
            trained=float(tokens[chosen].sum() / _DRAWS),
            computed=float(computed.sum() / _DRAWS),
            documents=float(np.bincount(place)[chosen].sum() / _DRAWS),
            attention_ratio=float((of_rank.max(axis=1) / of_rank.mean(axis=1)).mean()),
        ).mean

    @property
    def _whole(self) -> Floats:
        """Seconds of a micro-batch over all chunks, by the length of its documents, (points,)."""
        if self.strategy.pp == 1:
            return np.asarray(self.seconds[0])
        kinds = self.seconds.reshape(4, -1, len(self.grid))
        return np.asarray((kinds[0] + kinds[3]).sum(axis=0))

    def _dynamic(self) -> UnevenStep:
        """Return the mean of drawn steps with the documents of as many packed sequences, each document on a group of
        ranks of its own."""
        held = self.lengths.slot if self.lengths.way == "dynamic" else None
        groups = document_groups(self.pricing, self.strategy, self.grid, held)
        place = first_fit(self.pool, self.seq)
        weights, order = self._between(self.pool), np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(place.max() + 2))
        drawn = []
        for _ in range(_DRAWS):
            sequences = self.random.integers(len(starts) - 1, size=self.pricing.job.global_batch)
            drawn.append(np.concatenate([order[starts[q] : starts[q + 1]] for q in sequences]))
        steps = [groups.step(self.pool[d], weights[d]) for d in drawn]
        ranks_s = np.array([step.ranks_s for step in steps])
        even, ends, trained = ranks_s.mean(axis=1), ranks_s.max(axis=1), np.mean([self.pool[d].sum() for d in drawn])
        return _Draws(
            "dynamic",
            np.stack([even, even, ends], axis=1),
            float(even.mean()),
            self.other_s,
            trained=float(trained),
            computed=float(trained),
            documents=float(np.mean([len(d) for d in drawn])),
            attention_ratio=float(np.mean([step.attention_ratio for step in steps])),
        ).mean

    def _run(self, weights: Floats) -> tuple[float, float, float]:
        """Return seconds from the first to the last pass, given weights (turns, replicas, points): of the mean
        pipeline if its micro-batches were equal, of the mean pipeline, and of the last."""
        turns, _, points = weights.shape
        cost = weights @ self._whole
        slowest = np.empty((self.pipeline.max() + 1, turns, points))
        for number in range(len(slowest)):  # replicas of a pipeline meet in every micro-batch
            own = np.flatnonzero(self.pipeline == number)
            most = own[np.argmax(cost[:, own], axis=1)]
            slowest[number] = weights[np.arange(turns), most]
        equal = self._equal(slowest.mean(axis=1))
        ends = equal * self._unevenness(slowest)
        return float(equal.mean()), float(ends.mean()), float(ends.max())

    def _unevenness(self, weights: Floats) -> Floats:
        """Return the times of pipelines over their times with equal micro-batches, (pipelines,), given weights
        (pipelines, turns, points)."""
        s = self.strategy
        if s.pp == 1:
            return np.ones(len(weights))
        first = weights[:, : max(_RUN, 3 * s.pp)]
        chunks = s.virtual if facts_of(s.schedule).takes_virtual and s.virtual > 1 else None
        actions = rounds(s.schedule, s.pp, first.shape[1], chunks)
        mean = np.broadcast_to(first.mean(axis=1, keepdims=True), first.shape)
        return actions.uneven_makespans(self.seconds, first) / actions.uneven_makespans(self.seconds, mean)

    def _equal(self, weights: Floats) -> Floats:
        """Return seconds of pipelines of equal micro-batches, (pipelines,), given weights (pipelines, points)."""
        s = self.strategy
        if s.pp == 1:
            return np.asarray(self.micro_batches * (weights @ self.seconds[0]))
        of_chunk = np.einsum("cg,ng->nc", self.seconds, weights).reshape(len(weights), 4, -1)
        ranks = np.array(rank_of(s))
        slowest = [float(np.bincount(ranks, row[0] + row[3]).max()) for row in of_chunk]
        costs = [Costs(*row[:3].tolist()) for row in of_chunk]
        return np.array(makespans(s.schedule, s.pp, s.virtual, [self.micro_batches] * len(costs), costs, slowest))


def _beyond(seconds: float, less: float) -> float:
    """Return `seconds` - `less`, or 0 if they differ by rounding alone."""
    return seconds - less if abs(seconds - less) > 1e-12 * seconds else 0.0
