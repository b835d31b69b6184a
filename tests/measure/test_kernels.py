from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import RankPass
from phalanx.measure import kernels, worker
from phalanx.measure.fit import nonnegative_fit
from phalanx.measure.kernels import UnitTime, fit
from phalanx.measure.worker import levels
from phalanx.nn.init import create
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.cluster.spec import Rates
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-8))
def test_alpha_and_beta_are_recovered(alpha: float, beta: float) -> None:
    sizes = 2.0 ** np.arange(10, 26, 2)
    features = np.stack([np.ones_like(sizes), sizes], axis=1)
    found = nonnegative_fit(features, features @ [alpha, beta])
    assert found == pytest.approx([alpha, beta], rel=1e-6)


def test_no_price_is_negative() -> None:
    features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    found = nonnegative_fit(features, np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all()
    assert found[1] == 0


def test_kernel_rates_are_recovered_from_work_and_time() -> None:
    truth = Rates(7e-12, 1.5e-11, 4e-11, 3e-5)
    points = []
    for hidden, tokens in ((128, 256), (128, 2048), (256, 512), (512, 1024), (192, 384)):
        sizes = {"family": "llama", "vocab": 2048, "hidden": hidden, "layers": 1, "heads": 4, "ffn": 3 * hidden}
        spec = ModelSpec(**complete({**sizes, "max_seq": 256}))
        for unit in ("blocks.0", "head"):
            work = unit_work.forward(spec, unit, RankPass(tokens, 128, 4))
            points.append(UnitTime("F", unit, work, float(work.seconds(truth))))
    found, residual = fit(points, "F")
    assert residual < 1e-6
    for name in ("per_gemm_flop", "per_attention_flop", "per_byte", "per_kernel"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-4)


@pytest.mark.parametrize("sizes", [kernels._FULL, kernels._SMALL, kernels._LARGE])
def test_what_is_timed_tells_every_rate_from_the_others(sizes: kernels._Sizes) -> None:
    """The ladder's work, in units of what each rate contributes to its time, has full rank, with room to spare."""
    truth, points = Rates(7e-12, 1.5e-11, 4e-11, 3e-5), []
    for shape, batches in sizes.ladder:
        spec = kernels._spec(*shape)
        for sequences, seq in batches:
            for unit in ("blocks.0", "head"):
                work = unit_work.forward(spec, unit, RankPass(sequences * seq, seq, 4))
                points.append(UnitTime("F", unit, work, float(work.seconds(truth))))
    found, residual = fit(points, "F")
    assert residual < 1e-6
    assert found.per_gemm_flop == pytest.approx(truth.per_gemm_flop, rel=1e-3)
    assert found.per_byte == pytest.approx(truth.per_byte, rel=1e-3)


def test_levels_of_concurrency() -> None:
    assert [levels(n) for n in (1, 2, 3, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6]]


def test_units_are_timed_as_the_decoder_runs_them() -> None:
    spec = kernels._spec(hidden=16, heads=2, kv_heads=1, ffn=16, vocab=32)
    bench = kernels._Bench(create(spec, torch.float32, torch.device("cpu")), 1, 8, torch.device("cpu"))
    bench.run()
    assert {unit for _, unit in bench.times} == {"embed", "blocks.0", "head"}


def test_a_timed_gradient_is_put_in_its_place_and_dropped() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad, place = torch.arange(3.0), torch.full((3,), 7.0)
    kernels._as_the_engine(place, p)
    assert (p.grad, place.tolist()) == (None, [0.0, 1.0, 2.0])


def test_a_quick_measurement_takes_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(worker.kernels, "Ladder", lambda *_: None)
    monkeypatch.setattr(worker, "kernel_rates", lambda *given: taken.append(given[-1]))
    for name in ("measure_gamma", "measure_figures", "table_rows", "RealWire"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    comm = SimpleNamespace(world=ALONE, status=SimpleNamespace(now=lambda _: None), barrier=lambda: None)
    for quick in (True, False):
        worker.measure_host(comm, "float32", 1, [1], quick)  # type: ignore[arg-type]
    quickly, well = taken
    assert 1 < quickly < well


def test_more_rounds_are_left_out_where_they_tell_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for enough, rounds in ((False, 4), (True, 2)):
        ran: list[int] = []
        ladder = kernels.Ladder.__new__(kernels.Ladder)
        bench = SimpleNamespace(times={}, run=lambda ran=ran: ran.append(1), points=list)
        monkeypatch.setattr(ladder, "_benches", [bench], raising=False)
        assert ladder.points(lambda: None, lambda: None, 4, lambda enough=enough: enough) == []
        assert len(ran) == rounds
