"""A collective algorithm from a user's JSON file: its rounds, as `phalanx collectives show --json` prints them.

    {"op": "all_reduce", "ranks": 4, "rounds": [
      {"sends": [{"source": 0, "destination": 1, "chunk": 0, "adds": true}, ...]}, ...]}

Chunks are equal parts of the buffer, as many as `chunks` or a printed algorithm's `holds` say, else as many as ranks;
of an all-to-all they are its blocks: number i x ranks + j goes from rank i to rank j. `root` of rooted operations is
0 by default. What a rank starts and ends with is the operation's (registry.py). A file is proved before it is
priced or run.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.schedule.collectives.ir import Holdings, Ints, Schedule
from phalanx.spec.documents import read_json, require_unchanged, version_of
from phalanx.spec.errors import InputError
from phalanx.spec.job import is_algorithm_file

_MOST_CHUNKS = 2**16
_MOST_CELLS = 2**27
"""(rank, chunk, contributor) that a proof counts: 256 MiB."""
_KEYS = ("source", "destination", "chunk", "adds")


@dataclass(frozen=True)
class AlgorithmFile:
    """An algorithm for one operation and number of ranks. `rows`: (round, source, destination, chunk, adds) of each
    send, (sends, 5)."""

    name: str
    op: str
    ranks: int
    root: int
    chunks: int
    rows: Ints

    def schedule(self, bounds: Ints, size: int, start: Holdings, end: Holdings) -> Schedule:
        """Return the algorithm for a buffer whose chunks begin and end at `bounds`, (chunks + 1,)."""
        number, source, destination, chunk, adds = self.rows.T
        length = bounds[chunk + 1] - bounds[chunk]
        sent = length > 0
        return Schedule(
            op=self.op,
            algorithm=self.name,
            ranks=self.ranks,
            size=size,
            round=number[sent],
            source=source[sent],
            destination=destination[sent],
            offset=bounds[chunk][sent],
            length=length[sent],
            reduces=adds[sent].astype(bool),
            start=start,
            end=end,
        )


def ranks_of(algorithm: str | None, stated: int | None, default: int) -> int:
    """Return the number of ranks: `stated`, else that of the file if `algorithm` is one, else `default`. Raises
    InputError."""
    if stated is None and algorithm is not None and is_algorithm_file(algorithm):
        return algorithm_file(algorithm).ranks
    return default if stated is None else stated


def algorithm_file(name: str) -> AlgorithmFile:
    """Read an algorithm; it is not proved yet. Raises InputError for a file that is none, and for one that was edited
    since this program read it."""
    version, algorithm = _read(name)
    require_unchanged(Path(name), "algorithm", version)
    return algorithm


@lru_cache(maxsize=32)
def _read(name: str) -> tuple[tuple[int, int], AlgorithmFile]:
    version, table = version_of(Path(name)), read_json(Path(name), "algorithm")
    if not isinstance(table, dict) or not isinstance(table.get("rounds"), list):
        raise InputError("algorithm", name, "has no rounds", "write it as phalanx collectives show ring --json does")
    op, ranks = str(table.get("op", "")), _count(name, table, "ranks", None, 2**12)
    blocks = {"all_to_all": ranks * ranks, "broadcast": 1, "reduce": 1, "all_reduce": 1}.get(op, ranks)
    chunks = _count(name, table, "chunks", _shown_chunks(table["rounds"]) or max(blocks, ranks), _MOST_CHUNKS)
    if chunks % blocks or (op in ("all_to_all", "barrier") and chunks != blocks):
        raise InputError("chunks", chunks, f"of {name} is no multiple of {blocks}", "cut the buffer evenly")
    if (cells := ranks * ranks * chunks) > _MOST_CELLS:
        reason = f"of {name} over {ranks} ranks make {cells:,} contributions to follow, more than {_MOST_CELLS:,}"
        raise InputError("chunks", chunks, reason, "write it for fewer ranks, or in fewer chunks")
    root = _count(name, table, "root", 0, ranks - 1, least=0)
    rows = [
        (number, *_send(f"{name}, round {number + 1}, send {i + 1}", send, ranks, chunks))
        for number, sends in enumerate(filter(None, map(_sends, table["rounds"])))  # the start sends nothing
        for i, send in enumerate(sends)
    ]
    return version, AlgorithmFile(name, op, ranks, root, chunks, np.array(rows, dtype=np.int64).reshape(-1, 5))


def _count(name: str, table: dict[str, Any], key: str, default: int | None, most: int, least: int = 1) -> int:
    value = table.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise InputError(key, value, f"of {name} is no number from {least} to {most}")
    return value


def _shown_chunks(rounds: list[Any]) -> int | None:
    """Return the number of chunks of a rank in a printed algorithm (`holds` of its first round); None without."""
    holds = rounds[0].get("holds") if rounds and isinstance(rounds[0], dict) else None
    return len(holds[0]) if isinstance(holds, list) and holds and isinstance(holds[0], list) else None


def _sends(entry: Any) -> list[Any]:
    """Return the sends of a round, which is a list of them or an object with such a list under `sends`."""
    sends = entry.get("sends") if isinstance(entry, dict) else entry
    return sends if isinstance(sends, list) else [entry]


def _send(where: str, send: Any, ranks: int, chunks: int) -> tuple[int, int, int, int]:
    if not isinstance(send, dict) or not set(send) <= set(_KEYS) or not set(_KEYS[:3]) <= set(send):
        raise InputError(where, None, "is not a send", f"give {', '.join(_KEYS)}")
    source, destination, chunk, adds = (send.get(key, False) for key in _KEYS)
    for key, value, most in (
        ("source", source, ranks),
        ("destination", destination, ranks),
        ("chunk", chunk, chunks),
    ):
        if type(value) is not int or not 0 <= value < most:
            raise InputError(where, value, f"{key} is no number from 0 to {most - 1}")
    if source == destination:
        raise InputError(where, source, "sends to itself", "a rank keeps what it has")
    if type(adds) is not bool:
        raise InputError(where, adds, "adds is true or false")
    return source, destination, chunk, int(adds)
