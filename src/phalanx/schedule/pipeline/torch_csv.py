"""Pipeline schedules as the CSV of torch.distributed.pipelining and torchtitan: a line per rank, an action per cell.

Read are F, B, I, W, sends and receives, and forward and backward passes that torch runs as one, (1F2;6B0)OVERLAP_F_B,
as the two that they are. What says when FSDP gathers, reshards and reduces (UNSHARD, RESHARD, REDUCE_GRAD) is the
data-parallel engine's affair here, and left out. Empty cells are idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from phalanx.schedule.pipeline.schedules import Action, PipelineSchedule
from phalanx.spec.errors import InputError

_ACTION = re.compile(r"(\d+)(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def written(s: PipelineSchedule) -> str:
    """The CSV of a schedule."""
    return "".join(",".join(map(str, own)) + "\n" for own in s.actions)


def read(path: Path) -> PipelineSchedule:
    """The schedule of a CSV file; a chunk is of the rank that does its passes. Raises InputError, with line and cell,
    for what is none."""
    actions = tuple(tuple(action for cell in own for action in cell) for own in cells(path))
    rank_of: dict[int, int] = {}
    for rank, own in enumerate(actions):
        for action in own:
            if "_" not in action.kind:
                rank_of.setdefault(action.chunk, rank)
    chunks = len(rank_of)
    if not chunks:
        raise InputError("schedule", str(path), "holds no action", "a cell is such as 3F0")
    missing = next((c for c in range(chunks) if c not in rank_of), None)
    if missing is not None:
        raise InputError("schedule", str(path), f"has chunk {max(rank_of)}, but nothing of chunk {missing}")
    micro_batches = 1 + max(a.micro_batch for own in actions for a in own)
    return PipelineSchedule(path.name, micro_batches, tuple(rank_of[c] for c in range(chunks)), actions)


def cells(path: Path) -> list[list[list[Action]]]:
    """The actions in every cell of every line of a CSV file; none where a rank is idle. Raises InputError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("schedule", str(path), f"cannot be read: {error}") from None
    return [
        [list(_actions(cell.strip(), f"{path}, line {line}, cell {at}")) for at, cell in enumerate(row.split(","), 1)]
        for line, row in enumerate(text.rstrip("\n").split("\n"), 1)
    ]


def _actions(cell: str, where: str) -> Iterator[Action]:
    pair = _PAIR.fullmatch(cell)
    for word in pair[1].split(";") if pair else [cell]:
        found = _ACTION.fullmatch(word.strip())
        if found:
            yield Action(found[2], int(found[1]), int(found[3]))  # type: ignore[arg-type]
        elif word.strip() and not _FSDP.fullmatch(word.strip()):
            raise InputError(where, word.strip(), "is no action", "one is such as 3F0, 3B0 or 3SEND_F0")
