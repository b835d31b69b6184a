"""Steps that an H200 took (docs/gpu.md), and their prices, which were written down before it ran."""

from typing import Any

import pytest
from support.one_gpu import predicted

from benchmarks.gpu.sizes import SIZES
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec


def _model(family: str, **sizes: Any) -> ModelSpec:
    return build(ModelSpec, complete({"family": family, **sizes}), "model")


_LONG = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "max_seq": 16384}
_LARGE = {"layers": 24, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "max_seq": 4096}
_GPT = {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 50304, "max_seq": 2048}
_MOE = {"layers": 12, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 32000, "max_seq": 4096}
MODELS = {size.name: size.model for size in SIZES} | {
    "1.5B long": _model("llama", tied=False, **_LONG),
    "6.3B": _model("llama", tied=False, **_LARGE),
    "1.3B GPT-2": _model("gpt2", **_GPT),
    "2.1B experts": _model("mixtral", tied=False, experts={"count": 8, "top_k": 2, "ffn": 3072}, **_MOE),
}
MEASURED = [
    ("0.2B", "micro_batch=8", 67.170, 11_156_885_504),
    ("1.5B", "micro_batch=2", 174.57, 38_933_016_576),
    ("1.5B", "micro_batch=4", 322.17, 48_983_781_376),
    ("1.5B", "micro_batch=2,recompute=full", 204.31, 29_519_933_440),
    ("1.5B", "micro_batch=2,recompute=selective", 179.17, 38_379_352_064),
    ("1.5B long", "micro_batch=1", 427.67, 48_987_320_320),
    ("1.3B GPT-2", "micro_batch=4", 160.66, 37_482_086_912),
    ("3.6B", "micro_batch=1", 235.15, 77_260_738_560),
    ("3.6B", "micro_batch=4", 751.74, 109_066_567_680),
    ("6.3B", "micro_batch=1", 378.71, 129_112_604_672),
]
"""(Model, strategy, median milliseconds of a step in bf16, bytes allocated at its peak)."""


@pytest.mark.parametrize(("name", "line", "ms", "peak"), MEASURED)
def test_a_step_on_one_gpu(name: str, line: str, ms: float, peak: int) -> None:
    """Nothing was fitted to these: the exact price of the smallest model is 11 % too short, others are within 6.1;
    the formulas are 11 % too long for the two that move most bytes a FLOP, others within 5."""
    _, _, exact, formulas, ledger = predicted(MODELS[name], "dgx-h200", line)
    assert exact == pytest.approx(ms, rel=0.113 if name == "0.2B" else 0.061)
    assert formulas == pytest.approx(ms, rel=0.113 if name in ("0.2B", "1.3B GPT-2") else 0.05)
    assert 0 < peak - ledger < 335e6
