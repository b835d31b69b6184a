"""Texts to token ids: with an existing tokenizer.json, checked against the model's vocabulary, or a byte-level BPE
trained on the texts themselves.

Documents are separated by the tokenizer's end-of-text, if it has one. Ids are streamed to disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError
from phalanx.spec.job import Train
from phalanx.training.data.texts import TextFile, documents, join_chunks, paragraphs
from phalanx.training.data.tokens import (
    TokenSet,
    cache_name,
    cached,
    content_digest,
    split,
    survey,
    tokens_folder_name,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")


def open_tokenizer(path: Path, vocab: int, field: str) -> Tokenizer:
    """Open a tokenizer, without truncation and padding. Raises InputError, about `field`, if the file cannot be read,
    is not a tokenizer.json, or has a token whose id is not below `vocab`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = guarded(lambda: Tokenizer.from_buffer(read_text(path, field).encode()), path, field)
    except InputError:
        raise
    except Exception as error:  # the library raises nothing more special
        raise InputError(field, str(path), f"is not a tokenizer.json ({error})") from None
    _require_steady(tokenizer, path, field)
    size = max(tokenizer.get_vocab_size(), max(tokenizer.get_vocab().values(), default=-1) + 1)
    if size > vocab:
        reason = f"has {size} entries, model.vocab is {vocab}"
        raise InputError(field, str(path), reason, "use the model's own tokenizer, or raise model.vocab")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def guarded(work: Callable[[], T], path: Path, field: str) -> T:
    """Return `work()`, a call of a tokenizer from a file that a stranger may have written. If the library panics (on
    a pattern with too many ways to match), its trace stays off stderr. Raises InputError."""
    sys.stderr.flush()
    shown, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        return work()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of no module that can be imported
            raise
        raise InputError(field, str(path), f"fails on the text ({error})") from None
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nowhere)


_MOST_GROWTH, _MOST_STEPS = 64, 64
"""Largest factor by which a tokenizer may lengthen a text, and number of its steps; models' tokenizers need 2 and
8."""


def _require_steady(tokenizer: Tokenizer, path: Path, field: str) -> None:
    """Require that a tokenizer's rewriting of text is bounded: forty steps that each double a text would fill any
    memory. Raises InputError."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    steps = list(chain.from_iterable(_steps(json.loads(part.__getstate__())) for part in parts if part is not None))
    growth = math.prod(map(_growth, steps))
    if growth > _MOST_GROWTH or len(steps) > _MOST_STEPS:
        reason = f"rewrites text in {len(steps):,} steps, which may make it {min(growth, 1e18):,.0f} times as long"
        raise InputError(field, str(path), reason, f"at most {_MOST_STEPS} and {_MOST_GROWTH} are run")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a tokenizer's part (its JSON), a sequence's one by one."""
    inner = [step for value in part.values() if isinstance(value, list) for step in value if isinstance(step, dict)]
    yield from chain.from_iterable(map(_steps, inner)) if inner else [part]


def _growth(step: dict[str, Any]) -> float:
    """Return about the factor by which a step may lengthen a text."""
    if step.get("type") == "Replace":
        return max(1.0, len(step["content"]) / max(1, len(step["pattern"].get("String", ""))))
    return {"ByteLevel": 2.0, "Precompiled": 8.0}.get(str(step.get("type")), 1.0)


END_OF_TEXT = "<|endoftext|>"
NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
"""Names of the end-of-text token in common tokenizers."""
_TOGETHER = 2**20  # characters that are encoded at once, on all cores
_LEARNED_FROM = 2**27  # characters that a BPE is trained on, at most


@dataclass(frozen=True)
class TokenizerChoice:
    """The tokenizer that a job names: its file, the digest of its content, and the id that separates documents."""

    path: Path | None
    digest: str | None
    end_of_text: int | None


def load(train: Train, vocab: int) -> TokenizerChoice:
    """Check the tokenizer of `train.tokenizer` (a file, or a folder that holds tokenizer.json) and the end-of-text
    against the model's vocabulary. Raises InputError."""
    end = train.end_of_text
    if isinstance(end, int) and not 0 <= end < vocab:
        raise InputError("train.end_of_text", end, f"is not an id of model.vocab = {vocab}")
    if not train.tokenizer:
        if isinstance(end, str) and end and end != END_OF_TEXT:
            raise InputError("train.end_of_text", end, "needs a train.tokenizer that knows it", "or give its id")
        return TokenizerChoice(None, None, end if isinstance(end, int) else None)
    path = Path(train.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = open_tokenizer(path, vocab, "train.tokenizer")
    end_id: int | None = end if isinstance(end, int) else None
    if isinstance(end, str):
        names = (end,) if end else NAMES
        end_id = next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)
        if end and end_id is None:
            raise InputError("train.end_of_text", end, f"is not a token of {path}")
    return TokenizerChoice(path, hashlib.sha256(path.read_bytes()).hexdigest(), end_id)


