"""The Event: one thing that happens in a training step, on one rank.

The same record is predicted (cost/step/expand.py), recorded from the real step (runtime/comm/recorder.py), compared,
priced and drawn. Two events are the same if their `identity` is: all fields from kind to bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

Kind = Literal["compute", "collective", "p2p"]
Phase = Literal["F", "B", "I", "W", "opt"]
INSIDE = ("tp", "ring", "ulysses", "tokens", "ep", "ep+etp")
"""Axes over which layers communicate, in the middle of a unit's pass."""
Reduction = Literal["sum", "avg", "min", "max", "product"]


class Identity(NamedTuple):
    """The fields in which a predicted and a recorded event must agree."""

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


_identity = attrgetter(*Identity._fields)


@dataclass(frozen=True, slots=True)
class Event:
    """One compute, collective or point-to-point event.

    `bytes` are counted as in nccl-tests: of an all-reduce or broadcast the buffer; of an all-gather or reduce-scatter
    the gathered buffer; of an all-to-all the send buffer; of a message the payload. `alloc`: bytes allocated on top
    of those live at the start (the event's own peak); `free`: how many of these are released at the end. `at_most`:
    `bytes` is a bound, since what is sent depends on the gradients. `routed`: bytes, FLOPs and memory depend on which
    experts tokens go to, and assume balanced routing.
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

    def at(self, unit: str, micro_batch: int | None) -> Event:
        """Return a copy of the event for another unit and micro-batch. Expanding a step makes thousands, and
        `dataclasses.replace` takes twice as long."""
        return Event(
            self.kind,
            self.op,
            self.phase,
            unit,
            self.axis,
            self.group_size,
            self.peer,
            self.dtype,
            self.stage,
            self.chunk,
            micro_batch,
            self.bytes,
            self.flops,
            self.alloc,
            self.free,
            self.at_most,
            self.routed,
        )

    def matches(self, recorded: Event) -> bool:
        """Whether a recorded event matches this prediction; `at_most` and `routed` tolerate a difference in bytes."""
        tolerant = self.routed or (self.at_most and recorded.bytes <= self.bytes)
        other = recorded.identity
        return self.identity == (other._replace(bytes=self.bytes) if tolerant else other)

    @property
    def identity(self) -> Identity:
        """The fields that decide whether two events are the same."""
        return Identity._make(_identity(self))

    def __str__(self) -> str:
        where = f" micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        if self.kind == "compute":
            return f"{self.phase} {self.unit}{where} ({self.op}, {self.flops:,} FLOP)"
        over = f" over {self.axis} ({self.group_size} ranks)"
        return f"{self.op} {self.unit}{over}{where} ({self.bytes:,} B {self.dtype})"
