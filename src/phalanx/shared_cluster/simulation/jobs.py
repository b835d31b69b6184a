"""A job of a trace, as the simulator reads it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TraceJob:
    """A gang of GPUs for a time: it starts with all of them or not at all."""

    row: int
    """Line of the trace."""
    submit: float
    """Seconds since the first submission."""
    duration: float
    """Seconds of the job on `gpus` well-placed GPUs."""
    gpus: int
    limit: float = 0.0
    """Seconds after which it would be killed, which schedulers plan with; at least the duration. 0: the duration."""
    widths: tuple[tuple[int, float], ...] = ()
    """(GPUs, speed over that on `gpus`) at which an elastic job can also run, ascending; speed 1 is full speed."""
    plan: str = ""
    """The plan.json from which its speed under a placement follows; None: placement does not matter."""
    priority: int = 0
    """A job of higher priority comes before all of lower ones, whatever the policy."""
    tokens: float = field(default=0.0)
    """Tokens that it trains on, if known."""

    @property
    def planned(self) -> float:
        """Seconds that a scheduler plans with: at least one, because a reservation cannot be empty."""
        return max(self.limit or self.duration, 1.0)
