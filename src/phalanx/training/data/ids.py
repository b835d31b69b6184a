r"""Files of token ids, which stay where they are and are memory-mapped.

Flat: a .bin of uint16 or uint32 ids and nothing else, or a folder with train.bin and val.bin (nanoGPT's form).
Megatron's: the ids in NAME.bin, and in NAME.idx

    "MMIDIDX\0\0", version 1 (u64), type of the ids (u8), sequences n (u64), entries of the document index d (u64),
    lengths (i32 x n), where each begins in NAME.bin, in bytes (i64 x n), first sequence of each document (i64 x d)
"""

import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError
from phalanx.spec.job import Train
from phalanx.training.data.encode import TokenizerChoice
from phalanx.training.data.tokens import TokenRange, TokenSet, cache_name, cached, content_digest, split, survey

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_BLOCK = 2**22  # bytes
_SAMPLED_IDS = 2**20  # ids from which a file's type is inferred


def from_flat(
    path: Path, train: Train, choice: TokenizerChoice, vocab: int, cache: Path, announce: Callable[[str], None]
) -> TokenSet:
    """Open a flat file of ids, its last ones held out; or train.bin and val.bin. Raises InputError."""
    files = [path / "train.bin", path / "val.bin"] if path.is_dir() else [path]
    files = [f for i, f in enumerate(files) if i == 0 or f.is_file()]
    dtype = _type_of(files[0], train, vocab)
    counts = [_count(f, dtype) for f in files]
    if len(files) == 1:
        parts = split(files[0], dtype, counts[0])
    else:
        parts = TokenRange(files[0], dtype, 0, counts[0]), TokenRange(files[1], dtype, 0, counts[1])
    what = {"flat": [_digest(f, cache, announce) for f in files], "dtype": dtype}
    return _token_set(what, parts, choice, vocab, cache, announce, None)


def is_flat(path: Path) -> bool:
    """Whether this is a flat file of ids, or a folder with train.bin."""
    return (path.suffix == ".bin" and path.is_file()) or (path / "train.bin").is_file()


def megatron_index(path: Path) -> Path | None:
    """Return the .idx of a Megatron data set named by its prefix or either of its files; None if there is none."""
    index = {".idx": path, ".bin": path.with_suffix(".idx")}.get(path.suffix, Path(f"{path}.idx"))
    return index if index.is_file() else None


def from_megatron(
    index: Path, choice: TokenizerChoice, vocab: int, cache: Path, announce: Callable[[str], None]
) -> TokenSet:
    """Open a Megatron pair, its last ids held out; documents begin where the index says. Raises InputError."""
    path = index.with_suffix(".bin")
    if not path.is_file():
        raise InputError("train.data", str(index), f"{path.name} is missing from its folder")
    dtype, count, starts = _read_index(index, path)
    what = {"megatron": [_digest(f, cache, announce) for f in (path, index)]}
    return _token_set(what, split(path, dtype, count), choice, vocab, cache, announce, starts)


def _token_set(
    what: dict[str, Any],
    parts: tuple[TokenRange, TokenRange],
    choice: TokenizerChoice,
    vocab: int,
    cache: Path,
    announce: Callable[[str], None],
    starts: npt.NDArray[np.int64] | None,
) -> TokenSet:
    what |= {"tokenizer": choice.digest, "end": choice.end_of_text}
    folder = cache / "tokens" / cache_name(what, vocab)

    def make(part: Path) -> dict[str, Any]:
        if choice.path is not None:
            shutil.copyfile(choice.path, part / "tokenizer.json")
        return survey(parts, vocab, choice.end_of_text, part, starts, announce)

    about = cached(folder, make)
    return TokenSet(folder, parts, vocab, about["unigram_entropy"], about["documents"])


def _type_of(path: Path, train: Train, vocab: int) -> str:
    """Return the type of a flat file's ids: as configured; else uint32 if the vocabulary needs it, or if every second
    16-bit word of the first ids is 0, which no text has in uint16; else uint16."""
    if train.data_dtype != "auto":
        return train.data_dtype
    if vocab > 2**16:
        return "uint32"
    with _reading(path), path.open("rb") as file:
        halves = np.frombuffer(file.read(4 * _SAMPLED_IDS), dtype=np.uint8)
    halves = halves[: len(halves) // 4 * 4].view("<u2")
    return "uint32" if len(halves) > 2 and not halves[1::2].any() and halves.any() else "uint16"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError("train.data", str(path), f"cannot be read ({error.strerror})") from None


def _count(path: Path, dtype: str) -> int:
    with _reading(path):
        size, each = path.stat().st_size, np.dtype(dtype).itemsize
    if not size:
        raise InputError("train.data", str(path), "is empty")
    if size % each:
        raise InputError("train.data", str(path), f"its {size} bytes are no whole number of {dtype} ids")
    return size // each


def _read_index(index: Path, ids: Path) -> tuple[str, int, npt.NDArray[np.int64]]:
    """Return (type, number of ids, where documents begin among them). Raises InputError."""

    def refuse(reason: str, remedy: str = "") -> InputError:
        return InputError("train.data", str(index), reason, remedy)

    with _reading(index), index.open("rb") as file:
        size = index.stat().st_size
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise refuse("is not an index of Megatron's")
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != 1 or code not in _TYPES:
        raise refuse(f"has version {version} and type code {code}", f"version 1 and integer types {_TYPES} are read")
    # A mode for each sequence (u8) may follow, in multimodal data.
    if size - _HEADER.size - 12 * sequences - 8 * documents not in (0, sequences):
        raise refuse(f"is {size} bytes, not what {sequences} sequences and {documents} documents need")

    def column(dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
        return np.memmap(index, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)

    lengths = column("<i4", sequences, _HEADER.size)
    pointers = column("<i8", sequences, _HEADER.size + 4 * sequences)
    firsts = column("<i8", documents, _HEADER.size + 12 * sequences)
    dtype = _TYPES[code]
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends])  # of each sequence, and the end of all
    each = np.dtype(dtype).itemsize
    if not sequences or not begins[-1]:
        raise refuse("is empty")
    if (lengths < 0).any() or not np.array_equal(pointers, begins[:-1] * each):
        raise refuse("its sequences are not consecutive in the .bin", "write the data set again")
    if begins[-1] * each != ids.stat().st_size:
        raise refuse(f"describes {begins[-1] * each} bytes, {ids.name} holds {ids.stat().st_size}")
    if len(firsts) and (firsts.min() < 0 or firsts.max() > sequences):
        raise refuse("its documents lie outside its sequences")
    return dtype, int(begins[-1]), np.unique(begins[firsts])


def _digest(path: Path, cache: Path, announce: Callable[[str], None]) -> str:
    def blocks() -> Iterator[bytes]:
        if path.stat().st_size > 2**31:
            announce(f"reading {path} once, to identify its content; the digest is kept until the file changes")
        with _reading(path), path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block

    return content_digest(path, "bytes", cache, blocks)
