"""The textbook's table: commands print what rows say, tests exist, and pages are made of the rows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from phalanx.plan.question import cluster_named, model_named, pricing_by_gpus
from phalanx.plan.search.priced import PricedStrategy, price
from phalanx.plan.tables import textbook
from phalanx.spec.files.job_file import make_strategy

FOLDER = Path(__file__).parents[2] / "docs" / "textbook"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("textbook_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_row_holds(make: ModuleType) -> None:
    wrong = [line for row in make.rows() for line in make.failures(row)]
    assert not wrong, "\n".join(wrong)


def test_every_golden_correction_and_mistake_has_its_row(make: ModuleType) -> None:
    ids = {row.id for row in make.rows()}
    for kind, count in (("G", 29), ("C", 17), ("M", 63)):
        assert {f"{kind}{i}" for i in range(1, count + 1)} <= ids


def test_the_pages_are_what_the_rows_say(make: ModuleType) -> None:
    for name, text in make.pages().items():
        assert (FOLDER / name).read_text() == text, f"{name}: run python docs/textbook/make.py"


def test_a_row_that_does_not_hold_is_found(make: ModuleType) -> None:
    row = make.Row("T0", "memory", "x", "y", "memory --params 7B", ("113.0",), "", "tests/docs/test_textbook.py::no")
    assert [line.partition(":")[0] for line in make.failures(row)] == ["T0", "T0"]
    assert make.failures(make.Row("T0", "memory", "x", "y")) == ["T0: neither a command nor a test holds it"]


def test_growth_by_the_scaling_law() -> None:
    """L(C) ~ C^-0.076 (Kaplan et al. 2020): half of the loss takes 2^(1/0.076) times the compute."""
    assert round(2 ** (1 / 0.076)) == 9139


def test_gpu_hours_of_llama() -> None:
    """Days of 1,000 GPUs (65B: of 2,048) for the GPU-hours of Touvron et al. 2023, table 15; of DeepSeek-V2's paper
    172.8 k GPU-hours a trillion tokens, for 8.1 T."""
    for hours, gpus, days in (
        (82_432, 1000, 3.4),
        (135_168, 1000, 5.6),
        (530_432, 1000, 22.1),
        (1_022_362, 2048, 20.8),
    ):
        assert hours / gpus / 24 == pytest.approx(days, abs=0.05)
    assert pytest.approx(1.40e6, rel=1e-3) == 172.8e3 * 8.1


def test_overheads_beside_two_seconds() -> None:
    """T12: 245 GB at 600 and 50 GB/s beside 2 s of computing; at one direction's rates twice as much."""
    rows = {rate: textbook.gradient_traffic(70e9, (8,), rate).rows[0][3] for rate in (600e9, 300e9, 50e9, 25e9)}
    assert [round(rows[rate] / 2, 2) for rate in (600e9, 50e9)] == [0.2, 2.45]
    assert [round(rows[rate] / 2, 2) for rate in (300e9, 25e9)] == [0.41, 4.9]


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


def _priced(name: str, cluster: str, gpus: int, batch: int, seq: int, line: str, stack: str) -> PricedStrategy:
    pricing = pricing_by_gpus(model_named(name)[0], cluster_named(cluster), batch, seq, stack)(gpus)
    strategy = make_strategy(line)
    assert strategy is not None
    return price(pricing, [strategy])[0]
