"""Texts as a stream of documents: a text file is one document, so is each line of a .jsonl file.

Files are read piece by piece, so a corpus may be larger than memory.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, cast

from phalanx.spec.errors import InputError

SHIPPED = "austen"
_PACKED = {".xz": lzma.open, ".gz": gzip.open}
_READ = 2**20  # characters at once
LARGEST = 2**24
"""Characters of one document that a given tokenizer sees together."""


@dataclass(frozen=True)
class TextFile:
    """A file of UTF-8 text or JSON lines, packed or not."""

    path: Path

    @property
    def json_lines(self) -> bool:
        suffixes = self.path.suffixes
        return bool(suffixes) and (suffixes[:-1] if suffixes[-1] in _PACKED else suffixes)[-1:] == [".jsonl"]

    def open(self) -> IO[str]:
        packed = _PACKED.get(self.path.suffix)
        binary = packed(self.path, "rb") if packed else self.path.open("rb")
        return io.TextIOWrapper(cast("IO[bytes]", binary), encoding="utf-8")

    def chunks(self) -> Iterator[str]:
        """The text, as it is read. Raises InputError where it is none."""
        try:
            with self.open() as file:
                while text := file.read(_READ):
                    yield text
        except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
            raise InputError("train.data", str(self.path), f"cannot be read as UTF-8 text ({error})") from None


def find_texts(data: str) -> list[TextFile]:
    """The shipped corpus, one file, or every .txt and .jsonl (also .xz and .gz) in a folder, in order of name."""
    if data == SHIPPED:
        return [TextFile(Path(str(resources.files("phalanx.data").joinpath("austen.txt.xz"))))]
    path = Path(data)
    if path.is_dir():
        kinds = (".txt", ".jsonl", *_PACKED)
        files = sorted(f for f in path.rglob("*") if f.suffix in kinds and f.is_file())
        if not files:
            raise InputError("train.data", data, "holds no .txt, .jsonl or train.bin")
        return [TextFile(f) for f in files]
    if not path.is_file():
        raise InputError("train.data", data, "no such file or folder", f"or use the shipped corpus {SHIPPED!r}")
    return [TextFile(path)]


def documents(files: Iterable[TextFile], field: str) -> Iterator[Iterator[str]]:
    """Each document as the pieces in which it is read. Raises InputError at a line that is no JSON object with text
    in `field`."""
    for file in files:
        if not file.json_lines:
            yield file.chunks()
            continue
        for number, line in enumerate(_lines(file.chunks()), start=1):
            if line.strip():
                yield iter([_text_in(line, field, f"{file.path}:{number}")])


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        yield from whole
    yield rest


def _text_in(line: str, field: str, where: str) -> str:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError("train.data", where, f"is not JSON ({error})") from None
    text = found.get(field) if isinstance(found, dict) else None
    if not isinstance(text, str):
        have = f"has {', '.join(map(str, found))}" if isinstance(found, dict) else "is no object"
        raise InputError("train.text_field", field, f"{where} {have[:200]}", "name the field that holds the text")
    return text


def paragraphs(chunks: Iterable[str]) -> Iterator[str]:
    """A document cut after every blank line, so that no word is cut."""
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n\n")
        yield from (p + "\n\n" for p in whole)
    if rest:
        yield rest


def whole(chunks: Iterable[str]) -> Iterator[str]:
    """A document in one piece, up to LARGEST characters; a larger one is cut after a blank line where it has one."""
    held: list[str] = []
    size = 0
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size >= LARGEST:
            text = "".join(held)
            cut = text.rfind("\n\n") + 2
            cut = cut if cut > 1 else size
            yield text[:cut]
            held, size = [text[cut:]], size - cut
    if text := "".join(held):
        yield text
