"""From texts or token files to batches.

    texts.py     files of text and JSON lines, as a stream of documents
    tokenizer.py an existing tokenizer.json, opened and checked
    encode.py    texts to token ids, by an existing tokenizer or one trained on them
    ids.py       files of token ids: flat, and Megatron's pair
    tokens.py    the tokens of a run: memory-mapped, counted, with the boundaries of documents
    batches.py   which tokens each step sees

Tokens are identified by a digest of their content, never by a path: a run resumes on the same tokens or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.spec.errors import InputError
from phalanx.spec.job import Train
from phalanx.training.data import encode, ids
from phalanx.training.data.batches import Batches as Batches
from phalanx.training.data.batches import take as take
from phalanx.training.data.batches import validation_windows as validation_windows
from phalanx.training.data.texts import SHIPPED, find_texts
from phalanx.training.data.tokens import TokenSet as TokenSet


def prepare(train: Train, vocab: int, cache: Path, announce: Callable[[str], None] = lambda _: None) -> TokenSet:
    """Return the tokens that `train.data` names, encoded once and cached by content.

    Texts (the shipped corpus, a text file, JSON lines, a folder of both; .xz and .gz too) are encoded with
    `train.tokenizer`, or with a byte-level BPE of at most `vocab` entries trained on them. Files of token ids stay
    where they are. Raises InputError if they cannot be read or do not fit `vocab`.
    """
    path, tokenizer = Path(train.data), encode.load(train, vocab)
    if train.data != SHIPPED:
        if (index := ids.megatron_index(path)) is not None:
            return ids.from_megatron(index, train, tokenizer, vocab, cache, announce)
        if ids.is_flat(path):
            return ids.from_flat(path, train, tokenizer, vocab, cache, announce)
    return encode.from_texts(
        find_texts(train.data, tokenizer.path, announce), train, tokenizer, vocab, cache, announce
    )


def holds_ids(data: str) -> bool:
    """Whether `train.data` names files of token ids, as opposed to texts that must be encoded."""
    return data != SHIPPED and (ids.megatron_index(Path(data)) is not None or ids.is_flat(Path(data)))


def require_documents(tokens: TokenSet) -> None:
    """Require that document boundaries are known in the training tokens. Raises InputError."""
    if len(tokens.training_starts()) < 2:
        raise InputError(
            "job.documents",
            "separate",
            "no end-of-text separates documents in the training tokens of train.data",
            "name it in train.end_of_text, or use packed",
        )
