"""What ended a run, as torch says it in a log: an allocation that failed, collectives that ran into their timeout, or
ranks that never met.

References: pytorch, c10/cuda/CUDACachingAllocator.cpp (CUDA out of memory), torch/csrc/distributed/c10d/
ProcessGroupNCCL.cpp (WorkNCCL::checkTimeout, "Watchdog caught collective operation timeout"), socket.cpp ("The
client socket has timed out"), TCPStore.cpp ("clients joined"), torch/distributed/elastic/rendezvous/api.py; CUDA
Runtime API, cudaErrorSystemNotReady (802); NCCL, src/init.cc ("Duplicate GPU detected").
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.spec.byte_sizes import parse_bytes, write_bytes
from phalanx.traces.rank_trace import op_of


@dataclass(frozen=True)
class FailedAllocation:
    """The first allocation of a log that failed."""

    device: str
    asked_bytes: float
    free_bytes: float
    """Of the device."""
    allocated_bytes: float
    idle_bytes: float
    """Reserved by the allocator, and held by no tensor."""

    @property
    def verdict(self) -> str:
        """Whether memory was full, or in pieces."""
        asked, held = write_bytes(self.asked_bytes), write_bytes(self.allocated_bytes)
        idle, short = write_bytes(self.idle_bytes), self.asked_bytes - self.free_bytes - self.idle_bytes
        said = f"out of memory: GPU {self.device} was asked for {asked}, while tensors held {held}"
        if short > 0:
            return f"{said}: {write_bytes(short)} are missing, however its memory is laid out"
        return (
            f"{said}, and {idle} lay idle in pieces too small for it: set PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True (before torch 2.1 max_split_size_mb)"
        )


@dataclass(frozen=True)
class StuckCollective:
    """The earliest collective that a rank waited for until its timeout."""

    rank: int
    number: int
    """Of the rank's collectives in its group."""
    op: str
    elements: int | None
    """Of its input; None where the release does not print them."""
    timeout_s: float


@dataclass(frozen=True)
class Failures:
    """How the run of a log ended."""

    allocation: FailedAllocation | None
    stuck: tuple[StuckCollective, ...]
    """By rank."""
    starts: tuple[str, ...] = ()
    """Sentences on ranks that never met."""

    def __bool__(self) -> bool:
        return self.allocation is not None or bool(self.stuck or self.starts)

    @property
    def verdicts(self) -> list[str]:
        """A sentence for each kind of failure."""
        return [
            *([self.allocation.verdict] if self.allocation else ()),
            *([_of_stuck(self.stuck)] if self.stuck else ()),
            *self.starts,
        ]


