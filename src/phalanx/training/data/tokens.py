"""The tokens of a run on disk: memory-mapped ids, counted once, with the boundaries of documents."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.spec.documents import read_json, seal
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import write_json

Ids = npt.NDArray[np.integer]
HELD_OUT = 0.05  # the last share of the tokens, for validation
VERSION = 1  # of the cached form
_SLICE_IDS = 2**22  # ids, or bytes
_SETTLED_S = 2.0


@dataclass(frozen=True)
class TokenRange:
    """`count` ids from number `start` on, of a .npy file (which has its own type), or of a bare file of `dtype`."""

    path: Path
    dtype: str
    start: int
    count: int

    def open(self) -> Ids:
        """Memory-map the ids, (count,)."""
        if not self.count:  # an empty file cannot be mapped
            return np.empty(0, np.uint16)
        if self.path.suffix == ".npy":
            ids: Ids = np.load(self.path, mmap_mode="r")
        else:
            ids = np.memmap(self.path, self.dtype, "r")
        return ids[self.start : self.start + self.count]


@dataclass(frozen=True)
class TokenSet:
    """Training and held-out tokens. `unigram_entropy`: of the training tokens, in nats; `documents`: number of
    documents that begin in both, 1 if no boundary is known."""

    folder: Path
    parts: tuple[TokenRange, TokenRange]
    vocab: int
    unigram_entropy: float
    documents: int = 1

    @property
    def digest(self) -> str:
        """Digest of the content, of everything that turned it into tokens, and of the cache's form."""
        return self.folder.name

    @property
    def tokenizer(self) -> Path:
        """The path of tokenizer.json, which may not exist if the data were ids."""
        return self.folder / "tokenizer.json"

    @property
    def train_tokens(self) -> int:
        """The number of training tokens."""
        return self.parts[0].count

    @property
    def validation_tokens(self) -> int:
        """The number of held-out tokens."""
        return self.parts[1].count

    def training(self) -> Ids:
        """The training tokens, (train_tokens,)."""
        return self.parts[0].open()

    def validation(self) -> Ids:
        """The held-out tokens, (validation_tokens,)."""
        return self.parts[1].open()

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.load(self.folder / "documents.npy", mmap_mode="r")  # type: ignore[no-any-return]

    def training_starts(self) -> npt.NDArray[np.int64]:
        """Return where documents begin in the training tokens, ascending."""
        return self._starts[: np.searchsorted(self._starts, self.train_tokens)]

    def validation_starts(self) -> npt.NDArray[np.int64]:
        """Return where documents begin in the held-out tokens, ascending."""
        return self._starts[np.searchsorted(self._starts, self.train_tokens) :] - self.train_tokens


def split(path: Path, dtype: str, count: int) -> tuple[TokenRange, TokenRange]:
    """Divide a file: its first tokens for training, the last HELD_OUT of them held out."""
    train = count - int(count * HELD_OUT)
    return TokenRange(path, dtype, 0, train), TokenRange(path, dtype, train, count - train)


def cache_name(what: dict[str, Any], vocab: int) -> str:
    """Return the name of a cache folder, a digest of everything that determines its tokens."""
    return tokens_folder_name(hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest(), vocab)


def tokens_folder_name(digest: str, vocab: int) -> str:
    """Return the name of a cache folder of tokens."""
    return f"{digest[:16]}-{vocab}-v{VERSION}"


def content_digest(path: Path, kind: str, cache: Path, read: Callable[[], Iterable[bytes]]) -> str:
    """Return the SHA-256 of a file's content, as `read` yields it. A file is hashed once: the digest is cached with
    the file's size and time of change, as git's index does, unless the file changed so recently that it may change
    again within the clock's resolution."""
    stat = path.stat()
    memory = cache / "tokens" / "digests" / hashlib.sha256(f"{kind}:{path.absolute()}".encode()).hexdigest()[:16]
    now = {"size": stat.st_size, "changed_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    try:
        known = json.loads(memory.read_text())
        if all(known[k] == v for k, v in now.items()):
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    hashed = hashlib.sha256()
    for piece in read():
        hashed.update(piece)
    if time.time() - stat.st_mtime > _SETTLED_S:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {**now, "digest": hashed.hexdigest()})
    return hashed.hexdigest()


def cached(folder: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a cache folder's about.json. If the folder is missing or damaged, `make` fills a new one
    and returns that content; the folder then appears at once, complete."""
    if (known := _intact(folder)) is None:
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            known = make(partial)
            known["files"] = {f.name: _digest_of(f, folder) for f in partial.iterdir()}
            (partial / "about.json").write_text(json.dumps(known | {"seal": seal(known)}))
            if folder.exists():
                os.replace(folder, folder.with_name(f".damaged-{partial.name}"))
            os.replace(partial, folder)
        except OSError:
            if (known := _intact(folder)) is None:  # else another process created it first
                raise
        finally:
            for rest in (partial, folder.with_name(f".damaged-{partial.name}")):
                shutil.rmtree(rest, ignore_errors=True)
    return known


def _intact(folder: Path) -> dict[str, Any] | None:
    """Return about.json of a cache folder in which every file is as it was written; None of any other."""
    try:
        about: dict[str, Any] = read_json(folder / "about.json", "cache")
        if about.pop("seal") != seal(about):
            return None
        intact = all(_digest_of(folder / name, folder) == digest for name, digest in about["files"].items())
        return about if intact else None
    except (OSError, InputError, AttributeError, KeyError, TypeError):
        return None


def _digest_of(file: Path, folder: Path) -> str:
    return content_digest(file, "cached", folder.parents[1], lambda: _blocks(file))


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while block := opened.read(_SLICE_IDS):
            yield block


def survey(
    parts: tuple[TokenRange, TokenRange],
    vocab: int,
    end_of_text: int | None,
    folder: Path,
    starts: npt.NDArray[np.int64] | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Count all ids in one pass, and write where documents begin (`starts`, or after each `end_of_text`) to
    documents.npy in `folder`. Returns the unigram entropy, in nats, and the number of documents. Raises InputError at
    an id outside `vocab`."""
    counts = np.zeros(vocab, dtype=np.int64)
    boundaries = [np.zeros(1, dtype=np.int64)]
    done, total = 0, sum(part.count for part in parts)
    due = time.monotonic() + 10
    # Count ids, check their range, and find boundaries, piece by piece.
    for part in parts:
        tokens = part.open()
        for low in range(0, part.count, _SLICE_IDS):
            ids = np.asarray(tokens[low : low + _SLICE_IDS])
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= vocab:
                raise InputError(
                    "train.data",
                    str(part.path),
                    f"holds token {least if least < 0 else most} when read as {ids.dtype}, model.vocab is {vocab}",
                    "raise model.vocab, or name the type of the ids in train.data_dtype",
                )
            if part is parts[0]:
                counts += np.bincount(ids, minlength=vocab)
            if starts is None and end_of_text is not None:
                boundaries.append(np.flatnonzero(ids == end_of_text) + (done + 1))
            done += len(ids)
            if time.monotonic() >= due:
                announce(f"counting tokens: {done:,} of {total:,}")
                due = time.monotonic() + 10
        if starts is None and part.path != parts[1].path:
            boundaries.append(np.array([done], dtype=np.int64))  # a file of its own begins a document
    # Boundaries of documents, and the entropy of the training part.
    begins = np.unique(np.concatenate(boundaries)) if starts is None else starts
    begins = begins[begins < total]
    np.save(folder / "documents.npy", begins)
    p = counts[counts > 0] / max(1, parts[0].count)
    return {"unigram_entropy": float(-(p * np.log(p)).sum()), "documents": len(begins)}
