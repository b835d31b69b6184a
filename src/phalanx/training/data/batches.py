"""Batches of training: windows of the token stream, in an order drawn from (seed, epoch).

The batch of a step depends on (seed, step) alone, never on the layout, so every strategy and every resumed run
sees the same sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class Batches:
    """Sequences of seq + 1 tokens: inputs and, shifted by one, targets.

    Each epoch cuts the tokens at a new offset into windows and shuffles them, both drawn from (seed, epoch).
    `documents`: starts of documents, ascending, if attention must stay inside documents.
    """

    tokens: npt.NDArray[np.integer]
    seq: int
    global_batch: int
    seed: int
    documents: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise InputError(
                "job.seq",
                self.seq,
                f"needs {2 * self.seq + 1} training tokens, there are {len(self.tokens)}",
                "use more text or a shorter seq",
            )

    @property
    def windows(self) -> int:
        """The number of windows in an epoch, for any offset."""
        return (len(self.tokens) - self.seq - 1) // self.seq

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        """Return where each sequence of a step's global batch begins, (global_batch,)."""
        index = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        epochs, places = index // self.windows, index % self.windows
        out = np.empty_like(index)
        for epoch in np.unique(epochs):
            offset, order = _epoch(self.seed, int(epoch), self.seq, self.windows)
            here = epochs == epoch
            out[here] = order[places[here]] * self.seq + offset
        return out

    def share(self, step: int, replica: int, replicas: int, micro_batch: int) -> list[npt.NDArray[np.int64]]:
        """Return the micro-batches of one data-parallel replica in a step, each as returned by `take`."""
        mine = self.starts(step).reshape(replicas, -1, micro_batch)[replica]
        return [take(self.tokens, starts, self.seq, self.documents) for starts in mine]


def take(
    tokens: npt.NDArray[np.integer],
    starts: npt.NDArray[np.int64],
    seq: int,
    documents: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Return token ids (sequences, seq + 1), int64. With `documents` (starts of documents): (2, sequences, seq + 1),
    ids and the position of each token in its document, counted from the document's start or the sequence's."""
    places = starts[:, None] + np.arange(seq + 1)
    ids: npt.NDArray[np.int64] = tokens[places].astype(np.int64)
    if documents is None:
        return ids
    count = np.searchsorted(documents, places, "right")  # number of documents that begin at or before each place
    begins = np.zeros_like(places)
    begins[count > 0] = documents[count[count > 0] - 1]  # without a copy of `documents`, maybe a large mapped file
    return np.stack([ids, places - np.maximum(begins, starts[:, None])])


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, seq: int, windows: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Draw (offset, order) of an epoch's windows."""
    generator = np.random.Generator(np.random.Philox(key=(seed << 64) + epoch))
    return int(generator.integers(seq)), generator.permutation(windows)


def validation_windows(tokens: npt.NDArray[np.integer], seq: int, limit: int) -> npt.NDArray[np.int64]:
    """Return the starts of `limit` (0: all) held-out sequences, spread evenly over the held-out tokens."""
    count = max((len(tokens) - 1) // seq, 0)
    chosen = np.arange(count) if not limit or limit >= count else np.linspace(0, count - 1, limit).astype(int)
    return (chosen * seq).astype(np.int64)
