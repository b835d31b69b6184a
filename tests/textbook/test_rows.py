"""Rows of the textbook: commands print what they say, and the tests that they name exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.in_process_cli import phalanx
from support.sizes import sampled

from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search.priced import PricedStrategy, price
from phalanx.planning.tables import textbook
from phalanx.spec.files.job_file import make_strategy
from phalanx.textbook import case_studies
from phalanx.textbook.gallery import growth

PAGES = Path(__file__).parents[2] / "docs" / "site" / "textbook.py"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("textbook_pages", PAGES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Their commands take seconds (searches, curves of scaling, the rules of cases, a proof): for `make long`.
SLOW = {"G29", "M67", "T41", "T13", "T23"}


@pytest.mark.parametrize("slow", sampled([False, True], (0,)))
def test_every_row_holds(make: ModuleType, slow: bool) -> None:
    wrong = [line for row in make.rows() if (row.id in SLOW) == slow for line in make.failures(row)]
    assert not wrong, "\n".join(wrong)


def test_every_golden_correction_and_mistake_has_its_row(make: ModuleType) -> None:
    ids = {row.id for row in make.rows()}
    for kind, count in (("G", 29), ("C", 17), ("M", 63)):
        assert {f"{kind}{i}" for i in range(1, count + 1)} <= ids


def test_a_row_that_does_not_hold_is_found(make: ModuleType) -> None:
    row = make.Row(
        "T0", "memory", "x", "y", "tables memory --params 7B", ("113.0",), "", "tests/textbook/test_rows.py::no"
    )
    assert [line.partition(":")[0] for line in make.failures(row)] == ["T0", "T0"]
    assert make.failures(make.Row("T0", "memory", "x", "y")) == ["T0: neither a command nor a test holds it"]


def test_growth_by_the_scaling_law() -> None:
    """L(N) ~ N^-0.076 (Kaplan et al. 2020): half of the loss takes 2^(1/0.076) times the parameters."""
    times = 2 ** (1 / growth.KAPLAN_N)
    assert times**-growth.KAPLAN_N == pytest.approx(0.5)
    assert f"{times:,.0f}" == "9,139"
    note = growth.growth().note
    assert "9,139" in note
    assert "takes one GPU of 28 TFLOP/s 356.7 years" in note


def test_the_doubling_of_models() -> None:
    first, largest = (next(m for m in growth.RELEASES if m.name == name) for name in ("Transformer", "DeepSeek-V3"))
    times = largest.parameters / first.parameters
    assert f"{times:,.0f} times" in growth.doubling()
    months = (largest.day - first.day).days / 365.25 * 12
    assert 2 ** (months / float(growth.doubling().split()[-2])) == pytest.approx(times, rel=0.03)


def test_gpu_hours_of_llama() -> None:
    """Days of 1,000 GPUs (65B: of 2,048) for the GPU-hours of Touvron et al. 2023, table 15; of DeepSeek-V2's paper
    172.8 k GPU-hours a trillion tokens, for 8.1 T."""
    said = {row[0]: row[2:6] for row in case_studies.fact_sheet().rows}
    for size, days in (("7B", 3.4), ("13B", 5.6), ("33B", 22.1)):
        assert said[f"LLaMA {size}"][1] == pytest.approx(days, abs=0.05)
    assert said["LLaMA 65B"][2] == pytest.approx(20.8, abs=0.05)
    assert said["DeepSeek-V2"][0] == pytest.approx(1.40e6, rel=1e-3)
    assert said["DeepSeek-V2"][3] == pytest.approx(2.8, abs=0.005)
    for case in case_studies.CASES:  # the published step is that of the published hours
        if case.gpu_hours and case.tokens and case.measured_s:
            steps = case.tokens / (case.batch * case.seq)
            assert case.measured_s * steps * case.gpus / 3600 == pytest.approx(case.gpu_hours)


def test_overheads_beside_two_seconds() -> None:
    """T12: 245 GB at 600 and 50 GB/s beside 2 s of computing; at one direction's rates twice as much."""
    rows = {rate: textbook.gradient_traffic(70e9, (8,), rate).rows[0][3] for rate in (600e9, 300e9, 50e9, 25e9)}
    assert [round(100 * rows[rate] / 2) for rate in (600e9, 50e9)] == [20, 245]
    assert [round(rows[rate] / 2, 2) for rate in (300e9, 25e9)] == [0.41, 4.9]


def test_beside_says_both_shares_and_what_overlap_is_worth() -> None:
    """G17, G18: 5.6 s beside 10 and 3 s; 200 ms beside 1 s."""
    for seconds, share in ((10, 0.359), (3, 0.651)):
        (row,) = textbook.step_share(70e9, (10**6,), 50e9, seconds).rows
        assert row[1] == pytest.approx(5.6, rel=1e-4)
        assert row[3] == pytest.approx(share, abs=5e-4)
    (row,) = textbook.step_share(2.5e9, (2,), 25e9, 1.0).rows
    assert row[1:] == pytest.approx((0.2, 0.2, 1 / 6, 1.2, 1.0, 1.2))


