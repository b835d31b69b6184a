"""Transport and algorithm of a collective: chosen once by the planner, kept in plan.json, and therefore the same on
every rank."""

from dataclasses import dataclass

from phalanx.spec.job import Transport, is_algorithm_file
from phalanx.spec.ranges import Bytes, Name, Natural, Ranks, require_ranges


@dataclass(frozen=True)
class Choice:
    """The transport of one collective for a group size and a range of buffer sizes."""

    op: Name
    """The collective, such as `all_reduce`."""
    group_size: Natural
    """Ranks in the group."""
    from_bytes: Bytes
    """The smallest buffer it applies to; its range ends where the next choice of the same group begins."""
    transport: Transport
    algorithm: Name = ""
    """Schedule, for transport p2p only."""
    reason: Name = ""
    """Cost of this choice and of the next best, for people."""
    hosts: Ranks = 1
    """Hosts that the group spans, with the same number of ranks on each."""

    def __post_init__(self) -> None:
        require_ranges(self, "choices.collectives")

    @property
    def way(self) -> str:
        """Transport and algorithm, as named in charts and tables."""
        return f"{self.transport} {self.algorithm}".strip()


def pick(choices: tuple[Choice, ...], op: str, group_size: int, size_bytes: int, hosts: int = 1) -> Choice:
    """Return the choice for a buffer of `size_bytes` (as Event counts them).

    Falls back on one host to the next larger group size, and to native if there is none.
    """
    candidates = [
        c
        for c in choices
        if (c.op, c.hosts) == (op, hosts)
        and (
            c.group_size == group_size
            or (c.group_size > group_size and hosts == 1 and not is_algorithm_file(c.algorithm))
        )
        and c.from_bytes <= size_bytes
    ]
    nearest = min((c.group_size for c in candidates), default=0)
    chosen = max((c for c in candidates if c.group_size == nearest), key=lambda c: c.from_bytes, default=None)
    return chosen or Choice(op, group_size, 0, "native", hosts=hosts)
