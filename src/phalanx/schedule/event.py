"""The Event: one thing that happens in a training step, on one rank.

The same record is predicted (cost/program.py), recorded from the real step (runtime/record.py), compared,
priced and drawn. Two events are the same when `identity` is: kind to bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["compute", "collective", "p2p"]
Phase = Literal["F", "B", "I", "W", "opt"]
INSIDE = ("tp", "ring", "ulysses", "tokens", "ep", "ep+etp")
"""Axes over which layers communicate, in the middle of a unit's pass."""
Reduction = Literal["sum", "avg", "min", "max", "product"]


class Identity(NamedTuple):
    """What must be equal between a predicted and a recorded event."""

    kind: str
    op: str
    phase: str
    unit: str
    axis: str
    group_size: int
    peer: int | None
    dtype: str
    stage: int
    chunk: int
    micro_batch: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """`bytes` as nccl-tests counts: all-reduce, broadcast: the buffer; all-gather, reduce-scatter: the gathered
    buffer; all-to-all: the send buffer; p2p: the payload. `alloc` is what the event allocates above the bytes
    that are live when it starts (its own peak), `free` what is gone again when it ends. `at_most`: the bytes are a
    bound, what is sent depends on the gradients. `routed`: bytes, FLOPs and memory depend on which experts tokens go
    to; they are those of balanced routing.
    """

    kind: Kind
    op: str
    phase: Phase
    unit: str = ""
    axis: str = ""
    group_size: int = 1
    peer: int | None = None
    dtype: str = ""
    stage: int = 0
    chunk: int = 0
    micro_batch: int | None = None
    bytes: int = 0
    flops: int = 0
    alloc: int = 0
    free: int = 0
    at_most: bool = False
    routed: bool = False

    def matches(self, recorded: Event) -> bool:
        """Whether this prediction is what was recorded."""
        if self.at_most and recorded.bytes <= self.bytes:
            return self.identity == recorded.identity._replace(bytes=self.bytes)
        if self.routed:
            return self.identity == recorded.identity._replace(bytes=self.bytes)
        return self.identity == recorded.identity

    @property
    def identity(self) -> Identity:
        return Identity(
            self.kind,
            self.op,
            self.phase,
            self.unit,
            self.axis,
            self.group_size,
            self.peer,
            self.dtype,
            self.stage,
            self.chunk,
            self.micro_batch,
            self.bytes,
        )

    def __str__(self) -> str:
        where = f" micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        if self.kind == "compute":
            return f"{self.phase} {self.unit}{where} ({self.op}, {self.flops:,} FLOP)"
        over = f" over {self.axis} ({self.group_size} ranks)"
        return f"{self.op} {self.unit}{over}{where} ({self.bytes:,} B {self.dtype})"
