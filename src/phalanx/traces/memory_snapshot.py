"""Reads snapshots of CUDA's allocator, as torch.cuda.memory._dump_snapshot pickles them, or the same as JSON.

Reserved is what the allocator took from the device, allocated what tensors hold. The trace of its actions ends at the
snapshot, so the peaks are found by going back from there.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError
from phalanx.traces.plain_pickle import load

LARGEST = 2**31
"""Most bytes of a snapshot, which is held in memory."""


@dataclass(frozen=True)
class MemoryUse:
    """What one device's memory held."""

    file: str
    allocated_bytes: int
    reserved_bytes: int
    """Both at the snapshot."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Both over the actions that the snapshot remembers."""
    failures: int
    """Allocations that failed."""
    largest: tuple[tuple[str, int], ...]
    """Bytes by the line of the program that holds them, the largest first."""


_CHANGES = {"alloc": (1, 0), "free_completed": (-1, 0), "segment_alloc": (0, 1), "segment_free": (0, -1)}
_CHANGES |= {"segment_map": (0, 1), "segment_unmap": (0, -1)}
"""Signs with which an action's size is added to the allocated and to the reserved bytes."""


def read(path: Path) -> list[MemoryUse]:
    """Return the use of each device of a snapshot. Raises InputError for another file, or another torch's."""
    if path.stat().st_size > LARGEST:
        raise InputError("snapshot", str(path), f"is larger than {LARGEST >> 30} GiB", "record fewer entries")
    data = path.read_bytes()
    try:
        value = load(data, str(path)) if data[:1] == b"\x80" else json.loads(data)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("snapshot", str(path), "is neither a pickle nor JSON") from None
    try:
        return _uses(value, str(path))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"is not laid out as torch's snapshots are ({type(error).__name__}: {error})"
        raise InputError("snapshot", str(path), reason, "expected segments and device_traces of torch 2") from None


def _uses(value: dict[str, Any], name: str) -> list[MemoryUse]:
    segments, traces = value["segments"], value.get("device_traces") or []
    devices = sorted({int(s.get("device", 0)) for s in segments} | {i for i, t in enumerate(traces) if t})
    uses = []
    for device in devices:
        own = [s for s in segments if int(s.get("device", 0)) == device]
        blocks = [b for s in own for b in s["blocks"] if b["state"].startswith("active")]
        allocated, reserved = sum(int(b["size"]) for b in blocks), sum(int(s["total_size"]) for s in own)
        lines: Counter[str] = Counter()
        for block in blocks:
            lines[_line(block)] += int(block["size"])
        now = peak = (allocated, reserved)
        trace = traces[device] if device < len(traces) else []
        for entry in reversed(trace):
            up, more = _CHANGES.get(entry["action"], (0, 0))
            size = int(entry.get("size", 0))
            now = now[0] - up * size, now[1] - more * size
            peak = max(peak[0], now[0]), max(peak[1], now[1])
        failures = sum(entry["action"] == "oom" for entry in trace)
        uses.append(MemoryUse(name, allocated, reserved, *peak, failures, tuple(lines.most_common(3))))
    return uses


def _line(block: dict[str, Any]) -> str:
    """Return the innermost line of a block's stack that is not torch's own."""
    frames = [f for f in block.get("frames") or () if str(f.get("filename", "")).endswith(".py")]
    own = [f for f in frames if "/torch/" not in str(f["filename"])] or frames
    return f"{own[0]['filename']}:{own[0]['line']} ({own[0]['name']})" if own else "unknown"
