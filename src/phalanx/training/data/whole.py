"""Sequences of whole documents: packed by first-fit or one each, padded, dealt to replicas as they come or by cost.

A row has seq + 1 places, inputs and, shifted by one, targets; a longer document is cut. Documents lie one after
another; padding is of documents of one token. Targets are those inside documents: the first token of a document and
padding are no targets (-1).

Documents are packed once, in an order drawn from the seed; each epoch shuffles the sequences, so that the batch of a
step depends on (seed, step) alone.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.schedule.packing import Ints, deal, first_fit

Way = Literal["whole", "balanced", "padded"]


@dataclass(frozen=True)
class WholeDocuments:
    """Sequences of the documents that begin at `starts`, ascending, and end where the next begins."""

    tokens: npt.NDArray[np.integer]
    seq: int
    global_batch: int
    seed: int
    starts: npt.NDArray[np.int64]
    way: Way

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each document that a sequence holds, (documents,)."""
        ends = np.append(self.starts[1:], len(self.tokens))
        return np.minimum(ends - self.starts, self.seq + 1)

    @cached_property
    def sequences(self) -> list[Ints]:
        """The numbers of the documents in each sequence."""
        order = self._random(0).permutation(len(self.starts))
        order = order[self.lengths[order] > 0]
        if self.way == "padded":
            return list(order[:, None])
        place = first_fit(self.lengths[order], self.seq + 1)
        by_place = np.argsort(place, kind="stable")
        return np.split(order[by_place], np.flatnonzero(np.diff(place[by_place])) + 1)

    def _random(self, epoch: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=(self.seed << 64) + epoch))

    def step_sequences(self, step: int) -> Ints:
        """Return the numbers of the sequences in a step's global batch, (global_batch,)."""
        count = len(self.sequences)
        index = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        orders = {epoch: self._random(1 + epoch).permutation(count) for epoch in np.unique(index // count).tolist()}
        return np.array([orders[i // count][i % count] for i in index.tolist()])

    def attention(self, sequences: Ints) -> npt.NDArray[np.float64]:
        """Return a number proportional to the pairs of tokens in each sequence's attention, (sequences,)."""
        return np.array([float((self.lengths[self.sequences[i]] ** 2).sum()) for i in sequences.tolist()])

    def share(self, step: int, replica: int, replicas: int, micro_batch: int) -> list[npt.NDArray[np.int64]]:
        """Return the micro-batches of a data-parallel replica, each (3, micro_batch, seq + 1): ids, places in
        documents, targets."""
        chosen = self.step_sequences(step)
        if self.way == "balanced":  # sequences of like cost share a micro-batch
            chosen = chosen[np.argsort(-self.attention(chosen), kind="stable")]
            groups = chosen.reshape(-1, micro_batch)
            costs = self.attention(chosen).reshape(groups.shape).sum(axis=1)
            mine = groups[deal(costs[None], replicas, True)[0, :, replica]]
        else:
            mine = chosen.reshape(replicas, -1, micro_batch)[replica]
        return [np.stack([self.row(i) for i in group.tolist()], axis=1) for group in mine]

    def row(self, sequence: int) -> npt.NDArray[np.int64]:
        """Return a sequence, (3, seq + 1): ids, places, targets."""
        out = np.zeros((3, self.seq + 1), dtype=np.int64)
        at = 0
        for document in self.sequences[sequence].tolist():
            start, length = int(self.starts[document]), int(self.lengths[document])
            out[0, at : at + length] = self.tokens[start : start + length]
            out[1, at : at + length] = np.arange(length)
            at += length
        out[2] = np.where(out[1] > 0, out[0], -1)
        return out

    def targets(self, step: int) -> int:
        """Return the number of targets of a step's global batch."""
        return sum(int((self.lengths[self.sequences[i]] - 1).sum()) for i in self.step_sequences(step).tolist())
