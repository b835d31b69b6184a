"""Reads traces in Chrome's trace-event format: of PyTorch's profiler (Kineto), and of our own runs.

The events are decoded one after the other from a window of the file, so that a trace of a gigabyte takes the memory
of its columns. A trace that ends in the middle is used up to there. Times are microseconds, kept as seconds.
References: "Trace Event Format", Google, 2016; pytorch/kineto, libkineto/src/output_json.cpp.
"""

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.spec.errors import InputError
from phalanx.traces.rank_trace import KINDS, TRACKS, RankTrace, TraceColumns, TracedCollective, Track, kind_of, op_of

_WINDOW = 1 << 22
_LONGEST = 1 << 26
"""Bytes of a window, and the most that one value of the file may have."""
_GZIP, _GZIP_BITS = b"\x1f\x8b", 31
_BETWEEN = re.compile(r"[\s,]*").match
_PRODUCTS = KINDS.index("products")
_DEVICE, _OP, _HOST = (TRACKS.index(where) for where in ("device", "op", "host"))
_CATEGORIES: dict[str, Track] = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "gpu_op"), "device"),
    "cpu_op": "op",
    **dict.fromkeys(("user_annotation", "cuda_runtime", "cuda_driver"), "host"),
    "gpu_user_annotation": "span",
}
_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "int64"), 8),
    **dict.fromkeys(("float", "int", "int32"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "short int"), 2),
    **dict.fromkeys(("char", "byte", "unsigned char", "signed char", "bool"), 1),
}


