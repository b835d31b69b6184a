"""What is measured of a machine whose rates are known: those rates, whatever disturbs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.imagined_machine import BYTE_S, CALL_S, FLOP_S, Machine, imagined

from phalanx.measure import kernels, microbenchmarks, worker
from phalanx.nn.init import create
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.cluster.spec import Rates
from phalanx.spec.number_formats import MULTIPLIED
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Let the measurements run on an imagined machine."""
    return partial(imagined, monkeypatch)


def test_the_best_of_four_products_is_the_peak(machine: Callable[..., Machine]) -> None:
    with machine((9.0, 3.0, 1.0, 2.0)) as m:
        assert kernels.peak_flops("float32", CPU, m.barrier) == pytest.approx(FLOP_S)
    assert m.rounds == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_update_has_the_price_of_its_bytes(machine: Callable[..., Machine], dtype: Any) -> None:
    """Of the gradients' norm, their scaling and AdamW; the first round warms up."""
    with machine((50.0,)) as m:
        found = kernels.optimizer_per_byte(dtype, CPU, m.barrier)
    assert found == pytest.approx(1 / BYTE_S, rel=1e-3)


def test_every_narrow_format_that_a_device_has_is_timed(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = machine(chain.from_iterable(repeat((8.0, 1.0, 5.0, 2.0), 9)))
    own = {row.name: FLOP_S * (i + 2) for i, row in enumerate(MULTIPLIED)}
    left_out = next(iter(own))

    def product(a: torch.Tensor, b: torch.Tensor, operands: Any) -> None:
        assert a is b
        m.work(2 * len(a) ** 3 / own[operands.name])

    narrow = SimpleNamespace(
        runs_on=lambda operands, device: operands.name != left_out and device == CPU,
        operand=lambda x, operands: x if operands in MULTIPLIED else None,
        product=product,
    )
    monkeypatch.setattr(kernels, "narrow_product", narrow)
    found = kernels.narrow_per_flop("bfloat16", CPU, m.barrier)
    assert found == {name: pytest.approx(1 / rate) for name, rate in own.items() if name != left_out}
    assert kernels.narrow_per_flop("float32", CPU, m.barrier) == {}


def test_a_round_of_a_shape_has_all_its_work_in_its_times(machine: Callable[..., Machine]) -> None:
    """And a unit's forward and backward pass have what torch counts of them, times of rounds their median."""
    spec = kernels._spec(hidden=16, heads=2, kv_heads=1, ffn=24, vocab=32)
    with machine() as m:
        bench = kernels._Bench(create(spec, torch.float32, CPU), 2, 8, CPU)
        m.settle()
        begin = m.now
        bench.run()
        m.settle()
        timed = {key: seconds for key, (seconds,) in bench.times.items()}
        assert sum(timed.values()) == pytest.approx(m.now - begin)
        assert set(timed) == {(phase, unit) for phase in "FB" for unit in ("embed", "blocks.0", "head")}
        bench.run()
        bench.run()
    assert {len(seconds) for seconds in bench.times.values()} == {3}
    bench.times["F", "head"] = [5.0, 1.0, 3.0]
    points = {(point.phase, point.unit): point for point in bench.points()}
    assert points.keys() == timed.keys()
    assert points["F", "head"].seconds == 3.0
    for unit in ("blocks.0", "head"):
        assert points["B", unit].work.gemm_flops == 2 * points["F", unit].work.gemm_flops > 0


def test_shapes_take_turns_and_full_passes_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first pass warms up; then in each round every shape once, behind a barrier, a pass after every fourth."""
    ladder = kernels.Ladder.__new__(kernels.Ladder)
    said: list[str] = []
    benches = [
        SimpleNamespace(times={"old": 1}, run=lambda i=i: said.append(str(i)), points=lambda i=i: [i])
        for i in range(6)
    ]
    monkeypatch.setattr(ladder, "_benches", benches, raising=False)
    found = ladder.points(lambda: said.append("|"), lambda: said.append("pass"), 2, lambda: False)
    assert found == list(range(6))
    assert " ".join(said) == "pass" + " | 0 | 1 | 2 | 3 pass | 4 | 5" * 2
    assert not any(bench.times for bench in benches)


@pytest.mark.parametrize("quick", [False, True])
def test_a_ladder_is_warmed_up_and_frees_its_gradients(machine: Callable[..., Machine], quick: bool) -> None:
    with machine():
        ladder = kernels.Ladder("float32", CPU, quick)
    assert len(ladder._benches) == sum(len(batches) for _, batches in kernels._SMALL.ladder[quick:])
    for bench in ladder._benches:
        assert {len(seconds) for seconds in bench.times.values()} == {1}
        assert all(p.grad is None for p in bench.model.parameters())
        assert bench.seq <= bench.model.spec.max_seq


def test_a_quick_ladder_has_a_quarter_of_the_work_of_all_shapes() -> None:
    def work(ladder: Any) -> int:
        return sum(
            kernels._spec(*shape).parameter_count * sequences * seq
            for shape, batches in ladder
            for sequences, seq in batches
        )

    assert {shape for shape, _ in kernels._QUICK_LADDER} == {shape for shape, _ in kernels._FULL.ladder}
    assert 0.15 < work(kernels._QUICK_LADDER) / work(kernels._FULL.ladder) < 0.3
    sizes = [
        kernels._sizes(t, torch.device(d)) for t, d in (("float16", "cpu"), ("float32", "cpu"), ("float16", "cuda"))
    ]
    assert work(sizes[0].ladder) < work(sizes[1].ladder) / 100 < work(sizes[2].ladder) / 10**4
    assert sizes[0].square < sizes[1].square < sizes[2].square


def _passes(dtype: Any = "float32", at_once: int = 2) -> kernels.FullPasses:
    return kernels.FullPasses(dtype, Comm(ALONE, mesh(Strategy(dp=1))), at_once)


def test_a_full_pass_is_timed_from_its_beginning_to_the_end_of_its_work(machine: Callable[..., Machine]) -> None:
    with machine() as m:
        full = _passes()
        m.settle()
        begin = m.now
        full.run()
        m.settle()
        assert len(full.times) == 2
        assert sum(full.times) == pytest.approx(m.now - begin)
        assert full.times[0] == pytest.approx(full.times[1])


def test_the_slowdown_of_passes_is_their_time_over_their_units(machine: Callable[..., Machine]) -> None:
    """On a machine that takes a second a FLOP: half as much again as torch counts of a pass is a slowdown of 1.5.
    The first passes warm up; those of other ranks' sums are no work of this one."""
    machine()
    full = _passes()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        full.engine.begin()
        full.engine.backward(0, last=True)
        (full.model(full.tokens[:, :-1], full.tokens[:, 1:]) / full.tokens.numel()).backward()
        full.engine.finish()
    attention = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    products = Rates(1.0, 0.0, 0.0, 0.0)
    work = counter.get_total_flops() - attention

    def slowdown(*seconds: float, links: Any = ()) -> float:
        full.times = [1e3 * work] * 2 + list(seconds)
        return full.over_parts(products, products, list(links))

    assert slowdown(1.4 * work, 1.5 * work, 1.6 * work) == pytest.approx(1.5)
    assert slowdown(0.5 * work) == 1.0
    sent = [0.25 * work, 0.5 * work]
    ways = [SimpleNamespace(seconds=lambda n, s=s: s * n / sum(_bytes(full))) for s in sent]
    assert slowdown(1.5 * work, links=ways) == pytest.approx(1.25)
    assert sum(_bytes(full)) < 25 * 2**20
    assert len(full.engine.buckets) == 1  # of 25 MiB, as a run has them
    full.sends = False
    assert slowdown(1.5 * work, links=ways) == pytest.approx(1.5)


def _bytes(full: kernels.FullPasses) -> list[int]:
    return [4 * b.bucket.numel for b in full.engine.buckets]


def test_the_rates_of_a_whole_measurement_are_the_machines(machine: Callable[..., Machine]) -> None:
    """That products have on it; what it does beside them takes next to no time here."""
    with machine(products=True):
        comm = Comm(ALONE, mesh(Strategy(dp=1)))
        found = worker.kernel_rates(comm, kernels.Ladder("float32", CPU), 3, 1, [], 2)
    assert found.forward.per_gemm_flop == pytest.approx(1 / FLOP_S, rel=1e-3)
    assert found.peak_flops_per_s == pytest.approx(FLOP_S)
    assert (found.dtype, found.concurrent, found.threads, found.origin) == ("float32", 1, 3, "measured")
    assert 1 <= found.pass_slowdown < 1.5
    assert 0 <= found.fit_error < 0.2
    assert not found.forward.fused_norms
    assert found.compression_per_byte == {} == found.forward.per_narrow_flop


def test_figures_are_the_machines_at_its_best(machine: Callable[..., Machine]) -> None:
    """A round before the others warms up, and one of them is disturbed: the range has it, the value has not."""
    with machine(chain.from_iterable(repeat((30.0, *(2.0,) * 3, *(1.0,) * 6), 40))) as m:
        figures = microbenchmarks.measure_figures("float16", CPU, m.barrier)
    assert m.rounds == 10 * len(figures)
    rates = {"FLOP/s": FLOP_S, "B/s": BYTE_S, "s": 100 * CALL_S}
    for f in figures:
        assert f.value == pytest.approx(rates[f.unit], rel=1e-6), f.name
        far, near = (f.low, f.high) if f.unit != "s" else (f.high, f.low)
        assert near == pytest.approx(f.value)
        assert far == pytest.approx(f.value / 2 if f.unit != "s" else 2 * f.value)
    assert {f.unit for f in figures} == set(rates)


def test_a_gpu_is_given_more_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "torch", _Sizeless())
    amounts: dict[str, dict[str, float]] = {}
    for kind in ("cpu", "cuda"):
        for name, unit, amount, _ in microbenchmarks._actions("float32", SimpleNamespace(type=kind)):  # type: ignore[arg-type]
            own = amounts.setdefault(name.split()[0].strip(","), {})
            own[kind] = max(own.get(kind, 0.0), amount)
            assert (unit == "s") == (amount == 0)
    assert all(of["cuda"] > of["cpu"] for name, of in amounts.items() if name != "100")
    assert amounts["memory"] == {"cpu": 2 * 2**26, "cuda": 2 * 2**30}


