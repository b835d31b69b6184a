"""Reservations: for the first waiting job (EASY), or for every waiting job (conservative backfilling)."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.shared_cluster.simulation.nodes import GangShape, HeldGpus, Nodes

_FOREVER = float("inf")


@dataclass
class Reservation:
    """The latest start of the first waiting job, and the GPUs that other jobs may use without delaying it."""

    time: float
    """Seconds of the simulation."""
    spare: dict[int, int] = field(default_factory=dict)
    """Node -> GPUs left over at `time`, for reserved nodes."""
    anywhere: int | None = None
    """GPUs left over at `time` on all nodes, where gangs may scatter; None: they may not."""

    def allows(self, node: int, gpus: int) -> bool:
        """Whether a job that ends after `time` may use `gpus` GPUs of a node."""
        return node not in self.spare or self.spare[node] >= gpus

    def use(self, chosen: Iterable[tuple[int, int]]) -> None:
        """Take off the (node, GPUs) of a job that ends after `time`."""
        for node, gpus in chosen:
            if node in self.spare:
                self.spare[node] -= gpus
            if self.anywhere is not None:
                self.anywhere -= gpus


def earliest(nodes: Nodes, gpus: int, scatter: bool, ends: Iterable[tuple[float, HeldGpus]]) -> Reservation:
    """Return the reservation of a gang that cannot start now, from the planned ends of running jobs, ascending."""
    shape, free, count = nodes.shape(gpus), list(nodes.free), nodes.count
    full = {n for n, k in enumerate(free) if k == nodes.largest}
    for time, gang in ends:
        for node, bits in gang:
            back = bits.bit_count()
            free[node] += back
            count += back
            if free[node] == nodes.largest:
                full.add(node)
        if scatter:
            if count >= gpus:
                return Reservation(time, anywhere=count - gpus)
            continue
        reserved = _fits(shape, free, full, [node for node, _ in gang])
        if reserved:
            return Reservation(time, {node: free[node] - use for node, use in reserved})
    raise AssertionError("a gang that the empty cluster holds can start when all others have ended")


def _fits(shape: GangShape, free: Sequence[int], full: set[int], changed: Sequence[int]) -> list[tuple[int, int]]:
    """Return (node, GPUs) for a gang on nodes with these `free` GPUs; none if it does not fit. `full`: nodes of the
    largest size that are entirely free; `changed`: nodes that have just gained GPUs, one of which a gang smaller than
    a node takes."""
    if not shape.entire:
        return next(([(node, shape.part)] for node in changed if free[node] >= shape.part), [])
    if len(full) < shape.entire:
        return []
    chosen = sorted(full)[: shape.entire]
    largest = free[chosen[0]]
    result = [(node, largest) for node in chosen]
    if shape.part:
        taken = set(chosen)
        more = next((n for n, k in enumerate(free) if k >= shape.part and n not in taken), None)
        if more is None:
            return []
        result.append((more, shape.part))
    return result


class Timelines:
    """The unreserved free GPUs of every node, from now on: step functions of time."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._times: list[list[float]] = [[0.0] for _ in nodes.sizes]
        self._free: list[list[int]] = [[n] for n in nodes.sizes]

    def change(self, chosen: Iterable[tuple[int, int]], start: float, end: float, by: int) -> None:
        """Add `by` times the GPUs of each (node, GPUs) to the free GPUs from `start` to `end`."""
        for node, gpus in chosen:
            times, free = self._times[node], self._free[node]
            i, j = self._at(node, start), self._at(node, end)
            for k in range(i, j):
                free[k] += by * gpus
            for k in (j, i):
                if 0 < k < len(times) and free[k] == free[k - 1]:
                    del times[k], free[k]

    def _at(self, node: int, time: float) -> int:
        """Return the index of the step that begins at `time`; insert one if there is none."""
        times, free = self._times[node], self._free[node]
        i = bisect_right(times, time) - 1
        if times[i] == time:
            return i
        times.insert(i + 1, time)
        free.insert(i + 1, free[i])
        return i + 1

    def forget(self, node: int, now: float) -> None:
        """Drop the steps of a node that end before `now`."""
        times, free = self._times[node], self._free[node]
        i = bisect_right(times, now) - 1
        if i > 0:
            del times[:i], free[:i]

    def windows(self, node: int, gpus: int, duration: float, now: float) -> list[tuple[float, float]]:
        """Return (earliest, latest) starts from `now` on of a job of `duration` seconds on `gpus` GPUs of a node."""
        self.forget(node, now)
        times, free = self._times[node], self._free[node]
        result: list[tuple[float, float]] = []
        begin: float | None = None
        for i, time in enumerate(times):
            if free[i] >= gpus:
                begin = max(time, now) if begin is None else begin
                continue
            if begin is not None and time - begin >= duration:
                result.append((begin, time - duration))
            begin = None
        if begin is not None:
            result.append((begin, _FOREVER))
        return result

    def soonest(self, node: int, gpus: int, duration: float, now: float) -> tuple[float, int]:
        """Return the earliest start of a job on `gpus` GPUs of a node, and the GPUs free there at that time; infinity
        if it never fits."""
        self.forget(node, now)
        times, free = self._times[node], self._free[node]
        begin, room = -1.0, 0
        for i, time in enumerate(times):
            if free[i] < gpus:
                if begin >= 0 and time - begin >= duration:
                    return begin, room
                begin = -1.0
            elif begin < 0:
                begin, room = max(time, now), free[i]
        return (begin, room) if begin >= 0 else (_FOREVER, 0)

    def find(self, gpus: int, duration: float, now: float) -> tuple[float, list[tuple[int, int]]]:
        """Return the earliest time at which a gang can run for `duration` seconds, and its (node, GPUs)."""
        shape = self._nodes.shape(gpus)
        if not shape.entire:
            best: tuple[float, int, int] = (_FOREVER, 0, 0)
            for node, size in enumerate(self._nodes.sizes):
                if size >= shape.part:
                    best = min(best, (*self.soonest(node, shape.part, duration, now), node))
            return best[0], [(best[2], shape.part)]
        largest = self._nodes.largest
        starts = {
            node: self.windows(node, largest, duration, now)
            for node, size in enumerate(self._nodes.sizes)
            if size == largest
        }
        rest = range(len(self._nodes.sizes)) if shape.part else ()
        parts = {node: self.windows(node, shape.part, duration, now) for node in rest}
        # The earliest start is the beginning of a window of some node.
        for time in sorted({first for windows in (*starts.values(), *parts.values()) for first, _ in windows}):
            full = [node for node, windows in starts.items() if any(a <= time <= b for a, b in windows)]
            if len(full) < shape.entire:
                continue
            chosen = [(node, largest) for node in full[: shape.entire]]
            if not shape.part:
                return time, chosen
            taken = {node for node, _ in chosen}
            for node, windows in parts.items():
                if node not in taken and any(a <= time <= b for a, b in windows):
                    return time, [*chosen, (node, shape.part)]
        raise AssertionError("a gang that the empty cluster holds can start when all others have ended")
