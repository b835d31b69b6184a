"""What ranks measure together, with links whose lines are known: messages, collectives, levels, hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fitted_cluster
from support.imagined_machine import Machine, imagined

from phalanx.measure import all_hosts, collectives, links, steal_time, worker
from phalanx.measure.fit import FittedLine
from phalanx.measure.links import BETWEEN, INSIDE, RealWire, TierLines
from phalanx.measure.steal_time import TimedRounds, others_s, stolen_s
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.cluster.spec import KernelRates


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Let the measurements run on an imagined machine."""
    return partial(imagined, monkeypatch)


class _Wire:
    """A pair's link: α + β n; the first message takes ten times as long."""

    def __init__(self, m: Machine, alpha: float, beta: float) -> None:
        self.m, self.alpha, self.beta, self.pairs = m, alpha, beta, list[Any]()

    def exchange(self, pair: Any, mine: int, place: int, source: Any, target: Any, label: Any) -> SimpleNamespace:
        assert mine == place
        assert source.numel() == target.numel()
        self.pairs.append((pair, place))
        slow = 10.0 if len(self.pairs) == 1 else 1.0
        seconds = slow * (self.alpha + self.beta * 4 * source.numel())
        return SimpleNamespace(wait=lambda: setattr(self.m, "now", self.m.now + seconds))


def _wire(m: Machine, rank: int, alpha: float, size: int = 4, local: int = 4) -> tuple[RealWire, _Wire]:
    world = SimpleNamespace(rank=rank, size=size, local_size=local, device=torch.device("cpu"))
    wire = _Wire(m, alpha, 1e-9)
    comm: Any = SimpleNamespace(world=world, barrier=m.barrier, wire=wire)
    return RealWire(comm), wire


