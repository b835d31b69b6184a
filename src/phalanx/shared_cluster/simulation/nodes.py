"""The free GPUs of a cluster's nodes, and the choice of GPUs for a gang.

A gang that fits a node gets GPUs of one node; a wider one gets entire nodes and, for the rest, a part of one more, as
pods and tasks ask for them. `scatter` takes any free GPUs, as a scheduler that only counts does.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

RULES: dict[str, str] = {
    "first-fit": "the first node with room",
    "best-fit": "the node with the least room that suffices, so that entire nodes stay free",
    "topology": "best fit, and wide gangs under as few leaf switches as can be",
    "scatter": "any free GPUs in the order of nodes: blind to nodes",
}

HeldGpus = tuple[tuple[int, int], ...]
"""GPUs that a gang has: (node, bit mask of GPUs) of each node."""


@dataclass(frozen=True)
class GangShape:
    """The GPUs that a gang needs: `entire` full nodes, and `part` GPUs of one more."""

    entire: int
    part: int


class Nodes:
    """Free GPUs, node by node. `sizes`: GPUs of each node; `leaf`: the leaf switch of each node."""

    def __init__(self, sizes: Sequence[int], leaf: Sequence[int] | None = None) -> None:
        self.sizes = tuple(sizes)
        self.largest = max(sizes)
        self.leaf = tuple(leaf or [0] * len(sizes))
        self.free = list(sizes)
        self._bits = [(1 << n) - 1 for n in sizes]
        self.count = sum(sizes)
        """Free GPUs of all nodes."""
        self.capacity = self.count
        self._empty = sum(n == self.largest for n in sizes)
        # Nodes by free GPUs, as heaps of node numbers; entries of nodes that have other counts by now are skipped.
        self._by_free: list[list[int]] = [[] for _ in range(self.largest + 1)]
        for node, n in enumerate(sizes):
            self._by_free[n].append(node)

    def shape(self, gpus: int) -> GangShape:
        """Return the shape of a gang of `gpus` GPUs."""
        if gpus <= self.largest:
            return GangShape(0, gpus)
        return GangShape(*divmod(gpus, self.largest))

    def widest(self) -> int:
        """Return the GPUs of the widest gang that the empty cluster holds."""
        full = [n for n in self.sizes if n == self.largest]
        rest = max((n for n in self.sizes if n < self.largest), default=0)
        return len(full) * self.largest + rest

    def choose(self, gpus: int, rule: str, allowed: Callable[[int], bool] | None = None) -> list[tuple[int, int]]:
        """Return (node, GPUs) for a gang, in nodes that are `allowed`; empty if it cannot start now."""
        if gpus > self.count:
            return []
        if rule == "scatter":
            return self._scattered(gpus, allowed)
        shape = self.shape(gpus)
        if not shape.entire:
            node = self._node(shape.part, rule, allowed)
            return [(node, shape.part)] if node is not None else []
        if shape.entire > self._empty:
            return []
        full = self._entire(shape.entire, rule, allowed)
        if not full:
            return []
        chosen = [(node, self.largest) for node in full]
        if shape.part:
            taken = set(full)
            node = self._node(shape.part, rule, lambda n: n not in taken and (allowed is None or allowed(n)))
            if node is None:
                return []
            chosen.append((node, shape.part))
        return chosen

    def _node(self, gpus: int, rule: str, allowed: Callable[[int], bool] | None) -> int | None:
        """Return the node for a gang that fits one node; None if no node has room."""
        best: int | None = None
        for count in range(gpus, self.largest + 1):
            node = self._first_with(count, allowed)
            if node is not None:
                if rule != "first-fit":
                    return node
                best = node if best is None else min(best, node)
        return best

    def _first_with(self, count: int, allowed: Callable[[int], bool] | None) -> int | None:
        """Return the first allowed node with exactly `count` free GPUs; None if there is none."""
        heap = self._by_free[count]
        while heap and self.free[heap[0]] != count:
            heapq.heappop(heap)
        if not heap:
            return None
        if allowed is None or allowed(heap[0]):
            return heap[0]
        return min((n for n in set(heap) if self.free[n] == count and allowed(n)), default=None)

    def _entire(self, count: int, rule: str, allowed: Callable[[int], bool] | None) -> list[int]:
        empty = [n for n, free in enumerate(self.free) if free == self.largest and (allowed is None or allowed(n))]
        if len(empty) < count:
            return []
        if rule != "topology":
            return empty[:count]
        under: dict[int, list[int]] = {}
        for node in empty:
            under.setdefault(self.leaf[node], []).append(node)
        enough = [nodes for nodes in under.values() if len(nodes) >= count]
        if enough:  # the leaf that is left with the fewest
            return min(enough, key=lambda nodes: (len(nodes), nodes))[:count]
        ordered = sorted(under.values(), key=lambda nodes: (-len(nodes), nodes))
        return [node for nodes in ordered for node in nodes][:count]

    def _scattered(self, gpus: int, allowed: Callable[[int], bool] | None) -> list[tuple[int, int]]:
        chosen: list[tuple[int, int]] = []
        for node, free in enumerate(self.free):
            if free and (allowed is None or allowed(node)):
                chosen.append((node, min(free, gpus)))
                gpus -= chosen[-1][1]
                if not gpus:
                    return chosen
        return []

    def take(self, chosen: Iterable[tuple[int, int]]) -> HeldGpus:
        """Take GPUs of nodes for a gang, the lowest free ones of each."""
        gang: list[tuple[int, int]] = []
        for node, gpus in chosen:
            bits, taken = self._bits[node], 0
            for _ in range(gpus):
                lowest = bits & -bits
                assert lowest, "a gang takes free GPUs only"
                taken |= lowest
                bits ^= lowest
            gang.append((node, taken))
            self._set(node, bits)
        return tuple(gang)

    def retake(self, held: HeldGpus) -> None:
        """Take the GPUs that a gang has just released again."""
        for node, bits in held:
            self._set(node, self._bits[node] & ~bits)

    def give_back(self, held: HeldGpus) -> None:
        """Free the GPUs of a gang."""
        for node, bits in held:
            self._set(node, self._bits[node] | bits)

    def _set(self, node: int, bits: int) -> None:
        before, after = self.free[node], bits.bit_count()
        self._bits[node], self.free[node] = bits, after
        self.count += after - before
        full = self.sizes[node] == self.largest
        self._empty += full * ((after == self.largest) - (before == self.largest))
        heapq.heappush(self._by_free[after], node)