class _Sizeless:
    """torch without tensors: nothing is allocated."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name) if name in ("float32", "mm") else lambda *_, **__: _Nothing()


class _Nothing:
    def to(self, *_: object) -> _Nothing:
        return self


def test_the_price_of_a_compressor_is_the_mean_of_its_rounds_after_the_first(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for its slowest rank: a round of twice the length counts, the one that warms up does not."""
    monkeypatch.setattr(microbenchmarks, "_SIZES", microbenchmarks._QUICK_SIZES | {"layers": 1, "vocab": 64})
    monkeypatch.setattr(microbenchmarks, "stolen_s", lambda: 0.0)
    monkeypatch.setattr(microbenchmarks, "_COMPRESSIONS", 3)
    monkeypatch.setattr(microbenchmarks, "COMPRESSORS", ("int8", "topk"))
    prices, two = {}, replace(ALONE, size=2, local_size=2)
    for rounds in ((1.0, 1.0, 1.0), (9.0, 1.0, 1.0), (1.0, 1.0, 2.0)):
        with machine(chain.from_iterable(repeat(rounds, 2))) as m:
            comm: Any = SimpleNamespace(world=two, mesh=mesh(Strategy(dp=2)), barrier=m.barrier)
            prices[rounds] = microbenchmarks.measure_coding("float32", comm)
    even, late, disturbed = prices.values()
    assert m.rounds == 6
    assert even.keys() == {"int8", "topk"}
    for name, price in even.items():
        assert price > 0
        assert late[name] == pytest.approx(price)
        assert disturbed[name] == pytest.approx(1.5 * price)
