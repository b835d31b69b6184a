"""What `measure` makes of times: lines, links, files, drawings; and what planning makes of that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fitted_cluster, lab_cases
from support.fuzz import campaign
from support.in_process_cli import error_of, phalanx
from support.lab_hosts import Hosts, shaped
from torch.utils.flop_counter import FlopCounterMode

from phalanx.answers.machine import measure as machine_measure
from phalanx.cost.collectives import measured as collective
from phalanx.cost.collectives.critical_path import costs
from phalanx.cost.step.predict import predict
from phalanx.cost.step.terms import terms
from phalanx.measure import collectives, kernels, nccl_tests, steal_time, this_machine, worker
from phalanx.measure.collectives import tensors
from phalanx.measure.fit import robust_line
from phalanx.measure.links import BETWEEN, INSIDE, SIZES, _link_line, measure_gamma, measure_tier, partner
from phalanx.measure.microbenchmarks import _actions
from phalanx.measure.steal_time import Neighbours, TimedRounds
from phalanx.measure.this_machine import describe
from phalanx.measure.worker import _Parts
from phalanx.planning.auto.transport import choose
from phalanx.report.measured.measure import picture, plot, rates, title
from phalanx.report.pictures.figure import Lines
from phalanx.report.pictures.files import svg
from phalanx.runtime.comm.p2p import tiers
from phalanx.runtime.process import environment
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.collective_choice import pick
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit, Figure
from phalanx.spec.errors import InputError
from phalanx.spec.files.cluster_toml import cluster_from_toml, to_toml
from phalanx.spec.job import Job
from phalanx.spec.model import presets
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.compressors import COMPRESSORS
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy


class Synthetic:
    """A wire with an α, a β and a γ, on which each round is disturbed but the last."""

    def __init__(self, alpha: float, beta: float, gamma: float, shared: float) -> None:
        self.alpha, self.beta, self.gamma, self.shared = alpha, beta, gamma, shared

    def exchange(self, tier: str, size: int, together: bool) -> list[float]:
        t = self.alpha + self.beta * size * (self.shared if together else 1)
        return [t, t, t] if together else [3 * t, 1.5 * t, t]

    def add(self, size: int) -> list[float]:
        return [9 * self.gamma * size, self.gamma * size]


@given(st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8), st.floats(1e-12, 1e-9), st.sampled_from([1.0, 2.0, 4.0]))
def test_a_synthetic_wire_is_recovered(alpha: float, beta: float, gamma: float, shared: float) -> None:
    wire = Synthetic(alpha, beta, gamma, shared)
    found = measure_tier(wire, "network", 4)
    assert (found.alone.alpha, found.alone.beta) == pytest.approx((alpha, beta), rel=1e-6)
    assert found.alone.fit_error < 1e-9
    assert measure_gamma(wire).value == pytest.approx(gamma, rel=1e-6)
    tier = found.tier(8)
    assert tier.bandwidth_bytes_per_s_per_gpu_per_direction == pytest.approx(1 / beta, rel=1e-6)
    uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
    assert uplink == (None if shared == 1 else pytest.approx(4 / (beta * shared), rel=1e-6))


@given(st.integers(0, 2**32 - 1))
def test_wild_points_do_not_move_the_line(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array(SIZES, dtype=float)
    seconds = 1e-4 + 1e-9 * sizes
    wild = rng.choice(len(sizes), 3, replace=False)
    seconds[wild] *= rng.uniform(2, 100, 3)
    found = robust_line(sizes, seconds)
    assert (found.alpha, found.beta) == pytest.approx((1e-4, 1e-9), rel=1e-6)
    assert found.alpha_range[0] * (1 - 1e-9) <= found.alpha <= found.alpha_range[1] * (1 + 1e-9)
    assert found.beta_range[0] * (1 - 1e-9) <= found.beta <= found.beta_range[1] * (1 + 1e-9)


def test_no_line_has_a_negative_price() -> None:
    for seconds in ([3.0, 2.0, 1.0], [1e-9, 1.0, 5.0]):
        found = robust_line([1, 2, 3], seconds)
        assert min(found.alpha, found.beta, *found.alpha_range, *found.beta_range) >= 0


def fit(way: str, alpha: float, beta: float, error: float = 0.05, hosts: int = 2, ranks: int = 4) -> CollectiveFit:
    points = tuple((n, alpha + beta * n) for n in (2**10, 2**14, 2**18, 2**22))
    transport, _, algorithm = way.partition(" ")
    spread = (0.9 * alpha, 1.1 * alpha), (0.9 * beta, 1.1 * beta)
    return CollectiveFit("all_reduce", ranks, alpha, beta, error, transport, algorithm, points, hosts, *spread)  # type: ignore[arg-type]


def measured_cluster(*fits: CollectiveFit) -> ClusterSpec:
    base = clusters.preset("dgx-h100", 2)
    device = replace(base.device, gamma_s_per_byte=2e-12, name='a "quoted" GPU, µ')
    figures = (Figure("gamma", 2e-12, "s/B", 1e-12, 3e-12, "note"), Figure("100 launches", 4e-4, "s", 4e-4, 5e-4))
    return replace(base, device=device, ranks_per_node=2, collectives=fits, figures=figures)


def test_a_host_has_the_rate_of_its_all_reduce() -> None:
    """A ring of p ranks sends 2 (p - 1) / p of a buffer over each link, in 2 (p - 1) messages."""
    machine = {"gpus": [], "cpu": ["a CPU"], "memory_bytes": 2**34}
    rates = {"optimizer_per_byte": 1e-10, "peak_flops_per_s": 1e11, "forward": {}}
    of_all_reduce = {"op": "all_reduce", "transport": "native", "hosts": 1, "alpha_s": 6e-6, "beta_s_per_byte": 1e-9}
    tables = describe(machine, 4, "float32", {"kernels": [rates], "collectives": [of_all_reduce]})
    (tier,) = tables["tiers"]
    assert tier["bandwidth_bytes_per_s_per_gpu_per_direction"] == pytest.approx(1.5e9)
    assert tier["latency_s"] == pytest.approx(1e-6)


def test_a_part_is_said_on_the_status_page_and_by_the_first_rank(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for rank in (0, 1):
        comm: Any = SimpleNamespace(status=SimpleNamespace(now=said.append), world=SimpleNamespace(rank=rank))
        _Parts(comm, 3).begin("kernels")
    assert said == ["measuring kernels"] * 2
    assert capsys.readouterr().err == "measuring kernels ... (1 of 3)\n"


@pytest.mark.parametrize("sequences", [2, 8])
def test_the_work_of_a_timed_head_is_what_torch_counts(sequences: int) -> None:
    """With few tokens it keeps its logits, with many it goes through them in slices, backward pass and all."""
    model = kernels.create(kernels._spec(64, 4, 2, 128, 512, max_seq=64), torch.bfloat16, torch.device("cpu"))
    bench = kernels._Bench(model, sequences, 64, torch.device("cpu"))
    bench.times = {("F", "head"): [1.0], ("B", "head"): [1.0]}
    with FlopCounterMode(display=False) as counter:
        model.head(bench.x, bench.tokens[:, 1:])
    forward, backward = (point.work.flops for point in bench.points())
    assert forward == counter.get_total_flops()
    assert forward + backward == 3 * 2 * sequences * 64 * 64 * 512


def test_the_error_of_a_line_is_a_share_of_the_seconds() -> None:
    disturbed = [(1e-5 + 1e-9 * n) * (1 + 0.1 * (-1) ** i) for i, n in enumerate(SIZES)]
    found, slower = (_link_line(SIZES, [s * t for t in disturbed]) for s in (1, 1000))
    assert 0.01 < found.fit_error < 0.3
    assert slower.fit_error == pytest.approx(found.fit_error)


def test_a_cpu_takes_few_products_in_fp16() -> None:
    """Without instructions for them they have a hundredth of the speed."""
    timed = [[name for name, *_ in _actions(dtype, torch.device("cpu"))] for dtype in ("float32", "float16")]
    products = [[name for name in names if name.startswith("matrix product")] for names in timed]
    assert len(products[0]) > len(products[1]) == 2
    assert products[0][:2] == products[1]


def test_a_cluster_is_read_back_from_its_toml(tmp_path: Path) -> None:
    for spec in (
        measured_cluster(fit("native", 1e-4, 1e-9), fit("p2p ring", 1e-5, 2e-9)),
        clusters.preset("dgx-h100", 2),
    ):
        file = tmp_path / "cluster.toml"
        file.write_text(to_toml(spec, "of a test\nof two lines"))
        assert cluster_from_toml(file) == spec
    assert costs(measured_cluster()).gamma_s_per_byte == 2e-12


def test_what_was_measured_between_hosts_prices_and_chooses_there_alone() -> None:
    inside = fit("shm", 1e-6, 1e-10, hosts=1, ranks=2)
    slow, fast = fit("native", 1e-4, 1e-8), fit("p2p hierarchical", 1e-3, 5e-9)
    column = fit("p2p ring", 1e-4, 7e-9, ranks=2)
    spec = measured_cluster(inside, slow, fast, column)
    grid = mesh(Strategy(dp=4, zero=3, shard=2))

    def seconds(axis: str, n: float) -> float:
        return float(collective.seconds(spec, grid, "all_reduce", axis, 1, n))

    assert seconds("dp_shard", 2**22) == pytest.approx(inside.seconds(2**22))
    assert seconds("dp_replicate", 2**22) == pytest.approx(column.seconds(2**22))
    assert seconds("dp_replicate+dp_shard", 2**22) == pytest.approx(fast.seconds(2**22))
    assert seconds("dp_replicate+dp_shard", 2**10) == pytest.approx(slow.seconds(2**10))
    chosen = choose(spec.collectives)
    assert pick(chosen, "all_reduce", 4, 2**22, hosts=2).way == "p2p hierarchical"
    assert pick(chosen, "all_reduce", 4, 2**10, hosts=2).way == "native"
    assert pick(chosen, "all_reduce", 2, 2**22, hosts=2).way == "p2p ring"
    assert pick(chosen, "all_reduce", 2, 2**22).way == "shm"
    assert pick(chosen, "all_reduce", 3, 2**22, hosts=3).way == "native"  # never measured


def test_beyond_what_was_measured_a_line_goes_on_through_the_last_point() -> None:
    """Whatever β says: that of a line through small messages may promise more than the link has."""
    measured = replace(fit("native", 1e-3, 1e-8), beta_s_per_byte=5e-9)
    assert measured.seconds(2**24) == pytest.approx(1e-3 + 1e-8 * 2**24)
    assert measured.seconds(2**22) == pytest.approx(1e-3 + 1e-8 * 2**22)


def test_compressors_cost_what_was_measured_of_them() -> None:
    spec, job = ModelSpec(**complete(presets.preset("llama3-8b"))), Job(global_batch=16, seq=512)
    base = measured_cluster()
    coded = replace(base, kernels=tuple(replace(k, compression_per_byte={"int8": 1e-9}) for k in base.kernels))
    for text, measured in (("int8", True), ("bf16", False)):
        for s in (Strategy(dp=16, compression=text), Strategy(dp=8, pp=2, compression=text)):
            plain, other = predict(spec, base, job, s), predict(spec, coded, job, s)
            by = [t for t in terms(Layout(spec, job, s).stage_view()) if t.code]
            assert [t.code for t in by] == [text]
            rates = base.rates("bfloat16", 2)
            memory = by[0].coding.seconds(rates.backward) * rates.pass_slowdown
            more = by[0].coding.traffic_bytes * 1e-9 - memory if measured else 0.0
            assert other.step_time_s - plain.step_time_s == pytest.approx(more, abs=1e-9), s


def test_disturbed_rounds_are_left_out_while_there_are_others() -> None:
    timed = TimedRounds((1.0, 9.0, 2.0), (0.0, 0.5, 0.01))
    assert not timed.settled
    assert timed.quiet == [1.0, 9.0, 2.0]  # three at least
    timed += TimedRounds((8.0, 3.0), (0.4, 0.0))
    assert timed.settled
    assert timed.quiet == [1.0, 2.0, 3.0]
    few = TimedRounds((4.0, 5.0, 6.0, 7.0), (0.3, 0.0, 0.9, 0.1))
    assert few.quiet == [4.0, 5.0, 7.0]  # the least disturbed


@pytest.mark.parametrize(
    ("stolen", "others", "words"),
    [
        (0.0, 0.0, []),
        (0.5, 0.0, ["host gave 50% of its processors"]),
        (0.0, 2.1, []),  # two of four were free
        (0.0, 2.21, ["other programs kept 2.2 of 4 processors busy"]),  # over a tenth of what is needed
        (0.0, 2.5, ["other programs kept 2.5 of 4 processors busy"]),
        (0.1, 4.0, ["host gave 10%", "kept 4.0 of 4"]),
    ],
)
def test_processors_that_others_had_are_spoken_of(
    monkeypatch: pytest.MonkeyPatch, stolen: float, others: float, words: list[str]
) -> None:
    """`stolen`: the share of four processors; `others`: processors, beside a measurement that needs two."""
    said: list[str] = []
    clocks = {"stolen_s": (70.0, 70 + stolen * 40), "others_s": (9.0, 9 + others * 10), "time.monotonic": (5.0, 15.0)}
    monkeypatch.setattr("phalanx.measure.steal_time.os.cpu_count", lambda: 4)
    for name, values in clocks.items():
        monkeypatch.setattr(f"phalanx.measure.steal_time.{name}", iter(values).__next__)
    with steal_time.disturbances(said.append, 2) as reasons:
        pass
    for lines in (said, reasons):
        assert len(lines) == len(words)
        assert all(word in line for word, line in zip(words, lines, strict=True))


@pytest.mark.parametrize(
    ("ranks", "others", "crowd"), [(1, 1.9, True), (1, 0.8, False), (2, 1.5, True), (2, 1.1, False)]
)
def test_a_rank_sees_whether_other_programs_disturb_it_and_the_ranks_beside_it(
    ranks: int, others: float, crowd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 processors; `others` are kept by all but the rank itself, one of them by each rank beside it."""
    clocks = {"others_s": (7.0, 7 + 10 * others), "time.monotonic": (5.0, 15.0), "time.process_time": (3.0, 13.0)}
    monkeypatch.setattr("phalanx.measure.steal_time.os.cpu_count", lambda: 2)
    with monkeypatch.context() as patch:
        for name, readings in clocks.items():
            patch.setattr(f"phalanx.measure.steal_time.{name}", iter(readings).__next__)
        found = Neighbours(ranks, 1).crowd
    assert found is crowd


