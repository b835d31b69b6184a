"""A step's price as tables, from which the simulation reads a step in a microsecond.

A step that decodes is tabulated over sequences and cached tokens per sequence, and linear between the points. A step
with prompts costs

    a(n) + b(n) pairs + decode(sequences, context) - decode(sequences, 0),    n = tokens of prompts and sequences

for all but attention depends on n alone, and attention over prompts on the pairs of query and key. a and b are read
off two prices of n tokens of a prompt, after nothing and after a long past. Where groups attend apart, they are read
off with the tokens spread evenly and with all in one group, and are linear between.

With speculation a step computes `1 + drafted` tokens of each sequence, and drafts before it: a pass of the draft for
each drafted token.

Under pipeline parallelism the sequences go round in pp groups, one per stage, and so do up to pp chunks of prompts: a
step of all of them takes what one group takes through all stages.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.serving.simulation.price import UNBOUNDED

Seconds = Callable[[Any, Any, Any, Any, float, int], Any]
"""(tokens of a prompt, cached tokens before them, sequences that decode, their cached tokens in sum, tokens of the
busiest group that attends apart over their mean, tokens computed of each sequence) -> s."""

_PAST = 16384  # the long past, from which attention's cost per pair is read off


def grid(most: int, ratio: float = 1.5) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return whole numbers from 1 to `most`, each about `ratio` times the last."""
    steps = int(np.ceil(np.log(max(most, 2)) / np.log(ratio)))
    return np.unique(np.rint(np.geomspace(1, max(most, 2), steps + 1)))


class Tabulated:
    """The tabulated StepPrice of one worker. `chunk`: the most tokens of an attention group in the pipeline at
    once."""

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
        """Return the same table for steps of at most `chunk` tokens of an attention group, no more than its own."""
        same = copy.copy(self)
        same.chunk = chunk * self.groups
        return same

    def _row(self, sequences: int) -> tuple[list[float], list[float]]:
        """Return (cached tokens in sum, seconds) at the points of the table, for this many sequences."""
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
        """Compute a(n) and b(n) from the price."""
        n, zero = self.tokens, np.zeros_like(self.tokens)
        short = np.asarray(seconds(n, zero, zero, zero, uneven, 1), float)
        long = np.asarray(seconds(n, zero + _PAST, zero, zero, uneven, 1), float)
        per_pair = (long - short) / (n * _PAST)
        return (short - per_pair * n * (n + 1) / 2).tolist(), per_pair.tolist()

    def _per_tokens(self, n: float, uneven: float = 1.0) -> tuple[float, float]:
        """Interpolate a(n) and b(n)."""
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
        """Return (seconds, seconds per further token of context, the context up to which that line holds)."""
        edges, values = self._rows.get(sequences) or self._row(sequences)
        i = min(bisect_right(edges, context), len(edges) - 1)
        slope = (values[i] - values[i - 1]) / (edges[i] - edges[i - 1])
        end = UNBOUNDED if i == len(edges) - 1 else math.ceil(edges[i])
        return values[i - 1] + slope * (context - edges[i - 1]), slope, end

    def _drafting(self, sequences: int) -> float:
        """Seconds of drafting for the sequences of one group of the pipeline."""
        return self._draft_s(sequences / min(self.pp, sequences)) if self.drafted else 0.0

    def mixed(self, tokens: int, pairs: float, sequences: int, context: int, uneven: float = 1.0) -> float:
        """Return the seconds of a step that computes `tokens` of prompts along with `sequences` that decode."""
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
