"""Steps that an H100 took (docs/gpu.md: `phalanx doctor --gpu`), beside their prices and the ledger."""

import pytest

from phalanx.cost.analytic.estimate import estimate
from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.verify.on_gpu.sizes import SIZES

MEASURED = [
    ("0.2B", "micro_batch=8", 72.25, 11_156_885_504),
    ("1.5B", "micro_batch=2", 186.07, 38_933_016_576),
    ("3.6B", "micro_batch=1", 253.35, 77_260_738_560),
    ("1.5B", "micro_batch=4", 339.77, 48_916_672_512),
    ("1.5B", "micro_batch=2,recompute=full", 218.38, 29_452_824_576),
    ("1.5B", "micro_batch=2,recompute=selective", 194.47, 38_312_243_200),
]
"""(Size, strategy, median milliseconds of a step in bf16, bytes allocated at its peak)."""


@pytest.mark.parametrize(("size", "line", "ms", "peak"), MEASURED)
def test_a_step_on_one_gpu(size: str, line: str, ms: float, peak: int) -> None:
    (what,) = (s for s in SIZES if s.name == size)
    strategy = make_strategy(line)
    assert strategy is not None
    job = Job(strategy.micro_batch, what.seq, Precision("bfloat16"), clip=1.0)
    predicted = predict(what.model, preset("dgx-h100", 1), job, strategy).step_time_s * 1e3
    by_formulas = float(estimate(what.model, preset("dgx-h100", 1), job, strategy, "phalanx").seconds) * 1e3
    assert (predicted, by_formulas) == pytest.approx((ms, ms), rel=0.05)
    # Beside what the ledger counts, kernels need up to 0.33 GB of scratch memory while they run.
    assert 0 < peak - expand(Layout(what.model, job, strategy).rank_view(0)).peak_bytes < 335e6