@pytest.mark.parametrize(
    ("stolen", "others", "quiet"), [(0.0, 0.0, True), (0.0, 2.1, True), (0.0, 2.5, False), (0.5, 0.0, False)]
)
def test_a_look_at_the_machine_says_whether_a_measurement_would_be_disturbed(
    monkeypatch: pytest.MonkeyPatch, stolen: float, others: float, quiet: bool
) -> None:
    """As during one: `stolen` and `others` as above, over half a second that is slept."""
    slept: list[float] = []
    clocks = {"stolen_s": (70.0, 70 + stolen * 4 * 0.5), "others_s": (9.0, 9 + others * 0.5)}
    monkeypatch.setattr("phalanx.measure.steal_time.os.cpu_count", lambda: 4)
    monkeypatch.setattr(steal_time.time, "sleep", slept.append)
    for name, values in clocks.items():
        monkeypatch.setattr(steal_time, name, iter(values).__next__)
    assert steal_time.quiet_now(2, 0.5) is quiet
    assert slept == [0.5]


def test_seconds_of_the_system_are_ticks_of_its_first_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of others are without this program's own; a system that counts none has none."""
    monkeypatch.setattr(steal_time, "_STAT", tmp_path / "stat")
    monkeypatch.setattr("phalanx.measure.steal_time.os.times", lambda: (1.0, 2.0, 3.0, 4.0, 99.0))
    assert (steal_time.stolen_s(), steal_time.others_s()) == (0.0, 0.0)
    ticks = os.sysconf("SC_CLK_TCK")
    # user, nice, system, idle, waiting for a disk, interrupts (hard, soft), stolen, and guests, which user has too
    seconds = (10, 20, 30, 1000, 500, 1, 2, 70, 5, 0)
    (tmp_path / "stat").write_text(f"cpu  {' '.join(str(s * ticks) for s in seconds)}\ncpu0 1 1 1 1 1 1 1 9 1 1\n")
    assert steal_time.stolen_s() == 70.0
    assert steal_time.others_s() == 10 + 20 + 30 + 1 + 2 - 10.0


