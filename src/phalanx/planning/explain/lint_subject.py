"""The interfaces of a lint: the priced strategy that it reads, and the finding that it reports."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Finding:
    """One anti-pattern found in a strategy."""

    name: str
    """Key in LINTS, `faster-setting` or `less-memory`."""
    problem: str
    """The problem, with numbers."""
    remedy: str
    """The remedy."""


class Alternative(Protocol):
    """Another strategy that is legal and fits, with its step time in seconds and its memory in bytes."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes_(self) -> float: ...


class LintSubject(Protocol):
    """A strategy and its pricing: by the formulas of a software stack (planning/explain/analytic.py), or exactly, as
    our own runtime on a measured machine (planning/explain/exact.py)."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def gpus(self) -> int: ...
    @property
    def model(self) -> ModelSpec: ...
    @property
    def cluster(self) -> ClusterSpec: ...
    @property
    def job(self) -> Job: ...
    @property
    def comparable_seconds(self) -> float:
        """Step time, priced in the same way as `alternative`."""

    @property
    def memory(self) -> tuple[float, int]:
        """Bytes needed by the fullest rank, and bytes available to it."""

    @property
    def host_bytes(self) -> float:
        """Bytes of model state that each node's host holds."""

    @property
    def headroom(self) -> float:
        """Share of the available bytes that a search, and an `alternative`, must leave free."""

    def exposed_seconds(self, axis: str) -> float:
        """Return the exposed seconds of an axis's communication in a step."""

    @property
    def tensor_parallel(self) -> float:
        """Tensor-parallel communication as a share of the step."""

    @property
    def bubble(self) -> float:
        """Bubble as a share of the step."""

    @property
    def imbalance(self) -> float:
        """Excess of the slowest pipeline rank over the mean, as a share of the mean."""

    @property
    def gradients_sent(self) -> float:
        """Bytes of gradients that a rank sends in a step."""

    def sets(self, field: str) -> bool:
        """Whether a configuration sets a field of the strategy; else the program's code does, or nothing."""

    def offloaded(self) -> Iterator[tuple[str, Alternative]]:
        """Yield (settings that move state to the host, the price with them) for each that fits."""

    def gains(self) -> Iterator[tuple[str, str, Alternative]]:
        """Yield (field or option, the settings that change it, the price with them) of every single change that is
        legal and fits."""

    def alternative(self, s: Strategy) -> Alternative | None:
        """Price another strategy; None if it is not legal or does not fit."""


Lint = Callable[[LintSubject], Iterator[Finding]]
