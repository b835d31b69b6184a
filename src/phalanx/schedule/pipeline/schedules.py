"""Pipeline schedules as data: for every pipeline rank the ordered list of what it does, and which rank has which
chunk of the model.

    F  forward of a chunk      B  its backward pass, which is I and W in one
    I  gradient of its input   W  gradients of its weights

for one micro-batch. Schedules are built without sends and receives, which pipeline_sends.py inserts. All are
synchronous: every gradient of a step is of the weights that the step began with.

naive        one micro-batch after the other
gpipe        all forward, then all backward (Huang et al. 2019)
1f1b         each forward waits until a backward has made room (Narayanan et al. 2019, with a flush)
interleaved  1f1b over several chunks per rank, dealt out in turns (Narayanan et al. 2021)
zb-h1        1f1b with W put off to where a rank would be idle (Qi et al. 2023, "Zero Bubble Pipeline Parallelism")
zb-v         two chunks per rank, there and back in a V (Qi et al. 2024, "Pipeline Parallelism with Controllable
             Memory")
dualpipe-v   DualPipe (DeepSeek-AI 2024) cut in half: the same V, forward and backward in pairs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal, NamedTuple

from phalanx.spec.errors import InputError, nearest

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


class Action(NamedTuple):
    """`kind` for a micro-batch of a chunk, written as torch does: 3F0 is the forward of chunk 3 for micro-batch 0.
    SEND_F sends what the chunk's F made, RECV_F receives what it needs; SEND_B, RECV_B likewise for its backward
    pass."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """`actions` of each rank in their order; `rank_of` each chunk, in the order of the model."""

    name: str
    micro_batches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def chunks(self) -> int:
        return len(self.rank_of)


def held(own: Sequence[Action]) -> list[int]:
    """How many activations live after each action of a rank."""
    live, found = 0, []
    for action in own:
        live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        found.append(live)
    return found


def finished(actions: Sequence[Action]) -> dict[int, int]:
    """Where among a rank's actions the last gradients of weights of each chunk are made, in that order."""
    found: dict[int, int] = {}
    for at, action in enumerate(actions):
        if action.kind in ("B", "W"):
            found.pop(action.chunk, None)
            found[action.chunk] = at
    return found


def splits(s: PipelineSchedule) -> bool:
    """Whether it runs gradients of inputs and of weights apart."""
    return any(action.kind == "I" for own in s.actions for action in own)