def test_rates_of_a_busy_machine_say_so_whenever_they_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setattr(this_machine, "_measure", campaign.measured)
    monkeypatch.setattr(steal_time, "stolen_s", lambda: 0.0)
    for busy_s, notes in ((1e6, 1), (0.0, 0)):
        monkeypatch.setattr(steal_time, "others_s", iter((0.0, busy_s)).__next__)
        this_machine.local_cluster(2, "float32", 1, anew=True)
        said: list[str] = []
        cluster = this_machine.local_cluster(2, "float32", 1, announce=said.append)
        assert ["measured, other programs kept" in line for line in said] == [True] * notes
        assert ("other programs kept" in cluster.device.source) == bool(notes)


def test_rates_of_a_busy_machine_are_measured_again_when_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setattr(this_machine, "_measure", campaign.measured)
    monkeypatch.setattr(steal_time, "stolen_s", lambda: 0.0)
    monkeypatch.setattr(steal_time.time, "sleep", lambda _: None)
    monkeypatch.setattr(this_machine, "quiet_now", steal_time.quiet_now)
    said: list[str] = []
    # Of the first measurement, of a look, of the second one; then nothing is marked, so nothing is looked at.
    monkeypatch.setattr(steal_time, "others_s", iter((0.0, 1e6, 5.0, 5.0, 0.0, 0.0)).__next__)
    busy, quiet, kept = (this_machine.local_cluster(2, "float32", 1, announce=said.append) for _ in range(3))
    assert "other programs kept" in busy.device.source
    assert "other programs kept" not in quiet.device.source
    assert kept == quiet
    assert sum("is quiet now; measuring again" in line for line in said) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "a list", "empty"])