def _chunks(file: BufferedReader) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked where it is gzip. Raises EOFError where that ends early, OSError, zlib.error."""
    if file.peek(2)[:2] != _GZIP:
        while chunk := file.read(_WINDOW):
            yield chunk
        return
    unpack, ended = zlib.decompressobj(_GZIP_BITS), False
    while raw := file.read(_WINDOW // 8):
        while raw:
            if chunk := unpack.decompress(raw, _WINDOW):
                yield chunk
            raw, ended = unpack.unconsumed_tail, unpack.eof
            if ended:
                raw, unpack = unpack.unused_data, zlib.decompressobj(_GZIP_BITS)
    if not ended:
        raise EOFError("the end of gzip's data is missing")


class _Window:
    """The part of a file's text that is being decoded."""

    def __init__(self, file: BufferedReader) -> None:
        self.text, self.at, self.ended, self.cut = "", 0, False, ""
        self._chunks = _chunks(file)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._scan: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

    def more(self) -> bool:
        """Read on; return whether there was anything."""
        if self.ended:
            return False
        try:
            chunk = next(self._chunks, b"")
        except (EOFError, OSError, zlib.error) as error:
            chunk, self.cut = b"", f"is damaged: {error}"
        self.ended = not chunk
        self.text, self.at = self.text[self.at :] + self._decode(chunk, self.ended), 0
        return bool(chunk)

    def next(self) -> str:
        """Skip blanks and commas; return the next character, "" at the end."""
        while True:
            self.at = _BETWEEN(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """Decode the next value. Raises EOFError where the file ends within it, ValueError."""
        self.next()
        while True:
            try:
                value, end = self._scan(self.text, self.at)
            except (StopIteration, ValueError) as error:
                if len(self.text) - self.at > _LONGEST:
                    raise ValueError("is not JSON") from error
                if not self.more():
                    raise EOFError from error
                continue
            if end == len(self.text) and self.more():  # a number may go on
                continue
            self.at = end
            return value


def _events(window: _Window, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace; other keys go to `about`. Raises EOFError, ValueError."""
    first = window.next()
    if first not in ("{", "["):
        raise ValueError("is not JSON")
    window.at += 1
    if first == "[":
        yield from _items(window)
        return
    while (character := window.next()) != "}":
        if not character:
            raise EOFError
        key = window.value()
        if window.next() != ":":
            raise ValueError("is not JSON")
        window.at += 1
        if key == "traceEvents" and window.next() == "[":
            window.at += 1
            yield from _items(window)
        else:
            about[str(key)] = window.value()


def _items(window: _Window) -> Iterator[dict[str, Any]]:
    while (character := window.next()) != "]":
        if not character:
            raise EOFError
        item = window.value()
        if isinstance(item, dict):
            yield item
    window.at += 1


def read(path: Path) -> list[RankTrace]:
    """Return the traces of the ranks in a file. Raises InputError for a file that is no trace, or an empty one."""
    notes: list[str] = []
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz" and file.peek(2)[:2] != _GZIP:
                notes.append("is named .gz but not compressed; read unpacked")
            return _read(_Window(file), str(path), notes)
    except OSError as error:
        raise InputError("trace", str(path), f"cannot be read ({error.strerror or error})") from None


def _read(window: _Window, name: str, notes: list[str]) -> list[RankTrace]:
    columns, about = TraceColumns(), dict[str, Any]()
    processes: list[int] = []
    ours = False
    spans = 0
    try:
        for event in _events(window, about):
            spans += 1
            if event.get("ph") != "X":
                continue
            try:
                category = event["cat"]
                track = _CATEGORIES.get(category)
                if track is None:
                    ours |= _add_span(columns, processes, event)
                    continue
                word = event["name"]
                kind = kind_of(word, track)
                if kind < 0:
                    continue
                given = event.get("args")
                args = given if isinstance(given, dict) else {}
                if kind == _PRODUCTS and track == "op" and (types := args.get("Input type")):
                    word = f"{word} {types[0]}"
                start = float(event["ts"]) / 1e6
                stop = start + float(event["dur"]) / 1e6
                call = _call(word, args, about) if KINDS[kind] == "communication" else None
                if call is not None and track in ("host", "span") and word.startswith("nccl"):
                    continue  # when it was issued; its kernel says when it ran
                columns.add(word, kind, TRACKS.index(track), start, stop, call)
                processes.append(0)
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
    except EOFError:
        notes.append(f"ends in the middle; {window.cut or f'its first {spans:,} events are used'}")
    except (ValueError, RecursionError):
        if not len(columns.start):
            raise InputError(
                "trace", name, window.cut or "is not a trace", "expected Chrome's trace-event JSON, may be .gz"
            ) from None
        notes.append(f"is not JSON after {spans:,} events, which are used")
    if not len(columns.start):
        reason = "has no activity of a program" if spans else "has no traceEvents"
        remedy = "record some steps with torch.profiler, and export them within the active steps"
        raise InputError("trace", name, reason, remedy)
    if ours:
        ranks = np.array(processes)
        return [columns.trace(name, int(r), None, "", tuple(notes), ranks == r) for r in np.unique(ranks)]
    info = about.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    devices = about.get("deviceProperties")
    known = [d.get("name", "") for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
    if known and _DEVICE not in columns.where:  # its operators on the CPU only launch
        reason = "is cut before the kernels" if notes else "has no kernels"
        raise InputError(
            "trace", name, f"{reason} of its {known[0]}", "record the whole step with ProfilerActivity.CUDA"
        )
    rank, world = _number(info.get("rank")), _number(info.get("world_size"))
    return [columns.trace(name, rank, world, str(known[0]) if known else "", tuple(notes))]


def _add_span(columns: TraceColumns, processes: list[int], event: dict[str, Any]) -> bool:
    """Add a span of one of our own timelines (runtime/tracing/timelines.py); return whether it is one."""
    detail, category = event.get("args"), event["cat"]
    if not isinstance(detail, dict) or "op" not in detail or not isinstance(event.get("pid"), int):
        return False
    start = float(event["ts"]) / 1e6
    stop = start + float(event["dur"]) / 1e6
    call = None
    if category == "compute":
        kinds = {"forward": "forward", "backward": "backward", "loading": "loading"}
        kind = KINDS.index(kinds.get(detail["op"], "memory"))
    else:
        axis = str(detail.get("axis", category))
        kind = KINDS.index("waiting" if category == "waiting" else "communication")
        call = TracedCollective(str(detail["op"]), axis, bytes=int(detail.get("bytes", 0)))
    name = "optimizer" if detail["op"] == "optimizer" else str(event["name"])
    columns.add(name, kind, _HOST if name == "loading" else _OP, start, stop, call)
    processes.append(event["pid"])
    if name == "optimizer":
        columns.add(name, KINDS.index("optimizer"), _HOST, start, stop)
        processes.append(event["pid"])
    return True


def _call(name: str, args: dict[str, Any], about: dict[str, Any]) -> TracedCollective:
    """Return the call of a kernel or an operator: from Kineto's arguments, or from the shapes of an operator."""
    op = op_of(str(args.get("Collective name") or name))
    group = str(args.get("Process Group Name", ""))
    size = _number(args.get("Group size")) or 0
    element = _BYTES.get(str(args.get("dtype", "")).lower(), 0)
    moved = max(_number(args.get("In msg nelems")) or 0, _number(args.get("Out msg nelems")) or 0) * element
    ranks, said = _group(group, about)
    if (
        not moved
        and isinstance(dims := args.get("Input Dims"), list)
        and isinstance(types := args.get("Input type"), list)
    ):
        for shape, element_type in zip(dims, types, strict=False):
            if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
                moved += int(np.prod(shape, dtype=np.float64)) * _BYTES.get(str(element_type).lower(), 4)
    return TracedCollective(op, said or group, ranks, size or len(ranks), moved)


def _group(name: str, about: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """Return the ranks of a process group and its description, from the head of the trace."""
    info = about.get("distributedInfo")
    rows = info.get("pg_config") if isinstance(info, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and (row.get("pg_name") == name or (not name and len(rows or ()) == 1)):
            ranks = row.get("ranks")
            known = tuple(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else ()
            return known, str(row.get("pg_desc", ""))
    return (), ""


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