@pytest.mark.parametrize(("alpha", "count"), [(1e-4, 30), (0.3, 4), (0.05, 6)])
def test_messages_of_a_pair_have_their_time_until_there_are_enough(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, alpha: float, count: int
) -> None:
    """Thirty short ones; of long ones four at least, and until they took 0.8 s, the first with them."""
    monkeypatch.setattr(links.dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(links, "stolen_s", lambda: 0.0)
    real, wire = _wire(machine(), 0, alpha)
    found = real.exchange(INSIDE, 4096, False)
    assert found == pytest.approx([alpha + 4096e-9] * count)
    assert set(wire.pairs) == {((0, 1), 1)}


def test_disturbed_messages_are_repeated_four_times_as_long(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    stolen = count()
    monkeypatch.setattr(links.dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(links, "stolen_s", lambda: float(next(stolen)))
    real, _ = _wire(machine(), 0, 0.1)
    assert 20 < len(real.exchange(INSIDE, 4096, False)) + 10 < 40


@pytest.mark.parametrize(
    ("tier", "together", "taking_part"),
    [(INSIDE, False, {0, 1}), (INSIDE, True, {0, 1, 3, 4}), (BETWEEN, False, {0, 3}), (BETWEEN, True, set(range(6)))],
)
def test_one_pair_or_all_exchange_and_everybody_has_the_slowest_time(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, tier: str, together: bool, taking_part: set[int]
) -> None:
    """Two hosts of three ranks: one of each host is left over inside."""

    def slowest(times: torch.Tensor, op: object) -> None:
        times[0] = max(float(times[0]), 0.2)

    monkeypatch.setattr(links.dist, "all_reduce", slowest)
    monkeypatch.setattr(links, "stolen_s", lambda: 0.0)
    sent = set()
    for rank in range(6):
        real, wire = _wire(machine(), rank, 1e-3, 6, 3)
        assert set(real.exchange(tier, 64, together)) == {0.2}
        sent |= {rank} if wire.pairs else set()
    assert sent == taking_part


def test_additions_are_timed_after_one_to_warm_up(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = machine((10.0, 2.0))
    added: list[tuple[int, int]] = []

    def combine(op: str, into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        added.append((len(a), len(b)))
        m.work(1e-3)

    monkeypatch.setattr(links, "combine", combine)
    real, _ = _wire(m, 0, 1.0)
    assert real.add(4096) == pytest.approx([2e-3, 1e-3, 1e-3, 1e-3])
    assert set(added) == {(1024, 1024)}


def test_one_pair_alone_shares_its_link_with_nobody() -> None:
    asked: list[bool] = []

    def exchange(tier: str, size: int, together: bool) -> list[float]:
        asked.append(together)
        return [1e-5 + 1e-9 * size]

    wire: Any = SimpleNamespace(exchange=exchange)
    for pairs, shared in ((1, False), (2, True)):
        asked.clear()
        found = links.measure_tier(wire, "host", pairs)
        assert (found.together is not None, any(asked)) == (shared, shared)
        assert (found.pairs, [n for n, _ in found.points]) == (pairs, list(links.SIZES))


def test_a_tier_says_what_its_lines_say() -> None:
    alone = FittedLine(2e-6, 1e-9, 0.05, (1e-6, 3e-6), (0.5e-9, 2e-9))
    for ratio, uplink in ((1.0, None), (1.2, None), (2.0, 3 / 2e-9)):
        tier = TierLines("network", 3, alone, replace(alone, beta=ratio * 1e-9), ()).tier(12)
        assert tier.uplink_bandwidth_bytes_per_s_per_direction == (
            uplink if uplink is None else pytest.approx(uplink)
        )
        assert (tier.name, tier.ranks, tier.latency_s, tier.origin) == ("network", 12, 2e-6, "measured")
        assert tier.source.endswith("median error 5.0%; 90 % range 0.5 to 2 GB/s")
    assert TierLines("host", 1, replace(alone, beta=0.0), None, ()).uplink is None


@pytest.mark.parametrize(("hosts", "quick"), [(1, False), (1, True), (2, False)])
def test_every_way_of_every_collective_has_its_own_line(
    monkeypatch: pytest.MonkeyPatch, hosts: int, quick: bool
) -> None:
    """Its α and β, from rounds of which one in three is disturbed, at each size once."""
    ways = [collectives.TransportAlgorithm("native"), collectives.TransportAlgorithm("p2p", "ring")]
    monkeypatch.setattr(collectives, "candidates", lambda *_: iter(ways))
    asked: list[tuple[str, int, int]] = []

    def rounds(comm: Any, tried: dict[str, Any], count: int) -> dict[str, TimedRounds]:
        call = next(iter(tried.values()))[0]
        n = 4 * max(call.source.numel(), call.target.numel())
        asked.append((call.op, n, count))
        line = {name: (i + 1) * (1e-5 + 1e-9 * n) for i, name in enumerate(tried)}
        return {name: TimedRounds((t, 9 * t, t, t), (0.0, 0.5, 0.0, 0.0)) for name, t in line.items()}

    monkeypatch.setattr(collectives, "rounds", rounds)
    comm: Any = SimpleNamespace(
        world=SimpleNamespace(rank=1, size=4, local_size=4 // hosts),
        status=SimpleNamespace(now=lambda _: None),
        ranks=lambda axis: (0, 1, 2, 3),
        hosts=lambda ranks: hosts,
        buffer=lambda n, dtype: torch.empty(n, dtype=dtype),
    )
    fits = collectives.measure_collectives(comm, "world", quick)
    assert [(f.op, f.way) for f in fits] == [(op, str(way)) for op in collectives.OPS for way in ways]
    for f in fits:
        times = 1 + (f.transport == "p2p")
        assert (f.alpha_s, f.beta_s_per_byte) == pytest.approx((times * 1e-5, times * 1e-9))
        assert (f.group_size, f.hosts) == (4, hosts)
        assert [n for op, n, _ in asked if op == f.op] == [n for n, _ in f.points]
    sizes = [n for n, _ in fits[0].points]
    assert sizes == sorted(set(sizes))
    assert max(sizes) == (2**22 if hosts > 1 else 2**22 if quick else 2**24)
    assert {n for *_, n in asked} == {2 if quick else 5 if hosts > 1 else 7}


def test_a_larger_buffer_takes_no_less_time() -> None:
    way = collectives.TransportAlgorithm("native")
    found = collectives._fit("all_reduce", 2, way, (1, 2, 3, 4), [5.0, 2.0, 9.0, 3.0], 1)
    assert found.points == ((1, 2.0), (2, 2.0), (3, 3.0), (4, 3.0))


def test_only_what_was_disturbed_is_timed_again_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[set[str], bool]] = []

    def timed(comm: Any, tried: dict[str, Any], count: int, warm: bool) -> dict[str, TimedRounds]:
        calls.append((set(tried), warm))
        share = {"calm": 0.0, "noisy": 0.5}
        return {name: TimedRounds((1.0,) * count, (share[name],) * count) for name in tried}

    monkeypatch.setattr(collectives, "_rounds", timed)
    tried: Any = dict.fromkeys(("calm", "noisy"))
    found = collectives.rounds(SimpleNamespace(), tried, 3)  # type: ignore[arg-type]
    assert calls == [({"calm", "noisy"}, False), ({"noisy"}, True), ({"noisy"}, True)]
    assert [len(found[name].seconds) for name in ("calm", "noisy")] == [3, 9]


@pytest.mark.parametrize(("rank", "kept"), [(0, ()), (0, (1,)), (1, ()), (3, (1,))])
def test_a_host_measures_each_level_that_is_not_kept_with_the_ranks_that_take_part(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    kept: tuple[int, ...],
    tmp_path: Any,
) -> None:
    """Six rounds where all ranks compute and three where fewer do; parts are counted to the last."""
    one = fitted_cluster.laptop(4)
    rates = {n: replace(one.kernels[0], concurrent=n) for n in (1, 2, 4)}
    timed: list[tuple[int, int, int, int]] = []

    def kernel_rates(comm: Any, ladder: Any, threads: int, concurrent: int, over: Any, rounds: int) -> KernelRates:
        assert {(f.op, f.group_size) for f in over} == ({("all_reduce", concurrent)} if concurrent > 1 else set())
        timed.append((comm.world.size, threads, concurrent, rounds))
        return rates[concurrent]

    monkeypatch.setattr(worker, "_read", lambda _: ([rates[n] for n in kept], []))
    monkeypatch.setattr(worker, "kernel_rates", kernel_rates)
    monkeypatch.setattr(worker.kernels, "Ladder", lambda *_: None)
    monkeypatch.setattr(worker, "Comm", lambda world, *_: SimpleNamespace(world=world, mesh=None))
    monkeypatch.setattr(worker, "agreed_choices", lambda fits, comm: ())
    monkeypatch.setattr(
        worker.collectives,
        "measure_collectives",
        lambda comm, axis, quick: [fitted_cluster.fit("native", 1e-5, 1e-9, comm.world.size)],
    )
    monkeypatch.setattr(worker, "measure_figures", lambda *_: [])
    comm: Any = SimpleNamespace(
        world=replace(ALONE, rank=rank, size=4, local_size=4),
        status=SimpleNamespace(now=lambda _: None),
        barrier=lambda: None,
    )
    cache = tmp_path / "kept.json"
    rows = worker.measure_host(comm, "float32", 2, worker.levels(4), cache=cache)
    mine = [n for n in (1, 2, 4) if n > rank and n not in kept]
    assert timed == [(n, 2, n, 6 if n == 4 else 3) for n in mine]
    assert [row["concurrent"] for row in rows["kernels"]] == [*kept, *mine]
    assert cache.exists() == (rank == 0)
    said = [line.rpartition("(")[2] for line in capsys.readouterr().err.splitlines()]
    parts = sum(1 if n == 1 else 2 for n in mine) + 1
    assert said == ([f"{i + 1} of {parts})" for i in range(parts)] if rank == 0 else [])


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 1), (1, 2)])
def test_ranks_of_hosts_measure_every_tier_and_group_they_have(
    monkeypatch: pytest.MonkeyPatch, hosts: int, local: int
) -> None:
    size = hosts * local
    grid = all_hosts._grid(hosts, local)
    assert grid.world == size
    if local > 1:
        assert (grid.hosts("dp_shard", local), grid.hosts("dp_replicate", local) or 1) == (1, hosts)
    said: list[str] = []
    line = FittedLine(1e-6, 1e-9, 0.0, (1e-6, 1e-6), (1e-9, 1e-9))
    one = fitted_cluster.laptop(2)
    rows = worker.table_rows(one.kernels, [], one.figures)
    monkeypatch.setattr(all_hosts, "_make_groups", lambda _: None)
    monkeypatch.setattr(all_hosts, "RealWire", lambda _: None)
    status = SimpleNamespace(now=said.append)
    monkeypatch.setattr(all_hosts, "Comm", lambda world, *_: SimpleNamespace(world=world, status=status))
    monkeypatch.setattr(all_hosts, "measure_tier", lambda _, name, pairs: TierLines(name, pairs, line, None, ()))
    axes: list[str] = []

    def collective(comm: Any, axis: str) -> list[Any]:
        axes.append(axis)
        ranks = size if axis == "world" else 2
        return [replace(fitted_cluster.fit("native", 1e-5, 1e-9, ranks), hosts=1 + (axis != "dp_shard"))]

    def rates(comm: Any, ladder: Any, threads: int, concurrent: int, over: Any, rounds: int) -> KernelRates:
        assert (threads, concurrent, rounds, {f.group_size for f in over}) == (3, local, 6, {size})
        return one.kernels[0]

    monkeypatch.setattr(all_hosts.collectives, "measure_collectives", collective)
    monkeypatch.setattr(all_hosts, "agreed_choices", lambda *_: ())
    monkeypatch.setattr(all_hosts, "Ladder", lambda *_: None)
    monkeypatch.setattr(all_hosts, "kernel_rates", rates)
    monkeypatch.setattr(all_hosts, "measure_figures", lambda *_: [])
    monkeypatch.setattr(all_hosts, "measure_host", lambda *_: rows)
    for rank in range(size):
        world = replace(ALONE, rank=rank, size=size, local_size=local)
        found = all_hosts.measure(world, "float32", 3)
        assert (found is None) == (rank > 0)
        if found is not None:
            assert (found.nodes, found.ranks_per_node, found.name[:7]) == (hosts, local, f"{hosts} x {local} x"[:7])
            tiers = [("host", local)] * (local > 1) + [("network", size)] * (hosts > 1)
            assert [(t.name, t.ranks) for t in found.tiers] == tiers
            assert {t.latency_s for t in found.tiers} == {1e-6}
    each = ["dp_shard", "dp_replicate", "world"] if local > 1 else ["world"]
    assert axes == (each * size if hosts > 1 else [])


@pytest.mark.parametrize("warm", [False, True])
def test_every_round_rewrites_its_buffer_and_notes_what_was_stolen(
    monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """Each starts with another of the candidates; in the second one the host takes half of two processors."""
    clock, stolen = count(), iter([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, *(1.0,) * 20])
    monkeypatch.setattr(collectives, "_together", lambda ranks: None)
    monkeypatch.setattr(collectives.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(collectives, "stolen_s", stolen.__next__)
    monkeypatch.setattr(steal_time.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(collectives.worlds, "group", lambda ranks: None)
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda *_, **__: None)
    written: list[tuple[str, float]] = []

    def start(call: Any, transport: str, algorithm: str) -> SimpleNamespace:
        written.append((transport, float(call.source)))
        return SimpleNamespace(wait=lambda: None)

    comm: Any = SimpleNamespace(world=SimpleNamespace(size=2, local_size=2), start=start)
    tried: Any = {
        name: (
            SimpleNamespace(ranks=(0, 1), source=torch.zeros(1) - 1),
            SimpleNamespace(transport=name, algorithm=""),
        )
        for name in ("a", "b")
    }
    found = collectives._rounds(comm, tried, 2, warm)
    rounds = 2 if warm else 3  # the first one warms up
    assert written == [("ab"[(i + k) % 2], i) for i in range(rounds) for k in range(2)]
    assert {name: timed.seconds for name, timed in found.items()} == {"a": (1.0, 1.0), "b": (1.0, 1.0)}
    shares = {name: timed.stolen for name, timed in found.items()}
    assert shares == {"a": (0.0, 0.0), "b": (0.0, 0.5) if warm else (0.5, 0.0)}


def test_groups_are_made_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many on each, in an order in which those that make a group together make it at the same turn."""
    made: dict[int, list[tuple[int, ...]]] = {}
    for rank in range(6):
        own = made.setdefault(rank, [])
        monkeypatch.setattr(all_hosts.worlds, "group", own.append)
        all_hosts._make_groups(SimpleNamespace(world=replace(ALONE, rank=rank, size=6, local_size=3)))  # type: ignore[arg-type]
    assert {len(own) for own in made.values()} == {4}
    for rank, own in made.items():
        for turn, group in enumerate(own):
            assert rank in group
            assert all(made[other][turn] == group for other in group)


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "stat"
    monkeypatch.setattr(steal_time, "_STAT", file)
    monkeypatch.setattr(steal_time.os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    monkeypatch.setattr(steal_time.os, "times", lambda: (1.0, 2.0, 3.0, 4.0, 1e9))
    return file


def test_processor_seconds_are_those_that_linux_counts(stat: Path) -> None:
    """cpu, user, nice, system, idle, iowait, irq, softirq, steal, guest (man 5 proc_stat); this process's go off."""
    assert (stolen_s(), others_s()) == (0.0, 0.0)
    stat.write_text("cpu 100000 20000 3000 70000000 8000000 400 50 6000000 900\ncpu0 1 1 1\n")
    assert stolen_s() == 60_000
    assert others_s() == pytest.approx(1000 + 200 + 30 + 4 + 0.5 - 10)
    stat.write_text("cpu 1 2 3\n")
    assert (stolen_s(), others_s()) == (0.0, 0.0)
