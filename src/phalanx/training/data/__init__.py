"""From texts or token files to batches.

    texts.py     files of text and JSON lines, as a stream of documents
    encode.py    texts to token ids, by an existing tokenizer or one trained on them
    ids.py       files of token ids: flat, and Megatron's pair
    tokens.py    the tokens of a run: memory-mapped, counted, with the boundaries of documents
    whole.py     sequences of whole documents

Tokens are identified by a digest of their content, never by a path: a run resumes on the same tokens or not at all.

Batches are windows of the token stream, in an order drawn from (seed, epoch). The batch of a step depends on (seed,
step) alone, never on the layout, so every strategy and every resumed run sees the same sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Train
from phalanx.training.data import encode, ids
from phalanx.training.data.texts import SHIPPED, find_texts
from phalanx.training.data.tokens import TokenSet as TokenSet
from phalanx.training.data.whole import Way
from phalanx.training.data.whole import WholeDocuments as WholeDocuments


@dataclass(frozen=True)
class Batches:
    """Sequences of seq + 1 tokens: inputs and, shifted by one, targets. Each epoch cuts the tokens at a new offset
    into windows and shuffles them, both drawn from (seed, epoch). `documents`: starts of documents, ascending, if
    attention must stay inside documents."""

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


def batches(
    tokens: npt.NDArray[np.integer], starts: Callable[[], npt.NDArray[np.int64]], job: Job, seed: int
) -> Batches | WholeDocuments:
    """Return the sequences of a job's steps. `starts` returns where documents begin; it is called only if the job
    keeps documents apart. Raises InputError if there are too few tokens."""
    if job.batch_rows == 3:
        return WholeDocuments(tokens, job.seq, job.global_batch, seed, starts(), cast(Way, job.documents))
    return Batches(tokens, job.seq, job.global_batch, seed, starts() if job.separate else None)


def prepare(train: Train, vocab: int, cache: Path, announce: Callable[[str], None] = lambda _: None) -> TokenSet:
    """Return the tokens that `train.data` names, encoded once and cached by content.

    Texts (the shipped corpus, a text file, JSON lines, a folder of both; .xz and .gz too) are encoded with
    `train.tokenizer`, or with a byte-level BPE of at most `vocab` entries trained on them. Files of token ids stay
    where they are. Raises InputError if they cannot be read or do not fit `vocab`.
    """
    path, tokenizer = Path(train.data), encode.load(train, vocab)
    if train.data != SHIPPED:
        if (index := ids.megatron_index(path)) is not None:
            return ids.from_megatron(index, tokenizer, vocab, cache, announce)
        if ids.is_flat(path):
            return ids.from_flat(path, train, tokenizer, vocab, cache, announce)
    return encode.from_texts(
        find_texts(train.data, tokenizer.path, announce), train, tokenizer, vocab, cache, announce
    )


def holds_ids(data: str) -> bool:
    """Whether `train.data` names files of token ids, as opposed to texts that must be encoded."""
    return data != SHIPPED and (ids.megatron_index(Path(data)) is not None or ids.is_flat(Path(data)))


def require_documents(tokens: TokenSet, how: str = "separate") -> None:
    """Require that the training tokens have document boundaries, and that our trainer supports `how` (a value of
    job.documents). Raises InputError."""
    if how == "dynamic":
        reason = "is planned, and exported to Megatron-LM; our trainer has no context parallelism of changing width"
        raise InputError("job.documents", how, reason, "use balanced")
    if len(tokens.training_starts()) < 2:
        raise InputError(
            "job.documents",
            how,
            "no end-of-text separates documents in the training tokens of train.data",
            "name it in train.end_of_text, or use packed",
        )