_SIZE = r"(\d{1,12}(?:\.\d{1,9})? (?:[KMG]iB|bytes))"
_OUT = re.compile(rf"out of memory\. Tried to allocate {_SIZE}")
_SINCE_2_1 = {
    "device": re.compile(r"GPU (\d+) has a total"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "allocated": re.compile(rf"allocated memory {_SIZE} is allocated by PyTorch"),
    "idle": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
_BEFORE = {
    "device": re.compile(r"\(GPU (\d+);"),
    "free": re.compile(rf"{_SIZE} free"),
    "allocated": re.compile(rf"{_SIZE} already allocated"),
    "reserved": re.compile(rf"{_SIZE} reserved in total"),
}
_MESSAGE = 700
"""Characters of torch's message at most."""
_STUCK = re.compile(
    r"\[Rank (\d{1,8})\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,40})(?:, NumelIn=(\d{1,18}))?(?:[^\n]{,99}?Timeout\(ms\)=(\d{1,12}))?"
)
_STARTS = (
    (
        r"socket has timed out after (\d{1,9}) ?(m?s)\w{0,6} while trying to connect to "
        r"\(([^,()\s]{1,253}), (\d{1,5})\)",
        "nothing answered at {2} port {3} for {0} {1}, where rank 0 keeps the store: see whether its host runs, "
        "every node was started with this address and can resolve and reach it (getent hosts {2}), and no firewall "
        "closes the port",
    ),
    (
        r"Timed out after (\d{1,9}) seconds waiting for clients\. (\d{1,9})/(\d{1,9}) clients joined",
        "{1} of {2} processes joined the store in {0} s: look for the error of the others, or for nodes started with "
        "another address, port or number of ranks",
    ),
    (
        r"\b(RendezvousTimeoutError)\b",
        "fewer nodes met than --nnodes asks for before torchrun's time ran out: look for nodes that did not start, "
        "or with another --rdzv-id or --rdzv-endpoint; nodes that start late need --rdzv-conf join_timeout=SECONDS",
    ),
    (
        r"Error 802: |Cuda failure 802 |cudaErrorSystemNotReady|system not yet initialized",
        "CUDA is not ready (error 802): on a host of NVSwitches its fabric manager does not run, or is of another "
        "release than the driver: systemctl status nvidia-fabricmanager; nvidia-smi -q says the Fabric State",
    ),
    (
        r"Duplicate GPU detected : rank (\d{1,8}) and rank (\d{1,8}) both on CUDA device (\w{1,16})",
        "ranks {0} and {1} are on one GPU ({2}): each rank needs torch.cuda.set_device(LOCAL_RANK), and a GPU of its "
        "own",
    ),
)
"""What torch or NCCL print when ranks do not meet, and what it says."""
_MOST_NAMED = 10
"""Ranks that a sentence names."""


def read(text: str) -> Failures:
    """Return the failures of a log."""
    stuck: dict[int, StuckCollective] = {}
    for m in _STUCK.finditer(text):
        rank, number = int(m[1]), int(m[2])
        if rank not in stuck or number < stuck[rank].number:
            elements = int(m[4]) if m[4] else None
            stuck[rank] = StuckCollective(rank, number, op_of(m[3]) or m[3].lower(), elements, int(m[5] or 0) / 1e3)
    starts = (said.format(*line.groups()) for pattern, said in _STARTS if (line := re.search(pattern, text)))
    return Failures(_allocation(text), tuple(stuck[rank] for rank in sorted(stuck)), tuple(starts))


def _allocation(text: str) -> FailedAllocation | None:
    """Return the first allocation that failed and whose message says what was held; None: none did."""
    for m in _OUT.finditer(text):
        message = text[m.start() : m.start() + _MESSAGE]
        for patterns in (_SINCE_2_1, _BEFORE):
            words = {name: match[1] for name, p in patterns.items() if (match := p.search(message))}
            if len(words) == len(patterns):
                device = words.pop("device")
                sizes = {name: _bytes(word) for name, word in words.items()}
                idle = sizes.get("idle", sizes.get("reserved", 0.0) - sizes["allocated"])
                return FailedAllocation(device, _bytes(m[1]), sizes["free"], sizes["allocated"], max(0.0, idle))
    return None


def _bytes(words: str) -> float:
    number, unit = words.split()
    return 0.0 if not float(number) else parse_bytes(f"{number}{unit.removesuffix('bytes')}")


def _of_stuck(stuck: Sequence[StuckCollective]) -> str:
    """Return who waits for whom: ranks in one collective wait for those that print nothing, ranks in several for each
    other."""
    by_call: dict[tuple[int, str, int | None], list[int]] = {}
    for one in stuck:
        by_call.setdefault((one.number, one.op, one.elements), []).append(one.rank)
    limit = f" for {stuck[0].timeout_s:,.0f} s" if stuck[0].timeout_s else ""
    said = [f"{_ranks(ranks)} waited in {_call(*call)}" for call, ranks in sorted(by_call.items(), key=_first)]
    if len(by_call) == 1:
        return (
            f"NCCL timed out: {said[0]}{limit}: a rank of the group that prints no such line did not get there: look "
            "for its error before, or for what it was doing (py-spy dump): loading, saving, a longer batch"
        )
    return (
        f"NCCL timed out: {'; '.join(said)}{limit}: if they are of one group, the ranks issued different "
        "collectives: a branch, a number of batches, or a loss that not all ranks have"
    )


def _first(item: tuple[tuple[int, str, int | None], list[int]]) -> tuple[int, int]:
    return item[0][0], item[1][0]


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def _call(number: int, op: str, elements: int | None) -> str:
    return f"{op} number {number:,}" + ("" if elements is None else f", of {elements:,} elements")
