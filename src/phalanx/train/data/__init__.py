"""From what people have to batches: texts, token files, their tokens on disk, and an order of samples.

    texts.py     files of text and JSON lines, as a stream of documents
    tokenizer.py a tokenizer.json that people have, opened and checked
    encode.py    texts through it, or through one that is trained here
    ids.py       files that hold token ids already: flat, and Megatron's pair
    tokens.py    the tokens of a run: memory-mapped, counted, with where documents begin
    batches.py   which tokens a step sees

Tokens are known by a digest of their content, never by a path: a run is resumed on the same ones or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.spec.errors import InputError
from phalanx.spec.job import Train
from phalanx.train.data import encode, ids
from phalanx.train.data.batches import Batches as Batches
from phalanx.train.data.batches import take as take
from phalanx.train.data.batches import validation_windows as validation_windows
from phalanx.train.data.texts import SHIPPED, find_texts
from phalanx.train.data.tokens import TokenSet as TokenSet


def prepare(train: Train, vocab: int, cache: Path, announce: Callable[[str], None] = lambda _: None) -> TokenSet:
    """The tokens that `train.data` names, made once and cached by content.

    Texts (the shipped corpus, a text file, JSON lines, a folder of both; .xz and .gz too) are encoded with
    `train.tokenizer`, or with a byte-level BPE of at most `vocab` entries trained on them. Files of token ids stay
    where they are. Raises InputError where they cannot be read or do not fit `vocab`.
    """
    path, given = Path(train.data), encode.load(train, vocab)
    if train.data != SHIPPED:
        if (index := ids.megatron_index(path)) is not None:
            return ids.from_megatron(index, train, given, vocab, cache, announce)
        if ids.is_flat(path):
            return ids.from_flat(path, train, given, vocab, cache, announce)
    return encode.from_texts(find_texts(train.data, given.path, announce), train, given, vocab, cache, announce)


def holds_ids(data: str) -> bool:
    """Whether `train.data` names token ids, and no texts that have to be encoded."""
    return data != SHIPPED and (ids.megatron_index(Path(data)) is not None or ids.is_flat(Path(data)))


def require_documents(tokens: TokenSet) -> None:
    """That it is known where documents begin in the training tokens: a second file begins one too, but only there.
    Raises InputError."""
    if len(tokens.training_starts()) < 2:
        raise InputError(
            "job.documents",
            "separate",
            "no end-of-text separates documents in the training tokens of train.data",
            "name it in train.end_of_text, or use packed",
        )
