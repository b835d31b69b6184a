"""Steps that an H100 took (docs/gpu.md: `python -m benchmarks.gpu`), and their prices."""

from pathlib import Path

import pytest
from support.in_process_cli import text_of
from support.one_gpu import predicted

from benchmarks.gpu.sizes import SIZES
from phalanx.cost.kernels.attention import AttentionLibrary, Heads, PromptConstants, prompt_attention_s
from phalanx.cost.kernels.chip import constants, kernel_chip, library
from phalanx.cost.kernels.product import ProductConstants, product_s

MEASURED = [
    ("0.2B", "micro_batch=8", 72.255, 11_156_885_504),
    ("1.5B", "micro_batch=2", 186.07, 38_933_016_576),
    ("3.6B", "micro_batch=1", 253.35, 77_260_738_560),
    ("1.5B", "micro_batch=4", 339.77, 48_916_672_512),
    ("1.5B", "micro_batch=2,recompute=full", 218.38, 29_452_824_576),
    ("1.5B", "micro_batch=2,recompute=selective", 194.47, 38_312_243_200),
]
"""(Size, strategy, median milliseconds of a step in bf16, bytes allocated at its peak)."""


MODELS = {size.name: size.model for size in SIZES}


@pytest.mark.parametrize(("size", "line", "ms", "peak"), MEASURED)
def test_a_step_on_one_gpu(size: str, line: str, ms: float, peak: int) -> None:
    _, _, exact, formulas, ledger = predicted(MODELS[size], "dgx-h100", line)
    assert exact == pytest.approx(ms, rel=0.05)
    assert formulas == pytest.approx(ms, rel=0.08 if size == "0.2B" else 0.05)  # it moves the most bytes a FLOP
    # Beside what the ledger counts, kernels need up to 0.33 GB of scratch memory while they run.
    assert 0 < peak - ledger < 335e6


def test_kernels() -> None:
    """A product of 4,096 and attention of 2 x 4,096 tokens, by constants that were fitted to others' measurements."""
    chip = kernel_chip("H100")
    product = float(product_s(4096, 4096, 4096, chip, constants(ProductConstants, "product", "hopper"), 2, chip.half))
    assert 2 * 4096**3 / product / 1e12 == pytest.approx(730, rel=0.1)  # 774
    kernel, heads = "prompt attention", Heads(32, 8, 64, 64, 1024)
    of_chip = constants(PromptConstants, kernel, "hopper")
    of_library = library(AttentionLibrary, kernel, "flash-attention 2")
    attention = float(prompt_attention_s(2, 4096, 0, heads, chip, of_chip, of_library))
    assert attention * 1e3 == pytest.approx(0.329, rel=0.1)  # 0.348


@pytest.mark.parametrize(
    ("stack", "precision", "said"),
    [("phalanx", "fp8", True), ("phalanx", "bf16", False), ("torchtitan", "fp8", False)],
)
def test_a_price_says_that_8_bits_need_compiled_blocks(
    tmp_path: Path, stack: str, precision: str, said: bool
) -> None:
    asked = "--model llama3-8b --cluster dgx-h100 --gpus 8 --batch 64 --seq 8192 --strategy dp=8,zero=3"
    out = text_of(tmp_path, "predict", *asked.split(), "--stack", stack, "--precision", precision)
    assert ("uncompiled steps" in out) == said
