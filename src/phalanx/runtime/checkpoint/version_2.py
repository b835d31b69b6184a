"""Checkpoints of version 2, which earlier releases wrote: torch.distributed.checkpoint's container, read as data.

    .metadata        a pickle of torch.distributed.checkpoint.metadata.Metadata: which box of which tensor lies where
    __0_0.distcp     what torch.save wrote for each box, one behind the other

Neither is unpickled. A pickle is a program for a stack machine; `_run` interprets the instructions that such
metadata consist of, with names and calls kept as data, and refuses any other. Of torch.save's ZIP archives only the
record with the elements is located, data/0, whose type and shape the metadata give.
(torch/distributed/checkpoint/metadata.py, filesystem.py; CPython's Lib/pickletools.py lists the instructions.)
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime.checkpoint.index import StoredBox, StoredTensor, checked
from phalanx.runtime.checkpoint.regular_files import open_regular, read_bytes, require_plain
from phalanx.runtime.comm.dtypes import DTYPES

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

METADATA = ".metadata"
_LARGEST = 2**28
_LOCAL_HEADER = 30  # bytes, then the record's name and an extra field


@dataclass
class _Object:
    """A call in a pickle: what would be called, with what, and the state that it would get."""

    name: str
    arguments: Any
    state: Any = None


class _Name(str):
    """The name of a class or function in a pickle."""


def tensors(path: Path, files: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint's folder, by name, given its `files` and their sizes.

    Raises ValueError if the metadata are no such, or contradict themselves or the files; OSError.
    """
    pickle = read_bytes(path / METADATA, _LARGEST)
    opened: dict[str, int] = {}
    try:
        metadata = _fields(_run(pickle))
        places = {}
        for index, info in metadata["storage_data"]:
            at, there = _fields(index), _fields(info)
            places[at["fqn"], _size(at["offset"])] = there
        stored = {}
        for name, about in metadata["state_dict_metadata"]:
            fields = _fields(about)
            if "chunks" not in fields:  # bytes rather than a tensor
                continue
            properties = fields["properties"].state
            dtype = DTYPES[str(properties[0] if isinstance(properties, tuple) else dict(properties)["dtype"])[6:]]
            boxes = []
            for chunk in map(_fields, fields["chunks"]):
                offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
                there = places[name, offsets]
                file = require_plain(there["relative_path"])
                if file not in opened:
                    opened[file] = open_regular(path / file)
                length = math.prod(sizes) * dtype.itemsize
                boxes.append(
                    StoredBox(
                        file, _elements_at(opened[file], there["offset"], there["length"], length), offsets, sizes
                    )
                )
            stored[name] = StoredTensor(_size(fields["size"]), dtype, tuple(boxes))
    except (TypeError, KeyError, AttributeError, IndexError, OverflowError, NotImplementedError) as error:
        raise ValueError(f"{METADATA} cannot be understood ({error!r})") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"an archive of a tensor cannot be read ({error})") from None
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return checked(stored, files)


def _fields(thing: Any) -> dict[Any, Any]:
    """Return an object's fields by name."""
    if isinstance(thing, _Object):
        return dict(thing.state)
    raise ValueError(f"{METADATA} cannot be understood")


def _size(thing: Any) -> tuple[int, ...]:
    """Return a torch.Size, which is a call with a tuple of integers."""
    (sizes,) = thing.arguments
    return tuple(sizes)


class _Slice(io.RawIOBase):
    """`length` bytes of an open file from `begin` on, for zipfile."""

    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        self._descriptor, self._begin, self._length, self._at = descriptor, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, memory: WriteableBuffer) -> int:
        view = memoryview(memory)
        wanted = min(len(view), max(0, self._length - self._at))
        data = os.pread(self._descriptor, wanted, self._begin + self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _elements_at(descriptor: int, begin: int, length: int, expected: int) -> int:
    """Return the byte of the file at which the elements of an archive's tensor begin.

    The archive has `length` bytes from `begin` on. Raises ValueError unless its data/0 has the `expected` bytes.
    """
    archive = _Slice(descriptor, begin, length)
    with zipfile.ZipFile(archive) as records:
        order = next((r for r in records.infolist() if r.filename.endswith("/byteorder")), None)
        record = next((r for r in records.infolist() if r.filename.endswith("/data/0")), None)
        if record is None or record.compress_type != zipfile.ZIP_STORED or record.file_size != expected:
            raise ValueError(f"the archive at byte {begin} does not hold {expected} bytes of elements")
        if order is not None and (order.file_size > 9 or records.read(order).decode() != sys.byteorder):
            raise ValueError(f"the archive at byte {begin} has another order of bytes")
    archive.seek(record.header_offset)
    header = archive.read(_LOCAL_HEADER)
    if header is None or len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise ValueError(f"the archive at byte {begin} is damaged")
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    at = record.header_offset + _LOCAL_HEADER + name + extra
    if at + expected > length:
        raise ValueError(f"the archive at byte {begin} is cut short")
    return begin + at


def _run(pickle: bytes) -> Any:
    """Return the value that a pickle describes: calls as _Object, dictionaries as lists of pairs.

    Raises ValueError for instructions beyond those that torch's metadata consist of, and whatever arises when
    instructions do not fit each other.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(pickle):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(argument)
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append([])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_Name(f"{module}.{name}"))
            case "NEWOBJ" | "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                stack.append(_Object(called, arguments))
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1].append((key, value))
            case "SETITEMS":
                items = since_mark()
                stack[-1].extend(zip(items[::2], items[1::2], strict=True))
            case _:
                raise ValueError(f"{METADATA} holds the instruction {opcode.name}, foreign to checkpoint metadata")
    raise ValueError(f"{METADATA} is cut short")
