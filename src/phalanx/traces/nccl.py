"""Reads what NCCL says of a run: its log (NCCL_DEBUG=INFO), and the dumps of its inspector, a JSON object a line.

References: NVIDIA/nccl, src/transport (lines `via NET/IB/0`), ext-profiler/inspector/README.md.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.traces.rank_trace import op_of


@dataclass(frozen=True)
class InspectedCollective:
    """One kind of collective as NCCL's inspector timed it."""

    op: str
    ranks: int
    nodes: int
    bytes: int
    """The inspector's message size; of all-gather and reduce-scatter times the ranks: the gathered buffer."""
    calls: int
    seconds: float
    """The median of a call."""


@dataclass(frozen=True)
class NcclLog:
    """What a log of NCCL_DEBUG=INFO says of the links in use."""

    links: dict[str, int]
    """Connections by transport: P2P, SHM, NET/IB, NET/Socket."""
    ranks: int
    nodes: int

    @property
    def cautions(self) -> list[str]:
        """Warnings of transports that are slower than the machine allows."""
        said = []
        if self.links.get("NET/Socket"):
            said.append("NCCL goes over sockets between nodes (NET/Socket): is the plugin or libibverbs missing?")
        if self.links.get("SHM"):
            said.append("GPUs of a node talk through the host's memory (SHM), not NVLink or PCIe (P2P)")
        return said


_VIA = re.compile(r"NCCL INFO Channel .*? via (P2P|SHM|NET/\w+)")
_LONGEST_S = 86400.0
_COMM = re.compile(r"NCCL INFO comm \S+ rank \d+ n[rR]anks (\d+) nNodes (\d+)")


def is_log(head: str) -> bool:
    """Whether a text is NCCL's log, or has parts of it."""
    return "NCCL INFO" in head


def read_log(text: str) -> NcclLog:
    """Return the transports of a log."""
    comms = [(int(m[1]), int(m[2])) for m in _COMM.finditer(text)]
    ranks, nodes = max(comms, default=(0, 0))
    return NcclLog(dict(Counter(m[1] for m in _VIA.finditer(text))), ranks, nodes)


def is_dump(head: str) -> bool:
    """Whether a text is the inspector's."""
    return '"coll_perf"' in head


def read_dump(lines: Iterable[str]) -> tuple[list[InspectedCollective], int]:
    """Return the collectives of a dump, by operation, group and bytes, and the number of lines that could not be
    used, such as a collective of a single rank, which sends nothing."""
    times: dict[tuple[str, int, int, int], list[float]] = {}
    header: dict[str, Any] = {}
    odd = 0
    for line in lines:
        try:
            record = json.loads(line)
            header = record.get("header", header)
            if (of := record.get("coll_perf")) is None:
                continue
            op, ranks = op_of(str(of["coll"])), int(header["n_ranks"])
            factor = ranks if op in ("all_gather", "reduce_scatter") else 1
            key = (op, ranks, int(header.get("nnodes", 1)), factor * int(of["coll_msg_size_bytes"]))
            seconds = float(of["coll_exec_time_us"]) / 1e6
            if not (2 <= ranks < 2**31 and 1 <= key[2] <= ranks and 0 < key[3] < 2**53 and 0 < seconds < _LONGEST_S):
                raise ValueError
            times.setdefault(key, []).append(seconds)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            odd += bool(line.strip())
    return [InspectedCollective(*key, len(of), float(np.median(of))) for key, of in sorted(times.items())], odd
