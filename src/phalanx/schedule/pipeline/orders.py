"""Order of every schedule's actions: builders that yield one rank's actions after another's, without sends and
receives, for `ranks` pipeline ranks with `virtual` chunks each and `m` micro-batches."""

from collections.abc import Iterator
from itertools import chain, repeat

from phalanx.schedule.pipeline.actions import Action


def naive(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Yield F and B of one micro-batch after another."""
    for rank in range(ranks):
        yield [Action(kind, rank, i) for i in range(m) for kind in ("F", "B")]


def gpipe(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Yield all forward passes, then all backward passes."""
    for rank in range(ranks):
        yield [Action(kind, rank, i) for kind in ("F", "B") for i in range(m)]


def one_f_one_b(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Yield forward passes until the pipeline is full, then one after each backward pass."""
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, m)
        yield [*_paired(warm_up, [Action("F", rank, i) for i in range(m)], [Action("B", rank, i) for i in range(m)])]


def interleaved(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Yield 1f1b over chunks that take turns."""
    rounds = max(1, m // ranks)
    each = m // rounds  # micro-batches that a chunk runs per turn
    for rank in range(ranks):
        turns = [(r, v, r * each + i) for r in range(rounds) for v in range(virtual) for i in range(each)]
        forward = [Action("F", v * ranks + rank, i) for _, v, i in turns]
        backward = [Action("B", (virtual - 1 - v) * ranks + rank, i) for _, v, i in turns]
        warm_up = (virtual - 1) * each + 2 * (ranks - 1 - rank) if virtual > 1 else ranks - 1 - rank
        yield [*_paired(min(warm_up, len(forward)), forward, backward)]


def _paired(warm_up: int, forward: list[Action], backward: list[Action]) -> Iterator[Action]:
    """Yield the warm-up forwards, then one forward and one backward in turns, then the remaining backwards."""
    yield from forward[:warm_up]
    for i, action in enumerate(forward[warm_up:]):
        yield action
        yield backward[i]
    yield from backward[len(forward) - warm_up :]


def zb_h1(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Yield 1f1b with W deferred by r micro-batches on rank r: no rank holds more activations than the first."""
    for rank in range(ranks):
        actions = [Action("F", rank, i) for i in range(min(ranks - rank, m))]
        for i in range(m):
            actions.append(Action("I", rank, i))
            if i >= rank:
                actions.append(Action("W", rank, i - rank))
            if i + ranks - rank < m:
                actions.append(Action("F", rank, i + ranks - rank))
        yield [*actions, *(Action("W", rank, i) for i in range(max(0, m - rank), m))]


class _ActionCounter:
    """The actions of a rank with two chunks. Each kind on each chunk takes its micro-batches in order, so a counter
    per (kind, chunk) gives the number of the next one."""

    def __init__(self, chunks: tuple[int, int]) -> None:
        self.chunks = chunks
        self.actions: list[Action] = []
        self.done = {(kind, which): 0 for kind in "FBIW" for which in (0, 1)}

    def add(self, *words: str) -> None:
        """Append actions: `F0` is the next forward of the rank's first chunk, `I1` the next I of its second."""
        for word in words:
            kind, which = word[0], int(word[1])
            self.actions.append(Action(kind, self.chunks[which], self.done[kind, which]))  # type: ignore[arg-type]
            self.done[kind, which] += 1


def zb_v(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Yield the order for at least as many micro-batches as fill the pipeline, without those beyond m."""
    n = max(2 * ranks - 1, m)
    for rank in range(ranks):
        counted = _ActionCounter((rank, 2 * ranks - 1 - rank))
        counted.add(*["F0"] * (2 * (ranks - rank) - 1))
        counted.add(*["F1", "F0"] * rank)
        counted.add(*["F1", "I1", "W1"] * (ranks - rank))
        while counted.done["F", 1] < n:
            counted.add(*["F0"] * (counted.done["F", 0] < n), "I0", "W0", "F1", "I1", "W1")
        counted.add(*["I0", "I1"] * rank)
        counted.add(*["I0", "W0"] * (ranks - rank))
        counted.add(*["W1"] * (n - counted.done["W", 1]), *["W0"] * (n - counted.done["W", 0]))
        yield [a for a in counted.actions if a.micro_batch < m]


def dualpipe_v(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Yield forward and backward passes in pairs, over chunks in a V."""
    for rank in range(ranks):
        last = ranks - 1 - rank
        counted = _ActionCounter((rank, 2 * ranks - 1 - rank))
        deferred: list[int] = []  # the chunks whose W is due, the oldest first
        counted.add(*["F0"] * (2 * last))
        counted.add(*["F0", "F1"] * (rank + 1))
        counted.add(*["I1", "W1", "F1"] * last)
        counted.add(*["F0", "B1", "F1", "B0"] * (m - 2 * ranks + rank + 1))
        counted.add(*["B1", "F1", "B0"] * last)
        turning = rank + 1  # backward passes of both chunks, the later half of them without W
        for i, which in enumerate(chain.from_iterable(repeat((1, 0), turning))):
            if i < turning // 2 * 2 + (rank % 2 == 0):
                counted.add(f"B{which}")
            else:
                counted.add(f"I{which}")
                deferred.append(which)
        for _ in range(last):
            counted.add(f"W{deferred.pop(0)}", "I0")
            deferred.append(0)
        counted.add(*(f"W{which}" for which in deferred))
        yield _fused_counts(counted)


def _fused_counts(counted: _ActionCounter) -> list[Action]:
    """Renumber the micro-batches: a chunk's fused B and split I, W draw from the same sequence."""
    seen: dict[tuple[str, int], int] = {}
    actions = []
    for kind, chunk, _ in counted.actions:
        counts = [("I", chunk), ("W", chunk)] if kind == "B" else [(kind, chunk)]
        actions.append(Action(kind, chunk, seen.get(counts[0], 0)))
        for key in counts:
            seen[key] = seen.get(key, 0) + 1
    return actions