def round_robin(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each chunk, dealt out in turns."""
    return tuple(chunk % ranks for chunk in range(ranks * virtual))


def v_shape(ranks: int) -> tuple[int, ...]:
    """The rank of each of two chunks per rank, there and back: the last rank has two neighbours of the model."""
    return (*range(ranks), *reversed(range(ranks)))


def _naive(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    for rank in range(ranks):
        yield [Action(kind, rank, i) for i in range(m) for kind in ("F", "B")]


def _gpipe(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    for rank in range(ranks):
        yield [Action(kind, rank, i) for kind in ("F", "B") for i in range(m)]


def _one_f_one_b(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, m)
        yield [*_paired(ahead, [Action("F", rank, i) for i in range(m)], [Action("B", rank, i) for i in range(m)])]


def _interleaved(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    rounds = max(1, m // ranks)
    if m % rounds:
        raise InputError(
            "micro-batches",
            m,
            f"interleaved goes through {rounds} rounds of equally many on {ranks} ranks",
            f"use a multiple of {ranks}",
        )
    each = m // rounds  # micro-batches that a chunk takes in a turn
    for rank in range(ranks):
        turns = [(r, v, r * each + i) for r in range(rounds) for v in range(virtual) for i in range(each)]
        there = [Action("F", v * ranks + rank, i) for _, v, i in turns]
        back = [Action("B", (virtual - 1 - v) * ranks + rank, i) for _, v, i in turns]
        ahead = (virtual - 1) * each + 2 * (ranks - 1 - rank) if virtual > 1 else ranks - 1 - rank
        yield [*_paired(min(ahead, len(there)), there, back)]


def _paired(ahead: int, there: list[Action], back: list[Action]) -> Iterator[Action]:
    """So many of one list ahead, then one of each in turns, then what is left of the other."""
    yield from there[:ahead]
    for i, action in enumerate(there[ahead:]):
        yield action
        yield back[i]
    yield from back[len(there) - ahead :]


def _zb_h1(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """As 1f1b, but rank r puts W off by r micro-batches: no rank then holds more of them than the first does."""
    for rank in range(ranks):
        found = [Action("F", rank, i) for i in range(min(ranks - rank, m))]
        for i in range(m):
            found.append(Action("I", rank, i))
            if i >= rank:
                found.append(Action("W", rank, i - rank))
            if i + ranks - rank < m:
                found.append(Action("F", rank, i + ranks - rank))
        yield [*found, *(Action("W", rank, i) for i in range(max(0, m - rank), m))]


class _Counted:
    """The actions of a rank with two chunks, by how many of each there have been: each kind takes its micro-batches
    in order."""

    def __init__(self, chunks: tuple[int, int]) -> None:
        self.chunks = chunks
        self.found: list[Action] = []
        self.done = {(kind, which): 0 for kind in "FBIW" for which in (0, 1)}

    def add(self, *words: str) -> None:
        """`F0`: the next forward of the first chunk."""
        for word in words:
            kind, which = word[0], int(word[1])
            self.found.append(Action(kind, self.chunks[which], self.done[kind, which]))  # type: ignore[arg-type]
            self.done[kind, which] += 1


def _zb_v(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    """Built for as many micro-batches as fill the pipeline; those that there are not are left out."""
    n = max(2 * ranks - 1, m)
    for rank in range(ranks):
        own = _Counted((rank, 2 * ranks - 1 - rank))
        own.add(*["F0"] * (2 * (ranks - rank) - 1))
        own.add(*["F1", "F0"] * rank)
        own.add(*["F1", "I1", "W1"] * (ranks - rank))
        while own.done["F", 1] < n:
            own.add(*["F0"] * (own.done["F", 0] < n), "I0", "W0", "F1", "I1", "W1")
        own.add(*["I0", "I1"] * rank)
        own.add(*["I0", "W0"] * (ranks - rank))
        own.add(*["W1"] * (n - own.done["W", 1]), *["W0"] * (n - own.done["W", 0]))
        yield [a for a in own.found if a.micro_batch < m]


def _dualpipe_v(ranks: int, virtual: int, m: int) -> Iterator[list[Action]]:
    if m < 2 * ranks:
        raise InputError(
            "micro-batches", m, f"dualpipe-v needs two per rank to fill both ways, {2 * ranks}", "use zb-v for fewer"
        )
    for rank in range(ranks):
        last = ranks - 1 - rank
        own = _Counted((rank, 2 * ranks - 1 - rank))
        put_off: list[int] = []  # which chunk's W is due, the oldest first
        own.add(*["F0"] * (2 * last))
        own.add(*["F0", "F1"] * (rank + 1))
        own.add(*["I1", "W1", "F1"] * last)
        own.add(*["F0", "B1", "F1", "B0"] * (m - 2 * ranks + rank + 1))
        own.add(*["B1", "F1", "B0"] * last)
        turning = rank + 1  # backward passes of both chunks, the later half of them without W
        for i, which in enumerate(chain.from_iterable(repeat((1, 0), turning))):
            if i < turning // 2 * 2 + (rank % 2 == 0):
                own.add(f"B{which}")
            else:
                own.add(f"I{which}")
                put_off.append(which)
        for _ in range(last):
            own.add(f"W{put_off.pop(0)}", "I0")
            put_off.append(0)
        own.add(*(f"W{which}" for which in put_off))
        yield _fused_counts(own)


def _fused_counts(own: _Counted) -> list[Action]:
    """Backward passes in one and those in two parts share the micro-batches of a chunk: counted together."""
    seen: dict[tuple[str, int], int] = {}
    found = []
    for kind, chunk, _ in own.found:
        counts = [("I", chunk), ("W", chunk)] if kind == "B" else [(kind, chunk)]
        found.append(Action(kind, chunk, seen.get(counts[0], 0)))
        for key in counts:
            seen[key] = seen.get(key, 0) + 1
    return found


Build = Callable[[int, int, int], Iterable[list[Action]]]
SCHEDULES: dict[str, Build] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
    "dualpipe-v": _dualpipe_v,
}
V_SHAPED = ("zb-v", "dualpipe-v")


def build(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> PipelineSchedule:
    """A schedule by name. `virtual`: chunks per rank; by default 1, of `interleaved` 2, and 2 of those in a V.
    Raises InputError where there is none."""
    if name not in SCHEDULES:
        raise InputError("schedule", name, "no such schedule", nearest(name, SCHEDULES))
    for field, value in (("ranks", ranks), ("micro-batches", micro_batches), ("virtual", virtual or 1)):
        if value < 1:
            raise InputError(field, value, "must be at least 1")
    usual = 2 if name in V_SHAPED or name == "interleaved" else 1
    chunks = virtual or usual
    if chunks != usual and name != "interleaved":
        raise InputError("virtual", chunks, f"{name} has {usual} per rank", "use interleaved, or leave it out")
    actions = tuple(map(tuple, SCHEDULES[name](ranks, chunks, micro_batches)))
    rank_of = v_shape(ranks) if name in V_SHAPED else round_robin(ranks, chunks)
    return PipelineSchedule(name, micro_batches, rank_of, actions)