def test_top_k_saves_less_with_every_rank() -> None:
    """C13: 66.7/P against a ring in fp32, half of it against 16 bits."""
    for ranks, _, _, times, half in textbook.top_k(7e9, (2, 8, 16, 64), 0.01).rows:
        assert times == pytest.approx(66.7 / ranks, rel=1e-3)
        assert half == times / 2
    assert textbook.top_k(7e9, (1,), 0.01).rows[0][3] is None


def test_latency_of_a_ring_of_1024(tmp_path: Path) -> None:
    """M18: 2 (P-1) alpha, as the row's command prints, and the bytes whose 2 (P-1)/P n beta at 50 GB/s take as
    long."""
    for alpha, latency, size in ((2e-6, 4.1e-3, 100e6), (5e-6, 10.2e-3, 250e6)):
        line = f"collectives table --ranks 1024 --bytes 4KB --alpha {alpha * 1e6:g} --rate 50 --json"
        rows = json.loads(phalanx(tmp_path, *line.split())[1])["rows"]
        assert next(r for r in rows if r["algorithm"] == "ring")["seconds"] == pytest.approx(latency, rel=5e-3)
        assert 2 * 1023 * alpha == pytest.approx(latency, rel=5e-3)
        assert 1024 * alpha * 50e9 == pytest.approx(size, rel=0.03)


def test_tensor_parallel_bytes_of_two_sequences() -> None:
    """M20: four payloads of 2 x 2,048 x 12,288 in 2 bytes; over 8 ranks 2 x 7/8 of them."""
    payload = 4 * 2 * 2048 * 12288 * 2
    assert payload == pytest.approx(402.7e6, rel=1e-3)
    assert payload * 2 * 7 / 8 == pytest.approx(704.6e6, rel=1e-3)


def test_tensor_parallelism_waits_as_its_link_is() -> None:
    """M39: a block of GPT-3, one sequence, tp = 8, A100 at half of 312 TFLOP/s: 72 B s h² FLOP with attention's
    12 B s² h, against four all-reduces of 1.75 B s h x 2 bytes."""
    s, h, tp = 2048, 12288, 8
    compute = (72 * s * h**2 + 12 * s**2 * h) / tp / (0.5 * 312e12)
    sent = 4 * 2 * (tp - 1) / tp * s * h * 2
    waits = [sent / rate / (compute + sent / rate) for rate in (300e9, 25e9, 12.5e9, 3.125e9)]
    assert [round(100 * share) for share in waits] == [6, 43, 61, 86]
    for rate, share in zip((300e9, 25e9, 12.5e9, 3.125e9), waits, strict=True):  # as the row's command has them
        (row,) = textbook.step_share(4 * s * h, (tp,), rate, compute).rows
        assert row[3] == pytest.approx(share)


_BOTTLENECKS = (
    ("llama3-8b", "dgx-h100", 8, 256, 8192, "dp=8,zero=1,recompute=selective", "megatron-core"),
    ("llama3-8b", "ethernet-a100", 16, 16, 2048, "dp=16,zero=3", "fsdp2"),
)


def test_three_jobs_hit_three_bottlenecks() -> None:
    """One computes, one waits for its network, one does not fit; a change of each mends it."""
    computes, waits = (_priced(*case) for case in _BOTTLENECKS)
    assert computes.communication < 0.1
    assert waits.communication > 0.5
    mended = _priced("llama3-8b", "ethernet-a100", 16, 16, 2048, "dp=2,zero=1,tp=8,sp=1", "megatron-core")
    assert mended.seconds < waits.seconds
    full = _priced("llama3-70b", "dgx-h100", 32, 64, 8192, "dp=4,zero=0,tp=8,sp=1", "megatron-core")
    split = _priced("llama3-70b", "dgx-h100", 32, 64, 8192, "dp=1,tp=8,sp=1,pp=4,recompute=full", "megatron-core")
    assert (full.fits, split.fits) == (False, True)


def test_fewer_bits_mend_a_compute_bound_job(make: ModuleType) -> None:
    (row,) = (row for row in make.rows() if row.id == "T38")
    commands = (row.command, row.command.replace("fp8", "bf16"))
    fewer, usual = (
        float(re.findall(r"matrix products +([\d.]+) s", make.printed(command))[0]) for command in commands
    )
    assert fewer < 0.7 * usual


def _priced(name: str, cluster: str, gpus: int, batch: int, seq: int, line: str, stack: str) -> PricedStrategy:
    pricing = pricing_by_gpus(model_named(name)[0], cluster_named(cluster), batch, seq, stack)(gpus)
    strategy = make_strategy(line)
    assert strategy is not None
    return price(pricing, [strategy])[0]
