"""Which kernel of attention runs decides its rate; adapters, packed documents and experts add launches."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.cost.analytic.chips import system
from phalanx.cost.analytic.estimate import Estimate, estimate
from phalanx.planning.lookup import model_named
from phalanx.spec.cluster.presets import preset
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions


def priced(stack: str, cluster: str, name: str = "llama3-8b", dp: int = 8, **options: object) -> Estimate:
    zero = 3 if stack == "eager" else 1
    s = Strategy(dp=dp, zero=zero, micro_batch=1)
    on = preset(cluster, dp)
    return estimate(
        model_named(name)[0], on, Job(dp, 2048, Precision("bfloat16")), s, stack, options=StackOptions(**options)
    )  # type: ignore[arg-type]


def test_flash_attention_2_does_as_much_a_processor_on_blackwell_as_on_hopper() -> None:
    def rate(name: str) -> float:
        s = system(name, 8, 50e9)
        return float(s.portable_attention * s.peak_bf16 / s.processors)

    assert rate("B200") == pytest.approx(rate("H100"))


def test_torch_takes_the_vendors_attention_on_blackwell_and_not_before() -> None:
    def attention(stack: str, cluster: str) -> float:
        return float(priced(stack, cluster).step.terms["attention"])

    assert attention("eager", "dgx-b200") == pytest.approx(attention("megatron-core", "dgx-b200"))
    # FlashAttention 3 is 1.5 to 2 times as fast as 2 on an H100 (Shah et al. 2024, abstract).
    assert 1.5 < attention("eager", "dgx-h100") / attention("megatron-core", "dgx-h100") < 2


def core(stack: str, cluster: str, name: str, kernel: str) -> float:
    return float(priced(stack, cluster, name, attention=kernel).step.terms["attention"])


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100", "dgx-b200"])
def test_flex_attention_rounds_heads_up_to_a_power_of_two(cluster: str) -> None:
    even = core("eager", cluster, "llama3-8b", "flex") / core("eager", cluster, "llama3-8b", "flash2")
    latent = core("eager", cluster, "deepseek-v2", "flex") / core("eager", cluster, "deepseek-v2", "flash2")
    assert even == pytest.approx(1)
    assert latent == pytest.approx((256 + 128) / (192 + 128))


def test_the_vendors_attention_takes_keys_and_values_of_one_width() -> None:
    for name, own in (("llama3-8b", False), ("deepseek-v2", True)):
        chosen, portable = (core("eager", "dgx-b200", name, kernel) for kernel in ("auto", "flash2"))
        assert (chosen == pytest.approx(portable)) == own


@pytest.mark.parametrize("tokens", [128, 512, 2048])
def test_attention_of_packed_documents_takes_as_long_as_of_as_many_sequences(tokens: int) -> None:
    """Documents of a sequence of 2,048 tokens, or a micro-batch of such sequences."""
    apart = estimate(
        model_named("llama3-8b")[0],
        preset("dgx-h100", 8),
        Job(8 * 2048 // tokens, tokens, Precision("bfloat16")),
        Strategy(dp=8, zero=1, micro_batch=2048 // tokens),
        "megatron-core",
    )
    packed = priced("megatron-core", "dgx-h100", document=tokens)
    assert packed.step.terms["attention"] == pytest.approx(apart.step.terms["attention"])


def launched(stack: str = "megatron-core", **options: object) -> float:
    """Seconds for which a forward pass of a block is launched."""
    return float(np.asarray(priced(stack, "dgx-h100", **options).step.of["launch"]["forward_s"]))


def test_adapters_and_packed_documents_are_launched() -> None:
    plain = launched()
    one = plain / 30  # launches of Megatron's block
    assert launched(document=2048) - plain == pytest.approx(2 * one)
    bridge = launched("megatron-bridge-25.09")  # its recipes of some models leave positions unfused
    assert launched("megatron-bridge-25.09", document=2048) - bridge == pytest.approx(24 * bridge / 30)
    assert launched(lora=16) - plain == pytest.approx(16 * one)


def test_a_block_of_experts_alone_is_launched_whole() -> None:
    """Half the kernels of a block of two sublayers, and all of its experts'."""
    hybrid = launched(name="nvidia-nemotron-3-nano-30b-a3b", graphs="none")
    both = launched(name="qwen3-30b-a3b", graphs="none")
    one = launched() / 30
    assert hybrid == pytest.approx(both - 15 * one)