def from_texts(
    files: list[TextFile],
    train: Train,
    choice: TokenizerChoice,
    vocab: int,
    cache: Path,
    announce: Callable[[str], None],
) -> TokenSet:
    """Encode texts with the given tokenizer, or one trained on them; cached by content. Raises InputError."""
    if choice.path is None and isinstance(train.end_of_text, int):
        raise InputError("train.end_of_text", train.end_of_text, "the tokenizer is trained here", "leave it out")
    field = train.text_field
    of_files = [[f.json_lines, content_digest(f.path, "text", cache, _bytes_of(f))] for f in files]
    if not any(chunk.strip() for f in files for chunk in f.chunks()):
        raise InputError("train.data", train.data, "is empty")
    # The cache's name: a digest of everything that determines the ids.
    if choice.path is None and len(files) == 1 and not files[0].json_lines:
        name = tokens_folder_name(str(of_files[0][1]), vocab)
    else:
        what = {"texts": of_files, "tokenizer": choice.digest, "end": choice.end_of_text}
        name = cache_name(what | ({"field": field} if any(json_lines for json_lines, _ in of_files) else {}), vocab)
    folder = cache / "tokens" / name

    def make(target: Path) -> dict[str, Any]:
        end: int | None
        if choice.path is None:
            texts = chain.from_iterable(map(paragraphs, documents(files, field)))
            tokenizer, end, cut = _train(texts, vocab), 0, paragraphs
        else:
            tokenizer = open_tokenizer(choice.path, vocab, "train.tokenizer")
            end, cut = choice.end_of_text, join_chunks
            if end is None and (len(files) > 1 or files[0].json_lines):
                announce("note: no end-of-text between documents, the tokenizer has none; see train.end_of_text")
        tokenizer.save(str(target / "tokenizer.json"))
        size = max(tokenizer.get_vocab_size(), max(tokenizer.get_vocab().values()) + 1, (end or 0) + 1)
        dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
        pieces = ((piece, first) for d in documents(files, field) for piece, first in _first_marked(cut(d)))
        count = _encode(tokenizer, pieces, end, target / "tokens.npy", dtype, announce)
        about = survey(split(target / "tokens.npy", "", count), size, end, target, announce=announce)
        return about | {"vocab": size, "tokens": count}

    # Encode once; later runs find the folder.
    about = cached(folder, make)
    parts = split(folder / "tokens.npy", "", about["tokens"])
    return TokenSet(folder, parts, about["vocab"], about["unigram_entropy"], about["documents"])


def _bytes_of(file: TextFile) -> Callable[[], Iterator[bytes]]:
    return lambda: (chunk.encode() for chunk in file.chunks())


def _first_marked(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a document that are not empty, and whether each is the first."""
    first = True
    for piece in pieces:
        if piece:
            yield piece, first
            first = False


def _train(pieces: Iterator[str], vocab: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 257:
        raise InputError(
            "model.vocab", vocab, "a byte-level encoding needs 256 bytes and an end-of-text", "use at least 257"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Train on the first characters of the texts alone.
    left = _LEARNED_FROM

    def some() -> Iterator[str]:
        nonlocal left
        for piece in pieces:
            if left <= 0:
                return
            left -= len(piece)
            yield piece

    tokenizer.train_from_iterator(some(), trainer)
    return tokenizer


def _encode(
    tokenizer: Tokenizer,
    pieces: Iterator[tuple[str, bool]],
    end_of_text: int | None,
    path: Path,
    dtype: np.dtype[Any],
    announce: Callable[[str], None],
) -> int:
    """Write the ids of all pieces as a .npy file and return their number. `end_of_text` goes before every document
    but the first."""
    count, number, due = 0, 0, time.monotonic() + 10
    end = [] if end_of_text is None else [end_of_text]
    with path.open("wb") as file:
        _write_header(file, dtype, 0)
        while batch := list(_next_pieces(pieces)):
            # The tokenizer adds no special tokens of its own; those spelled out in a text are recognised.
            texts = [piece for piece, _ in batch]
            encode = partial(tokenizer.encode_batch_fast, texts, add_special_tokens=False)
            encoded = guarded(encode, path, "train.tokenizer")
            for (_, first), encoding in zip(batch, encoded, strict=True):
                here = [*end, *encoding.ids] if first and number else encoding.ids
                number += first
                file.write(np.array(here, dtype=dtype).tobytes())
                count += len(here)
            if time.monotonic() >= due:
                announce(f"tokenising: {count:,} tokens of {number:,} documents")
                due = time.monotonic() + 10
        file.seek(0)
        _write_header(file, dtype, count)
    return count


def _next_pieces(pieces: Iterator[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Yield the next pieces, up to _TOGETHER characters in total."""
    size = 0
    for piece in pieces:
        yield piece
        size += len(piece[0])
        if size >= _TOGETHER:
            return


def _write_header(file: Any, dtype: np.dtype[Any], count: int) -> None:
    """Write a .npy header. NumPy pads it so that the first axis may grow: another count has the same length."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
