"""Reading of untrusted documents: text, TOML and JSON of bounded size and depth, or an InputError that names the
file. Versions of our own files; files of any other version are refused.
"""

import csv
import hashlib
import json
import lzma
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from phalanx.spec.errors import InputError

T = TypeVar("T")
LARGEST = 2**26
"""Maximum bytes of a document: 64 MiB."""
_LARGEST_TOML = 2**20
"""tomllib is Python and takes a minute for what JSON takes a second; ours have 5 kB."""
_DEEPEST = 64  # tables in tables; ours have 5
_LONGEST_BITS = 14_000  # of a number: 4,214 digits


def read_text(path: Path, field: str, largest: int = LARGEST) -> str:
    """Return the text of a file in UTF-8; `field`: the file's purpose, for messages. Raises InputError."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
            raise InputError(field, str(path), "is not a regular file")
        with path.open("rb") as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise InputError(field, str(path), f"is larger than {largest // 2**20} MiB", "is it the right file?")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise InputError(field, str(path), "no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(field, str(path), f"cannot be read (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise InputError(field, str(path), f"cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except ValueError as error:  # a NUL in the name
        raise InputError(field, str(path), f"is not the name of a file ({error})") from None


_COLOURS = re.compile(r"\x1b\[[\d;]*[A-Za-z]|\[(?:\d{1,3};)*\d{1,3}m")
"""Escapes of a terminal, as they are and as a paste leaves them."""


def without_colours(text: str) -> str:
    """Return a text without what colours it in a terminal."""
    return _COLOURS.sub("", text)


def read_log(path: Path, field: str) -> str:
    """Return the text of a log without colours: of one too long for memory, its end; of bytes that are no UTF-8,
    stand-ins. Raises InputError for what is no regular file."""
    if not path.is_file():
        return read_text(path, field)
    try:
        with path.open("rb") as file:
            file.seek(-min(LARGEST, path.stat().st_size), 2)
            content = file.read(LARGEST)
    except OSError as error:
        raise InputError(field, str(path), f"cannot be read ({error.strerror})") from None
    return without_colours(content.decode("utf-8-sig", "replace").replace("\r\n", "\n"))


def version_of(path: Path) -> tuple[int, int]:
    """Return a file's time of modification (ns) and size (bytes), which an edit changes; zeros if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def require_unchanged(path: Path, field: str, version: tuple[int, int]) -> None:
    """Require that a file is still the one that was read, since results were derived from it. Raises InputError."""
    if version_of(path) != version:
        raise InputError(field, str(path), "has changed since this program read it", "start the program again")


def read_packed(path: Path, field: str, largest: int = LARGEST) -> str:
    """Return the text of a file that may be compressed by xz, which can make a thousand bytes of one. Raises
    InputError."""
    if path.suffix != ".xz":
        return read_text(path, field, largest)
    try:
        if not path.is_file():
            raise InputError(field, str(path), "is not a regular file" if path.exists() else "no such file")
        with lzma.open(path) as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise InputError(field, str(path), f"unpacks to more than {largest // 2**20} MiB")
        return content.decode()
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise InputError(field, str(path), f"cannot be read ({error})") from None


@contextmanager
def csv_of(path: Path, field: str) -> Iterator[None]:
    """Turn errors of the csv module (a NUL, a field of more than 128 KiB) into an InputError about that file."""
    try:
        yield
    except csv.Error as error:
        raise InputError(field, str(path), f"is not CSV ({error})") from None


def read_toml(path: Path, field: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises InputError."""
    text = read_text(path, field, _LARGEST_TOML)
    try:
        return require_shallow(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        _refuse(path, field, "TOML", error)


def read_json(path: Path, field: str) -> Any:
    """Return the content of a JSON file. Raises InputError."""
    text = read_text(path, field)
    try:
        return require_shallow(json.loads(text))
    except (ValueError, RecursionError) as error:
        _refuse(path, field, "JSON", error)


def seal(about: Mapping[str, Any]) -> str:
    """Return the checksum of a document, without its `seal`: it shows damage, not authorship."""
    rest = {key: value for key, value in about.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


_MOST_VALUES = 1_000_000  # values of a document with its references expanded


def require_finite(content: Any) -> None:
    """Require that tables which may refer to each other expand to a bounded number of values, and none contains
    itself. Raises ValueError."""
    counted: dict[int, int] = {}

    def count(table: Any) -> int:
        known = counted.get(id(table))
        if known == 0:
            raise ValueError("a table in it holds itself")
        if known is None:
            counted[id(table)] = 0
            counted[id(table)] = known = 1 + sum(count(part) if _parts(part) else 1 for part in _parts(table))
            if known > _MOST_VALUES:
                raise ValueError(f"its references make more than {_MOST_VALUES:,} values of it")
        return known

    count(content)


def require_shallow(content: T) -> T:
    """Return a document after checking that it is nested at most `_DEEPEST` deep, so that recursion is safe, and has
    no number too long to print (hexadecimal ones pass the limit of int()).

    Raises RecursionError or ValueError for any other.
    """
    level: list[Any] = [content]
    for _ in range(_DEEPEST):
        if any(isinstance(part, int) and part.bit_length() > _LONGEST_BITS for part in level):
            raise ValueError
        level = [part for table in level for part in _parts(table)]
        if not level:
            return content
    raise RecursionError


def _parts(table: Any) -> Collection[Any]:
    return table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()


def _refuse(path: Path, field: str, format: str, error: Exception) -> NoReturn:
    if isinstance(error, RecursionError):
        reason = "is nested too deep"
    elif isinstance(error, json.JSONDecodeError | tomllib.TOMLDecodeError):
        reason = f"is not {format} ({error})"
    else:
        reason = "holds a number of more than 4,300 digits"  # the limit of int()
    raise InputError(field, str(path), reason) from None


VERSION = 2


def tables_of(content: Mapping[str, Any], version: object, kind: str, where: str) -> dict[str, Any]:
    """Return the tables of a file without its `version`.

    `kind` (plan, model, cluster) and `where`, the file's name, are for messages. Raises InputError for another
    version.
    """
    if version != VERSION:
        raise InputError(kind, where, f"has version {version!r}", f"this Phalanx reads version {VERSION}")
    return {key: value for key, value in content.items() if key != "version"}
