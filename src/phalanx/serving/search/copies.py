"""One copy of the model under a layout: its cache, the seconds of its steps, and its steady state by batch.

B requests run in continuous batching, in a closed loop, each with I prompt tokens to compute and O tokens to
generate. For a request an engine spends the steps of its prompt, T_p, and a share of the decoding steps, O t(B) / B
(t at the mean context; speculation yields several tokens a step). So

    tokens/s = O / (T_p + O t(B) / B)        TPOT = (B (T_p + O t(B) / B) - TTFT) / (O - 1)

and TTFT is the prompt's own steps, half a step of waiting, and earlier prompts: if prompts take a share r of the
engine's time, r / (2 (1 - r)) of a prompt (M/D/1). The steady state only prunes: the simulation decides.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.serving.cost.adapters import adapter_bytes
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.search.question import ServingQuestion, SteadyEstimate
from phalanx.serving.simulation.deployment import UNBOUNDED, Speculation
from phalanx.spec.cluster.spec import GIB

Seconds = Callable[[Any, Any, Any, Any, float, int], Any]
"""(tokens of a prompt, cached tokens before them, sequences that decode, sum of their cached tokens, prompt tokens of
the busiest attention group over the mean, tokens computed of each sequence) -> s."""

_PAST = 16384  # cached tokens of the long prompt from which attention's cost per pair follows


def grid(most: int, ratio: float = 1.5) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return whole numbers from 1 to `most`, each about `ratio` times the last."""
    steps = int(np.ceil(np.log(max(most, 2)) / np.log(ratio)))
    return np.unique(np.rint(np.geomspace(1, max(most, 2), steps + 1)))


