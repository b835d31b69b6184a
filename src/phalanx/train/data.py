"""From text to batches: a corpus, its byte-pair encoding, memory-mapped tokens, and an order of samples.

The batch of a step depends on (seed, step) alone, never on the layout, so every strategy and every resumed run
sees the same sequences.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError

HELD_OUT = 0.05  # the last share of the tokens, for validation
SHIPPED = "austen"
VERSION = 1  # of the cached form


@dataclass(frozen=True)
class TokenSet:
    """Tokenised text on disk. `unigram_entropy` is that of the training tokens, in nats."""

    folder: Path
    vocab: int
    train_tokens: int
    validation_tokens: int
    unigram_entropy: float

    @property
    def digest(self) -> str:
        """Of the text, the size of its encoding, and the form in which it is cached."""
        return self.folder.name

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    def training(self) -> npt.NDArray[np.integer]:
        return np.load(self.folder / "tokens.npy", mmap_mode="r")[: self.train_tokens]  # type: ignore[no-any-return]

    def validation(self) -> npt.NDArray[np.integer]:
        return np.load(self.folder / "tokens.npy", mmap_mode="r")[self.train_tokens :]  # type: ignore[no-any-return]


def read_text(data: str) -> str:
    """The shipped corpus (`austen`), a text file (plain or .xz), or a folder of .txt files in order of name."""
    if data == SHIPPED:
        with resources.files("phalanx.data").joinpath("austen.txt.xz").open("rb") as file:
            return lzma.decompress(file.read()).decode()
    path = Path(data)
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".xz") and f.is_file())
        if not files:
            raise InputError("train.data", data, "holds no .txt file")
    elif path.is_file():
        files = [path]
    else:
        raise InputError("train.data", data, "no such file or folder", f"or use the shipped corpus {SHIPPED!r}")
    try:
        text = "\n".join(
            lzma.decompress(f.read_bytes()).decode() if f.suffix == ".xz" else f.read_text() for f in files
        )
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise InputError("train.data", data, f"cannot be read as UTF-8 text ({error})") from None
    if not text.strip():
        raise InputError("train.data", data, "is empty")
    return text


def prepare(data: str, vocab: int, cache: Path) -> TokenSet:
    """Tokenise a corpus with a byte-level BPE of at most `vocab` entries trained on it; cached by content.

    Raises InputError where the text cannot be read.
    """
    text = read_text(data)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = cache / "tokens" / f"{digest}-{vocab}-v{VERSION}"
    if not (folder / "about.json").exists():
        if vocab < 257:
            raise InputError(
                "model.vocab", vocab, "a byte-level encoding needs 256 bytes and an end-of-text", "use at least 257"
            )
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _tokenise(text, vocab, part)
        try:
            os.replace(part, folder)
        except OSError:  # another process was first
            shutil.rmtree(part, ignore_errors=True)
    about = json.loads((folder / "about.json").read_text())
    return TokenSet(folder, **about)


def _tokenise(text: str, vocab: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Whole paragraphs, so that no word is cut and memory stays small.
    pieces = text.split("\n\n")
    pieces = [p + "\n\n" for p in pieces[:-1]] + pieces[-1:]
    tokenizer.train_from_iterator(pieces, trainer)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(pieces)]
    size = tokenizer.get_vocab_size()
    tokens = np.concatenate([np.array(i, dtype=np.uint16 if size <= 2**16 else np.uint32) for i in ids if i])
    np.save(folder / "tokens.npy", tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    train = len(tokens) - int(len(tokens) * HELD_OUT)
    counts = np.bincount(tokens[:train])
    p = counts[counts > 0] / train
    about = {
        "vocab": size,
        "train_tokens": train,
        "validation_tokens": len(tokens) - train,
        "unigram_entropy": float(-(p * np.log(p)).sum()),
    }
    (folder / "about.json").write_text(json.dumps(about))


@dataclass(frozen=True)
class Batches:
    """Sequences of seq + 1 tokens: inputs and, shifted by one, targets.

    Each epoch cuts the tokens at a new offset into windows and shuffles them, both drawn from (seed, epoch).
    """

    tokens: npt.NDArray[np.integer]
    seq: int
    global_batch: int
    seed: int

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
        """Windows per epoch, whatever the offset."""
        return (len(self.tokens) - self.seq - 1) // self.seq

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        """Where each sequence of a step's global batch begins."""
        index = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        epochs, places = index // self.windows, index % self.windows
        out = np.empty_like(index)
        for epoch in np.unique(epochs):
            offset, order = _epoch(self.seed, int(epoch), self.seq, self.windows)
            here = epochs == epoch
            out[here] = order[places[here]] * self.seq + offset
        return out

    def share(self, step: int, replica: int, replicas: int, micro_batch: int) -> list[npt.NDArray[np.int64]]:
        """The micro-batches of one data-parallel replica in a step, each (micro_batch, seq + 1)."""
        mine = self.starts(step).reshape(replicas, -1, micro_batch)[replica]
        return [take(self.tokens, starts, self.seq) for starts in mine]


def take(tokens: npt.NDArray[np.integer], starts: npt.NDArray[np.int64], seq: int) -> npt.NDArray[np.int64]:
    """(sequences, seq + 1) token ids."""
    return tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int64)  # type: ignore[no-any-return]


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, seq: int, windows: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Offset and order of an epoch's windows."""
    generator = np.random.Generator(np.random.Philox(key=(seed << 64) + epoch))
    return int(generator.integers(seq)), generator.permutation(windows)


def validation_windows(tokens: npt.NDArray[np.integer], seq: int, limit: int) -> npt.NDArray[np.int64]:
    """Starts of held-out sequences, spread evenly over the held-out text; `limit` of them (0: all)."""
    count = max((len(tokens) - 1) // seq, 0)
    chosen = np.arange(count) if not limit or limit >= count else np.linspace(0, count - 1, limit).astype(int)
    return (chosen * seq).astype(np.int64)
