"""The tokens of a run on disk: memory-mapped ids, counted once, with where documents begin."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import write_json

Ids = npt.NDArray[np.integer]
HELD_OUT = 0.05  # the last share of the tokens, for validation
VERSION = 1  # of the cached form
_AT_ONCE = 2**22  # ids
_SETTLED_S = 2.0


@dataclass(frozen=True)
class Stretch:
    """`count` ids from number `start` on, of a .npy file (which tells its type), or of a bare one of `dtype`."""

    path: Path
    dtype: str
    start: int
    count: int

    def open(self) -> Ids:
        if not self.count:  # an empty file cannot be mapped
            return np.empty(0, np.uint16)
        if self.path.suffix == ".npy":
            found: Ids = np.load(self.path, mmap_mode="r")
        else:
            found = np.memmap(self.path, self.dtype, "r")
        return found[self.start : self.start + self.count]


@dataclass(frozen=True)
class TokenSet:
    """Training and held-out tokens. `unigram_entropy` is that of the training tokens, in nats; `documents`: how many
    begin in both, 1 where no boundary is known."""

    folder: Path
    parts: tuple[Stretch, Stretch]
    vocab: int
    unigram_entropy: float
    documents: int = 1

    @property
    def digest(self) -> str:
        """Of the content, of everything that made tokens of it, and of the form in which they are cached."""
        return self.folder.name

    @property
    def tokenizer(self) -> Path:
        """tokenizer.json; there is none where ids were given without one."""
        return self.folder / "tokenizer.json"

    @property
    def train_tokens(self) -> int:
        return self.parts[0].count

    @property
    def validation_tokens(self) -> int:
        return self.parts[1].count

    def training(self) -> Ids:
        return self.parts[0].open()

    def validation(self) -> Ids:
        return self.parts[1].open()

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.load(self.folder / "documents.npy", mmap_mode="r")  # type: ignore[no-any-return]

    def training_starts(self) -> npt.NDArray[np.int64]:
        """Where documents begin in the training tokens, ascending."""
        return self._starts[: np.searchsorted(self._starts, self.train_tokens)]

    def validation_starts(self) -> npt.NDArray[np.int64]:
        """Where documents begin in the held-out tokens."""
        return self._starts[np.searchsorted(self._starts, self.train_tokens) :] - self.train_tokens


def split(path: Path, dtype: str, count: int) -> tuple[Stretch, Stretch]:
    """A file's first tokens for training, its last ones held out."""
    train = count - int(count * HELD_OUT)
    return Stretch(path, dtype, 0, train), Stretch(path, dtype, train, count - train)


def key(what: dict[str, Any], vocab: int) -> str:
    """The digest of everything that determines tokens."""
    return named(hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest(), vocab)


def named(digest: str, vocab: int) -> str:
    return f"{digest[:16]}-{vocab}-v{VERSION}"


def content_digest(path: Path, kind: str, cache: Path, read: Callable[[], Iterable[bytes]]) -> str:
    """SHA-256 of all of a file's content, as `read` gives it.

    A large file is hashed once: the digest is kept beside the file's size and time of change, as git's index does,
    unless the file changed so recently that it may change again within the clock's grain.
    """
    seen = path.stat()
    memory = cache / "tokens" / "digests" / hashlib.sha256(f"{kind}:{path.absolute()}".encode()).hexdigest()[:16]
    now = {"size": seen.st_size, "changed_ns": seen.st_mtime_ns, "inode": seen.st_ino}
    try:
        known = json.loads(memory.read_text())
        if all(known[k] == v for k, v in now.items()):
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    hashed = hashlib.sha256()
    for piece in read():
        hashed.update(piece)
    if time.time() - seen.st_mtime > _SETTLED_S:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {**now, "digest": hashed.hexdigest()})
    return hashed.hexdigest()


def cached(folder: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """about.json of a folder that is there whole or not at all; `make` fills it and says what stands in that file."""
    if not (folder / "about.json").exists():
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            (part / "about.json").write_text(json.dumps(make(part)))
            os.replace(part, folder)
        except OSError:
            if not (folder / "about.json").exists():  # else another process was first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    about: dict[str, Any] = json.loads((folder / "about.json").read_text())
    return about


def survey(
    parts: tuple[Stretch, Stretch],
    vocab: int,
    end_of_text: int | None,
    folder: Path,
    starts: npt.NDArray[np.int64] | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """One pass over all ids: their entropy, and where documents begin (`starts`, or after each `end_of_text`), which
    documents.npy in `folder` holds. Raises InputError at an id that `vocab` does not have."""
    counts = np.zeros(vocab, dtype=np.int64)
    found = [np.zeros(1, dtype=np.int64)]
    done, total = 0, sum(part.count for part in parts)
    due = time.monotonic() + 10
    for part in parts:
        tokens = part.open()
        for low in range(0, part.count, _AT_ONCE):
            here = np.asarray(tokens[low : low + _AT_ONCE])
            least, most = int(here.min()), int(here.max())
            if least < 0 or most >= vocab:
                raise InputError(
                    "train.data",
                    str(part.path),
                    f"holds token {least if least < 0 else most} when read as {here.dtype}, model.vocab is {vocab}",
                    "raise model.vocab, or name the type of the ids in train.data_dtype",
                )
            if part is parts[0]:
                counts += np.bincount(here, minlength=vocab)
            if starts is None and end_of_text is not None:
                found.append(np.flatnonzero(here == end_of_text) + (done + 1))
            done += len(here)
            if time.monotonic() >= due:
                announce(f"counting tokens: {done:,} of {total:,}")
                due = time.monotonic() + 10
        if starts is None and part.path != parts[1].path:
            found.append(np.array([done], dtype=np.int64))  # a file of its own begins a document
    begins = np.unique(np.concatenate(found)) if starts is None else starts
    begins = begins[begins < total]
    np.save(folder / "documents.npy", begins)
    p = counts[counts > 0] / max(1, parts[0].count)
    return {"unigram_entropy": float(-(p * np.log(p)).sum()), "documents": len(begins)}
