"""A pipeline schedule as data: the ordered actions of every pipeline rank, and which rank holds which chunk.

    F  forward of a chunk      B  its backward pass: I and W fused
    I  gradient of its input   W  gradients of its weights

each for one micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


class Action(NamedTuple):
    """One action of a rank on one chunk and micro-batch, written as torch does: 3F0 is the forward of chunk 3 for
    micro-batch 0. SEND_F sends the output of the chunk's F, RECV_F receives the input of it; SEND_B and RECV_B do the
    same for its backward pass."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The ordered `actions` of each rank, and the rank of each chunk (`rank_of`, in the order of the model)."""

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


def live_activations(actions: Sequence[Action]) -> list[int]:
    """Count the live activations after each action of a rank, in activations of one chunk for one micro-batch."""
    live, counts = 0, []
    for action in actions:
        live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        counts.append(live)
    return counts


def last_weight_grad_at(actions: Sequence[Action]) -> dict[int, int]:
    """Map each chunk of a rank to the index of the action that completes its weight gradients, in ascending order."""
    last: dict[int, int] = {}
    for at, action in enumerate(actions):
        if action.kind in ("B", "W"):
            last.pop(action.chunk, None)
            last[action.chunk] = at
    return last


def splits(s: PipelineSchedule) -> bool:
    """Whether any backward pass is split into I and W."""
    return any(action.kind == "I" for actions in s.actions for action in actions)


def round_robin(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the rank of each chunk when chunks are dealt out in turns: 0 1 2 0 1 2 for 3 ranks, virtual=2."""
    return tuple(chunk % ranks for chunk in range(ranks * virtual))


def v_shape(ranks: int) -> tuple[int, ...]:
    """Return the rank of each chunk in a V: 0 1 2 2 1 0 for 3 ranks. The last rank holds two adjacent chunks."""
    return (*range(ranks), *reversed(range(ranks)))