class Tabulated:
    """The StepPrice of a worker in tables, from which the simulation reads a step in a microsecond.

    Decoding steps are tabulated over sequences and cached tokens per sequence, and interpolated linearly. A step with
    prompts costs

        a(n) + b(n) pairs + decode(sequences, context) - decode(sequences, 0),    n = tokens of prompts and sequences

    because all but attention depends on n alone, and attention over prompts on the pairs of query and key. a and b
    follow from two prices of n tokens of a prompt: without cached tokens, and after many. Where attention is data
    parallel there are two pairs of a and b, for tokens spread evenly and for tokens in one group, with linear
    interpolation between.

    With speculation a step computes `1 + drafted` tokens of each sequence, after a pass of the draft for each drafted
    token.

    Under pipeline parallelism the sequences circulate in pp groups, one for each stage, as do up to pp chunks of
    prompts: a step of all takes as long as one group takes through all stages. `chunk`: the most tokens of an
    attention group in the pipeline at once."""

    def __init__(
        self,
        seconds: Seconds,
        slots: int,
        longest: int,
        chunk: int,
        pp: int = 1,
        groups: int = 1,
        drafted: int = 0,
        draft_s: Callable[[float], float] | None = None,
    ) -> None:
        self._draft_s = draft_s or (lambda sequences: 0.0)
        self.pp, self.groups, self.drafted, self.chunk = pp, groups, drafted, chunk * groups
        self.batches = grid(-(-slots // pp))
        self.contexts = np.concatenate(([0.0], np.geomspace(16, max(longest, 32), 16)))
        self.tokens = grid(chunk * groups + slots * (1 + drafted), 1.4)
        b, c = np.meshgrid(self.batches, self.contexts, indexing="ij")
        none = np.zeros_like(b)
        self.decoding = np.asarray(seconds(none, none, b, b * c, 1.0, 1 + drafted), float)
        self._tokens = self.tokens.tolist()
        self._even = self._off(seconds, 1.0)
        self._one = self._off(seconds, float(groups)) if groups > 1 else self._even
        self._rows: dict[int, tuple[list[float], list[float]]] = {}

    def with_chunk(self, chunk: int) -> Tabulated:
        """Return the same table for steps of at most `chunk` tokens of an attention group; not more than its own."""
        same = copy.copy(self)
        same.chunk = chunk * self.groups
        return same

    def _row(self, sequences: int) -> tuple[list[float], list[float]]:
        """Return (sums of cached tokens, seconds) at the points of the table, for a number of sequences."""
        groups = min(self.pp, sequences)
        each = sequences / groups
        above = min(int(np.searchsorted(self.batches, each)), len(self.batches) - 1)
        below = max(0, above - 1)
        span = self.batches[above] - self.batches[below]
        part = (each - self.batches[below]) / span if span else 0.0
        values = (1 - part) * self.decoding[below] + part * self.decoding[above]
        if self.drafted:
            values = values + self._draft_s(each)
        row = (self.contexts * sequences).tolist(), values.tolist()
        self._rows[sequences] = row
        return row

    def _off(self, seconds: Seconds, uneven: float) -> tuple[list[float], list[float]]:
        """Compute (a, b) at the points of the table; `uneven`: as in the price."""
        n, zero = self.tokens, np.zeros_like(self.tokens)
        short = np.asarray(seconds(n, zero, zero, zero, uneven, 1), float)
        long = np.asarray(seconds(n, zero + _PAST, zero, zero, uneven, 1), float)
        per_pair = (long - short) / (n * _PAST)
        return (short - per_pair * n * (n + 1) / 2).tolist(), per_pair.tolist()

    def _per_tokens(self, n: float, uneven: float = 1.0) -> tuple[float, float]:
        """Return (a(n), b(n)), interpolated."""
        i = min(max(bisect_right(self._tokens, n), 1), len(self._tokens) - 1)
        part = (n - self._tokens[i - 1]) / (self._tokens[i] - self._tokens[i - 1])
        a, b = self._even
        fixed, per_pair = a[i - 1] + part * (a[i] - a[i - 1]), b[i - 1] + part * (b[i] - b[i - 1])
        if uneven > 1:
            a, b = self._one
            share = (uneven - 1) / (self.groups - 1)
            fixed += share * (a[i - 1] + part * (a[i] - a[i - 1]) - fixed)
            per_pair += share * (b[i - 1] + part * (b[i] - b[i - 1]) - per_pair)
        return fixed, per_pair

    def decode(self, sequences: int, context: int) -> tuple[float, float, int]:
        """Return (seconds, seconds per further token of context, context up to which this line holds)."""
        edges, values = self._rows.get(sequences) or self._row(sequences)
        i = min(bisect_right(edges, context), len(edges) - 1)
        slope = (values[i] - values[i - 1]) / (edges[i] - edges[i - 1])
        end = UNBOUNDED if i == len(edges) - 1 else math.ceil(edges[i])
        return values[i - 1] + slope * (context - edges[i - 1]), slope, end

    def _drafting(self, sequences: int) -> float:
        """Return the seconds of drafting for the sequences of one group of the pipeline."""
        return self._draft_s(sequences / min(self.pp, sequences)) if self.drafted else 0.0

    def mixed(self, tokens: int, pairs: float, sequences: int, context: int, uneven: float = 1.0) -> float:
        """Return the seconds of a step with `tokens` of prompts and `sequences` that decode."""
        chunks = min(self.pp, math.ceil(tokens * uneven / self.chunk))
        n, attention = tokens / chunks, 0.0
        if sequences:
            _, values = self._rows.get(sequences) or self._row(sequences)
            attention = self.decode(sequences, context)[0] - values[0] + self._drafting(sequences)
            verified = sequences * (1 + self.drafted) / min(self.pp, sequences)
            uneven = (n * uneven + verified) / (n + verified)
            n += verified
        a, b = self._per_tokens(n, uneven)
        return a + b * pairs / chunks + attention


MOST_SLOTS = 1024
"""Engines' limit on the concurrent requests of an attention group."""


@dataclass
class Copy:
    """A copy of the model under a layout, with its price tables, which are computed on first use."""

    question: ServingQuestion
    layout: ServingLayout
    weights: str
    pricing: ServingPrice
    cache_tokens: int = 0
    missing: str = ""
    """Why it cannot serve; empty: it can."""
    _table: Tabulated | None = None
    _decoding: dict[int, float] = field(default_factory=dict)
    together: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Chunk -> the result of `prompts_together` (pairs.py)."""

    def __post_init__(self) -> None:
        q = self.question
        self.cache_tokens = self.pricing.cache_tokens(self.layout, q.input + q.output)
        room = self.cache_tokens // self.layout.attention_dp
        if self.cache_tokens <= 0:
            held = self.pricing.weight_bytes(self.layout)
            self.missing = f"weights take {held / GIB:.1f} of {self.pricing.room(self.layout)}"
        elif room < q.longest:
            self.missing = f"its cache holds {room:,} tokens, the longest request {q.longest:,}"

    @cached_property
    def most(self) -> int:
        """Concurrent requests of mean length whose caches fit."""
        q = self.question
        return min(self.cache_tokens // (q.input + q.output), (q.slots or MOST_SLOTS) * self.layout.attention_dp)

    @property
    def prompt_slots(self) -> int:
        """The most concurrent requests of a prefill worker, which engines limit by the cache."""
        return max(1, min(self.cache_tokens // self.question.input, MOST_SLOTS * self.layout.attention_dp))

    def table(self, step_tokens: int) -> Tabulated:
        """Return the price table of steps of at most `step_tokens` of an attention group."""
        if self._table is None:
            q, x = self.question, self.layout
            # Each step reads the adapters of its requests, a part on each rank of tp.
            read = q.adapter_slots * adapter_bytes(q.model) / x.tp / q.cluster.device.memory_bandwidth_bytes_per_s

            def seconds(tokens: Any, past: Any, sequences: Any, context: Any, uneven: float, each: int) -> Any:
                return self.pricing.seconds(x, tokens, past, sequences, context, uneven, each) + read

            most = max(step_tokens, *q.chunks)
            self._table = Tabulated(
                seconds, max(1, self.most), q.longest, most, x.pp, x.attention_dp, q.draft_tokens, self.draft_s
            )
        return self._table.with_chunk(step_tokens)

    def draft_s(self, sequences: float) -> float:
        """Return the seconds of drafting for a number of sequences, one token after the other: a token is a pass
        through one block, as with EAGLE and multi-token prediction (Li et al. 2024; DeepSeek-V3), and the head."""
        q = self.question
        if not q.draft_tokens or not sequences:
            return 0.0
        parts = self.pricing.parts(self.layout, 0, 0, sequences, sequences * (q.input + q.output / 2))
        head = float(parts["head"])
        blocks = float(sum(parts.values())) - head - float(parts["host"])
        return q.draft_tokens * (blocks / q.model.layers + head)

    def prompts_at_once(self, step_tokens: int) -> int:
        """Return the most prompts of mean length in a step of all attention groups."""
        q = self.question
        each = step_tokens * self.layout.pp // (q.input - int(q.input * q.reuse))
        return max(1, each) * self.layout.attention_dp

    def prefill_s(self, step_tokens: int, prompts: int = 1) -> float:
        """Return the seconds of all steps of `prompts` that are computed together, without decoding."""
        q, groups = self.question, self.layout.attention_dp
        table = self.table(step_tokens)
        prompt = q.input - int(q.input * q.reuse)
        busiest = -(-prompts // groups) * prompt  # tokens of a group: prompts are dealt in turn
        chunks = -(-busiest // (step_tokens * self.layout.pp))
        tokens = -(-prompts * prompt // chunks)
        pairs = prompts * prompt * (q.input - prompt + (prompt + 1) / 2) / chunks
        step = table.mixed(tokens, pairs, 0, 0, busiest * groups / (prompts * prompt))
        return (chunks + self._behind(-(-busiest // chunks), step_tokens)) * step

    def _behind(self, tokens: int, step_tokens: int) -> float:
        """Return the steps by which the last chunk of `tokens` leaves the pipeline after the first."""
        pp = self.layout.pp
        return (min(pp, -(-tokens // step_tokens)) - 1) / pp

    def decode_s(self, batch: int) -> float:
        """Return the seconds per token of a sequence in a decoding batch, at the mean context."""
        if batch not in self._decoding:
            q = self.question
            step = self.table(max(q.chunks)).decode(batch, int(batch * (q.input + q.output / 2)))[0]
            self._decoding[batch] = step / (Speculation(q.draft_tokens, q.acceptance).mean if q.draft_tokens else 1.0)
        return self._decoding[batch]

    def steady(self, batch: int, step_tokens: int) -> SteadyEstimate:
        """Return the steady state of a closed loop of `batch` requests on this copy, which prefills and decodes."""
        q, table = self.question, self.table(step_tokens)
        prompt = q.input - int(q.input * q.reuse)
        decoding = batch - 1 if q.engine.mixed else 0
        groups = self.layout.attention_dp
        room = max(1, step_tokens * self.layout.pp - decoding * (1 + q.draft_tokens) // groups)
        chunks = -(-prompt // room)
        pairs = prompt * (q.input - prompt + (prompt + 1) / 2) / chunks
        context = int(decoding * (q.input + q.output / 2))
        # Prompts of the other groups, if there are any, are computed in the same step.
        sharing = min(groups, max(1, batch // 4))
        step = table.mixed(-(-prompt // chunks) * sharing, pairs * sharing, decoding, context, groups / sharing)
        prompt_s = chunks * step
        # The other sequences decode in the same step, so a part of it is not the prompt's.
        computed = (prompt_s - chunks * table.decode(decoding, context)[0] if decoding else prompt_s) / sharing
        busy = max(computed, 0.0) + q.output * self.decode_s(batch) / batch
        share = min(max(computed, 0.0) / busy, 0.95) if batch > 1 else 0.0
        ttft = (
            prompt_s
            + step * self._behind(-(-prompt // chunks), step_tokens)
            + (0.5 * step if batch > 1 else 0.0)
            + prompt_s * share / (2 * (1 - share))
        )
        tpot = max(batch * busy - ttft, 0.0) / (q.output - 1) if q.output > 1 else 0.0
        return SteadyEstimate(ttft + self.way_s(tpot), tpot, q.output / busy)

    def way_s(self, tpot: float) -> float:
        """Return the seconds from computing a first token to its receipt by the user (serving/cost/engines.py)."""
        seconds, steps = self.pricing.constants.way(self.question.input, self.layout.attention_dp)
        return seconds + min(steps, self.question.output - 1) * tpot
