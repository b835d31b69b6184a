"""Pipeline schedules as the CSV of torch.distributed.pipelining and torchtitan: a line per rank, an action per cell.

Reads F, B, I, W, sends and receives. A forward and a backward pass that torch overlaps, (1F2;6B0)OVERLAP_F_B, are
read as two actions. FSDP's actions (UNSHARD, RESHARD, REDUCE_GRAD) are skipped: here the data-parallel engine decides
when to gather, reshard and reduce. Empty cells are idle.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError

_LARGEST = 2**24  # bytes of a schedule
_ACTION = re.compile(r"([0-9]{1,9})(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,9})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def to_csv(s: PipelineSchedule) -> str:
    """Return the CSV text of a schedule."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in s.actions)


def from_csv(path: Path) -> PipelineSchedule:
    """Read a schedule from a CSV file; a chunk belongs to the first rank that runs one of its passes. Raises
    InputError, with line and cell, if the file is not a schedule."""
    actions = tuple(tuple(action for cell in row for action in cell) for row in cells(path))
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if "_" not in action.kind:
                rank_of.setdefault(action.chunk, rank)
    chunks = len(rank_of)
    if not chunks:
        raise InputError("schedule", str(path), "holds no action", "a cell looks like 3F0")
    missing = next((c for c in range(chunks) if c not in rank_of), None)
    if missing is not None:
        raise InputError("schedule", str(path), f"has chunk {max(rank_of)}, but no action of chunk {missing}")
    micro_batches = 1 + max(a.micro_batch for row in actions for a in row)
    return PipelineSchedule(path.name, micro_batches, tuple(rank_of[c] for c in range(chunks)), actions)


def cells(path: Path) -> list[list[list[Action]]]:
    """Return the actions of every cell of every line of a CSV file, empty where a rank idles. Raises InputError."""
    text = read_text(path, "schedule", _LARGEST)
    return [
        [list(_actions(cell.strip(), f"{path}, line {line}, cell {at}")) for at, cell in enumerate(row.split(","), 1)]
        for line, row in enumerate(text.rstrip("\n").split("\n"), 1)
    ]


def _actions(cell: str, where: str) -> Iterator[Action]:
    pair = _PAIR.fullmatch(cell)
    for word in pair[1].split(";") if pair else [cell]:
        match = _ACTION.fullmatch(word.strip())
        if match:
            yield Action(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]
        elif word.strip() and not _FSDP.fullmatch(word.strip()):
            raise InputError(where, word.strip(), "is not an action", "write it like 3F0, 3B0 or 3SEND_F0")