def test_a_damaged_measurement_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """And one that was kept when it was interrupted begins anew."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setattr(this_machine, "_measure", campaign.measured)
    monkeypatch.setattr(this_machine, "disturbances", lambda *_: nullcontext([]))
    said: list[str] = []
    whole = this_machine.local_cluster(2, "float32", 1, announce=said.append)
    (file,) = (tmp_path / "machines").glob("*.json")
    content = file.read_bytes()
    assert this_machine.local_cluster(2, "float32", 1, announce=said.append) == whole
    digit = content.rindex(b"1")
    flipped = content[:digit] + b"2" + content[digit + 1 :]
    changed = {"cut": content[:-9], "flipped": flipped, "garbage": b"\xff\x00", "a list": b"[1]", "empty": b""}[
        damage
    ]
    file.write_bytes(changed)
    said.clear()
    assert this_machine.local_cluster(2, "float32", 1, announce=said.append) == whole
    assert said[0] == f"{file} is damaged; measuring again"
    assert file.read_bytes() == content
    odd = (b'{"kernels": [[]], "collectives": []}', b'{"kernels": [{"a": 1}], "collectives": []}')
    for kept in (*odd, *([changed] if damage != "flipped" else [])):  # it has no seal
        file.write_bytes(kept)
        assert worker._read(file) == ([], [])


@pytest.mark.parametrize(("hosts", "seconds"), [(1, 1.0), (2, 1.5)])
def test_on_one_host_moments_are_compared_and_between_hosts_durations(
    monkeypatch: pytest.MonkeyPatch, hosts: int, seconds: float
) -> None:
    """Here a collective takes from 100 to 101, on the other rank from 99 to 100.5: by one clock, it began when the
    last had come; clocks of two hosts do not agree on that."""

    def with_the_other(times: torch.Tensor, op: object, group: object) -> None:
        theirs = (99.0, 100.5) if times[0, 0, 0] else (0.0, 1.5)
        times[:2] = torch.maximum(times[:2], torch.tensor(theirs).view(2, 1, 1).double())

    monkeypatch.setattr(collectives, "_together", lambda ranks: None)
    monkeypatch.setattr(collectives.time, "perf_counter", cycle((100.0, 101.0)).__next__)
    monkeypatch.setattr(collectives.worlds, "group", lambda ranks: None)
    monkeypatch.setattr(collectives.dist, "all_reduce", with_the_other)
    handle = SimpleNamespace(wait=lambda: None)
    world = SimpleNamespace(size=2, local_size=2 // hosts)
    comm = SimpleNamespace(world=world, barrier=lambda: None, start=lambda *_: handle)
    way = SimpleNamespace(transport="native", algorithm="")
    tried = {"one": (SimpleNamespace(ranks=(0, 1), source=torch.zeros(1)), way)}
    assert collectives._rounds(comm, tried, 3, False)["one"].seconds == (seconds,) * 3  # type: ignore[arg-type]


def test_who_exchanges_messages_with_whom() -> None:
    assert [partner(INSIDE, r, 3, 6) for r in range(6)] == [1, 0, None, 4, 3, None]
    assert [partner(BETWEEN, r, 2, 6) for r in range(6)] == [2, 3, 0, 1, None, None]


def test_how_a_group_lies_on_hosts() -> None:
    assert tiers((0, 1, 2, 3), 4) == (4,)
    assert tiers((0, 1, 2, 3), 2) == (2, 2)
    assert tiers((0, 2, 4, 6), 4) == (2, 2)
    assert tiers((0, 2), 2) == (2,)  # a rank of each host: nobody inside
    assert tiers((0, 1, 2), 2) == (3,)  # not as many on each
    grid = mesh(Strategy(dp=4, zero=3, shard=2, tp=2))
    assert [grid.hosts(axis, 4) for axis in ("tp", "dp_shard", "dp_replicate", "world")] == [1, 1, 2, 2]
    assert mesh(Strategy(dp=3)).hosts("dp_replicate", 2) == 0


NCCL = """# nccl-tests version 2.16.9 nccl-headers=22707 nccl-library=22707
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1024 maxBytes 268435456 step: 16(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  31614 on     node01 device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  31614 on     node01 device  1 [0000:0a:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  31700 on     node02 device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  31700 on     node02 device  1 [0000:0a:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    99.99    0.01    0.01      0    20.10    0.05    0.09      0
       16384          4096     float     sum      -1    99.99    0.01    0.01      0    21.64    0.76    1.33      0
      262144         65536     float     sum      -1    99.99    0.01    0.01    N/A    46.21    5.67    9.93    N/A
     4194304       1048576     float     sum      -1    99.99    0.01    0.01      0    439.4    9.55   16.70      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 7.01
"""


def test_nccl_tests_are_read() -> None:
    found = nccl_tests.read(NCCL, "a.txt")
    assert (found.op, found.group_size, found.hosts, found.transport) == ("all_reduce", 4, 2, "native")
    assert found.points[-1] == (4194304, pytest.approx(439.4e-6))
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx((20e-6, 1e-10), rel=0.01)
    tagged = NCCL.replace("all_reduce_perf", "all_reduce_perf_mpi").replace("\n", "\n[1,0]<stdout>:")
    assert nccl_tests.read(f"[1,3]<stderr>:no protocol\n{tagged}", "a.txt") == found
    unsaid = NCCL.replace("# Collective test starting: all_reduce_perf\n", "")
    assert nccl_tests.read(f"$ ./build/all_reduce_perf -b 1K -g 2\n{unsaid}", "a.txt") == found
    assert nccl_tests.read(unsaid, "a.txt", "reduce_scatter").op == "reduce_scatter"


def test_nccl_tests_that_say_too_little_are_refused(tmp_path: Path) -> None:
    for text, why in (
        (NCCL.replace("# Collective", "#"), "does not say which collective"),
        (NCCL.replace("all_reduce_perf", "sendrecv_perf"), "measured sendrecv; phalanx reads tests of all_reduce, "),
        (NCCL.replace("Rank", "rank"), "names 0 ranks"),
        (NCCL.replace("Rank  1", "rank  1"), "names 3 of at least 4 ranks"),
        (NCCL.replace("Rank  2", "Rank  0").replace("Rank  3", "Rank  1"), "lists rank 0 twice"),
        (
            NCCL.replace("H100 80GB HBM3", "GeForce RTX 5090"),
            "dgx-h100': has GPUs of H100, and n.txt was measured on",
        ),
        ("\n".join(NCCL.splitlines()[:14]), "has 1 lines of times"),
    ):
        (tmp_path / "n.txt").write_text(text)
        assert why in error_of(tmp_path, "measure nccl-tests n.txt")


def test_nccl_tests_become_a_cluster_that_plans(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text(NCCL)
    words = ("measure", "nccl-tests", "n.txt", "--preset", "dgx-h100", "--out", "c.toml", "--save", "c.svg")
    code, out, err = phalanx(tmp_path, *words)
    assert (code, err) == (0, "wrote c.toml\nwrote c.svg\n")
    assert "all_reduce of 4 ranks on 2 hosts over native: 20 µs + 0.09999 ns/B, n* = 195.3 KiB, error 0%" in out
    spec = cluster_from_toml(tmp_path / "c.toml")
    assert (spec.nodes, len(spec.collectives)) == (2, 1)


def test_what_is_drawn() -> None:
    good, bad = fit("native", 1e-4, 1e-9), fit("p2p ring", 1e-4, 1e-9, error=0.3)
    lines = plot(good)
    assert lines[0] == title(good)
    assert sum(line.partition("|")[2].count("o") for line in lines[2:17]) == len(good.points)
    assert lines[-1] == "|: n* 97.7 KiB"
    assert "TRUSTED" not in title(good)
    assert title(bad).endswith("error 30%: NOT TO BE TRUSTED")
    drawn = picture([good, bad, replace(good, points=())])
    assert [panel.head for panel in drawn.panels] == [title(good), title(bad)]
    axes = [axis for panel in drawn.panels if isinstance(panel, Lines) for axis in (panel.x, panel.y)]
    assert [(axis.label, axis.unit) for axis in axes] == 2 * [("bytes", "bytes"), ("seconds", "s")]
    assert svg(drawn).count("<circle") == 2 * len(good.points)
    with pytest.raises(InputError, match="nothing to draw"):
        picture([replace(good, points=())])


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with shaped(2, 2, "2gbit") as found:
        yield found


def test_hosts_are_measured_together(hosts: Hosts, tmp_path: Path) -> None:
    """By ranks of both, into a file that planning reads."""
    told = hosts.run(lab_cases.measure, timeout_s=120)
    assert told[1:] == [None] * 3
    spec = told[0]
    assert (spec.nodes, spec.ranks_per_node) == (2, 2)
    assert [(t.name, t.ranks) for t in spec.tiers] == [("host", 2), ("network", 4)]
    groups = {(f.op, f.group_size, f.hosts) for f in spec.collectives}
    assert groups == {(op, *group) for op, _, _ in groups for group in ((2, 1), (2, 2), (4, 2))}
    assert "p2p hierarchical" in {f.way for f in spec.fits("all_reduce", 4, 2)}
    assert spec.device.gamma_s_per_byte is not None
    assert {f.name for f in spec.figures} >= {"gamma", "memory, read and written", "100 launches"}
    assert set(spec.kernels[-1].compression_per_byte) == set(COMPRESSORS)
    (tmp_path / "c.toml").write_text(to_toml(spec))
    assert cluster_from_toml(tmp_path / "c.toml") == spec


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        cluster_from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--out", "no/x.toml"), "--out = 'no/x.toml': cannot be written; make its folder first"),
        (("--save", "."), "--save = '.': is a folder; name a file in it"),
        (
            ("--dtype", "float33"),
            "--dtype = 'float33': is not a type to compute in; did you mean float32 or float64?",
        ),
        (("--ranks", "0"), "--ranks = 0: must be at least 1"),
        (("--threads", "0"), "--threads = 0: must be at least 1"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert phalanx(tmp_path, "measure", *words) == (2, "", f"error: {said}\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_under_a_launcher_the_first_rank_shows_the_cluster_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    measured = None if rank else fitted_cluster.laptop(2)
    monkeypatch.setattr(environment, "external_world", lambda: environment.World(rank, 2, rank, 2))
    monkeypatch.setattr(machine_measure, "measure_ranks", lambda *_: measured)
    code, out, err = phalanx(tmp_path, "measure --json")
    assert (code, bool(out), "wrote cluster.toml" in err) == (0, not rank, not rank)
    assert [p.name for p in tmp_path.glob("*.toml")] == ([] if rank else ["cluster.toml"])


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_measured_tensors_have_equal_parts(op: str, ranks: int) -> None:
    source, target = tensors(op, 1024, ranks, torch.empty)
    full = max(source.numel(), target.numel())
    assert full % ranks == 0
    assert 256 - ranks < full <= 256
    assert {source.numel(), target.numel()} <= {full, full // ranks}


def test_messages_a_second_are_calls_of_the_smallest_size() -> None:
    _, links = rates(fitted_cluster.laptop(2))
    smallest = fitted_cluster.laptop(2).collectives[0]
    first = links.records()[0]["a_second"]
    assert first == 1 / smallest.seconds(smallest.points[0][0])
    assert 0 < first <= 1 / smallest.alpha_s
    assert links.records()[0]["16_mib_s"] == smallest.seconds(16 * 2**20)
