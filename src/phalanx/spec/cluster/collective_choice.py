"""Which transport and algorithm serve a collective: decided once, kept in plan.json, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transport = Literal["native", "p2p", "shm"]


@dataclass(frozen=True)
class Choice:
    """For groups of `group_size` ranks on `hosts` hosts, as many on each, and buffers of `from_bytes` or more, up to
    the next choice.

    `algorithm` is of p2p alone. `reason`: what it costs, and what the next best would.
    """

    op: str
    group_size: int
    from_bytes: int
    transport: Transport
    algorithm: str = ""
    reason: str = ""
    hosts: int = 1

    @property
    def way(self) -> str:
        return f"{self.transport} {self.algorithm}".strip()


def pick(choices: tuple[Choice, ...], op: str, group_size: int, size_bytes: int, hosts: int = 1) -> Choice:
    """The choice that holds for a buffer (bytes as Event counts them): of this group size, or else, on one host, of
    the next larger one that was decided; native where there is none."""
    found = [
        c
        for c in choices
        if (c.op, c.hosts) == (op, hosts)
        and (c.group_size >= group_size if hosts == 1 else c.group_size == group_size)
        and c.from_bytes <= size_bytes
    ]
    nearest = min((c.group_size for c in found), default=0)
    native = Choice(op, group_size, 0, "native", hosts=hosts)
    return max((c for c in found if c.group_size == nearest), key=lambda c: c.from_bytes, default=native)
