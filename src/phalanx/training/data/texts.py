"""Texts as a stream of documents: a text file is one document, so is each line of a .jsonl or .json file.

Files are read piece by piece, so a corpus may be larger than memory.
"""

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, cast

from phalanx.spec.errors import InputError

SHIPPED = "austen"
_PACKED: dict[str, Callable[..., object]] = {".xz": lzma.open, ".gz": gzip.open}
_JSON_LINES = (".jsonl", ".json")
_READ = 2**20  # characters at once
_PIECE = 2**20  # the most characters of one paragraph
LARGEST = 2**24
"""Maximum characters of one document that an existing tokenizer encodes at once."""


@dataclass(frozen=True)
class TextFile:
    """A file of UTF-8 text or JSON lines, compressed or not."""

    path: Path

    @property
    def json_lines(self) -> bool:
        """Whether each line is a JSON object, by the file's name."""
        name = Path(self.path.stem if self.path.suffix.lower() in _PACKED else self.path.name)
        return name.suffix.lower() in _JSON_LINES

    def open(self) -> IO[str]:
        """Open the file as text, decompressed."""
        packed = _PACKED.get(self.path.suffix.lower())
        binary = packed(self.path, "rb") if packed else self.path.open("rb")
        return io.TextIOWrapper(cast("IO[bytes]", binary), encoding="utf-8")

    def chunks(self) -> Iterator[str]:
        """Yield the text in pieces while reading it. Raises InputError if it is not UTF-8 text."""
        try:
            with self.open() as file:
                while text := file.read(_READ):
                    yield text
        except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
            raise InputError("train.data", str(self.path), f"cannot be read as UTF-8 text ({error})") from None


def find_texts(
    data: str, tokenizer: Path | None = None, announce: Callable[[str], None] = lambda _: None
) -> list[TextFile]:
    """List the files of `data`: the shipped corpus, one file, or every .txt, .json and .jsonl (also .xz and .gz) in a
    folder, in order of name, except the `tokenizer`. Other files are skipped, and announced in one line. Raises
    InputError."""
    if data == SHIPPED:
        return [TextFile(Path(str(resources.files("phalanx.data").joinpath("austen.txt.xz"))))]
    path = Path(data)
    if path.is_dir():
        kinds = (".txt", *_JSON_LINES, *_PACKED)
        there = [f for f in path.rglob("*") if f.is_file() and not (tokenizer and f.samefile(tokenizer))]
        files = sorted(f for f in there if f.suffix.lower() in kinds)
        if not files:
            raise InputError("train.data", data, "holds no .txt, .json, .jsonl or train.bin")
        if len(files) < len(there):
            announce(f"note: {len(files)} of {len(there)} files in {data} are read: {', '.join(kinds)}")
        return [TextFile(f) for f in files]
    if not path.is_file():
        raise InputError("train.data", data, "no such file or folder", f"or use the shipped corpus {SHIPPED!r}")
    return [TextFile(path)]


def documents(files: Iterable[TextFile], field: str) -> Iterator[Iterator[str]]:
    """Yield each document as an iterator over the pieces in which it is read. Raises InputError at a line that is not
    a JSON object with text in `field`, or whose text cannot be UTF-8 (half a surrogate pair); nothing is replaced
    silently."""
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


def _text_in(line: str, field: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSONDecodeError, or a number with too many digits
        raise InputError("train.data", place, f"is not JSON ({error})", "one object a line is read") from None
    if not isinstance(row, dict):
        raise InputError("train.data", place, "is not a JSON object", "one object a line is read")
    text = row.get(field)
    if not isinstance(text, str):
        have = f"has {', '.join(map(str, row))}"
        raise InputError("train.text_field", field, f"{place} {have[:200]}", "name the field that holds the text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"holds {text[error.start]!a}, half a surrogate pair"
        raise InputError("train.data", place, half, "fix the line") from None
    return text


def paragraphs(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a document after every blank line, so that no word is cut, and longer paragraphs as `_shorter` does. The
    pieces do not depend on the chunks."""
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n\n")
        for paragraph in whole:
            yield from _shorter(paragraph + "\n\n")
        *cut, rest = _shorter(rest)
        yield from cut
    if rest:
        yield rest


def _shorter(text: str) -> Iterator[str]:
    """Yield pieces of at most _PIECE characters: cut after a line, else before a space, else anywhere."""
    start = 0
    while len(text) - start > _PIECE:
        most = start + _PIECE
        end = text.rfind("\n", start, most) + 1 or text.rfind(" ", start + 1, most)
        end = end if end > 0 else most
        yield text[start:end]
        start = end
    yield text[start:]


def join_chunks(chunks: Iterable[str]) -> Iterator[str]:
    """Yield a document in one piece if it has fewer than LARGEST characters; a larger one is cut after blank lines,
    if it has any."""
    buffer: list[str] = []
    size = 0
    for chunk in chunks:
        buffer.append(chunk)
        size += len(chunk)
        if size >= LARGEST:
            text = "".join(buffer)
            cut = text.rfind("\n\n") + 2
            cut = cut if cut > 1 else size
            yield text[:cut]
            buffer, size = [text[cut:]], size - cut
    if text := "".join(buffer):
        yield text
