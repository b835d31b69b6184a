"""Simulated hosts with shaped links for tests: ranks on the hosts of benchmarks.lab.hosts, forked like all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import hosts as lab
from benchmarks.lab.hosts import Lab
from support.forked_cli import Launcher
from support.rank_pool import Pool, Where


class Hosts:
    """`hosts` x `ranks` ranks connected by links. `run` is that of a pool; `sent` counts what each host sends."""

    def __init__(self, lab: Lab, ranks: int) -> None:
        self.lab, self.ranks = lab, ranks
        names = tuple(map(lab.namespace, range(lab.hosts)))
        self.pool = Pool(Where(lab.hosts * ranks, ranks, lab.address(0), names))

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        return self.pool.run(self.lab.hosts * self.ranks, function, *args, timeout_s=timeout_s)

    def sent(self, function: Callable[..., Any], *args: Any) -> list[int]:
        """Return the bytes that each host sends to others while its ranks call a function."""
        before = self.lab.traffic()
        self.run(function, *args)
        return [(now - then).sent for now, then in zip(self.lab.traffic(), before, strict=True)]

    def torchrun(self, host: int, here: Path, *words: str, **options: str) -> Launcher:
        """Start `phalanx words` on one host under torchrun, whose rendezvous joins the others."""
        start = self.lab.torchrun(host, self.ranks, [], {k.replace("_", "-"): v for k, v in options.items()})
        at = start.index(str(lab.TORCHRUN)) + 1
        instead = {"phalanx": "phalanx.cli.app"}
        return Launcher(here, *words, torchrun=start[at:], namespace=self.lab.namespace(host), instead=instead)


@contextmanager
def shaped(hosts: int, ranks: int, rate: str | None = None) -> Iterator[Hosts]:
    """Create hosts with links of a rate; skip the test, with the reason, where there can be no lab."""
    why = lab.unavailable()
    if why:
        pytest.skip(f"the lab {why}")
    with Lab(hosts, lab.bytes_per_s(rate) if rate else None) as made:
        found = Hosts(made, ranks)
        try:
            yield found
        finally:
            found.pool.stop()
