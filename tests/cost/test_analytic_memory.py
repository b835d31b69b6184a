"""What published stacks keep for the backward pass and as state, by number format: counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cost.analytic.estimate import estimate
from phalanx.cost.analytic.memory import memory, waiting_bytes
from phalanx.cost.analytic.profile import profile
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.live_bytes import Keeps, block_bytes, cast_weight_bytes
from phalanx.cost.ledger.model_shape import Shape, shape
from phalanx.cost.ledger.rank_layout import LayoutColumns, layout
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.chips import CONTEXT_BYTES
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy, parse

JOB = Job(64, 4096, Precision("bfloat16"))


def _of(name: str, line: str = "dp=8,zero=1", number_format: str = "bfloat16") -> tuple[Shape, LayoutColumns]:
    spec = make_model({"preset": name}, Path())[0]
    return shape(spec), layout(Strategy(**parse(line)), JOB, spec.layers, number_format)


def _block_bytes(sizes: Shape, how: LayoutColumns, keeps: Keeps) -> Column:
    return block_bytes(sizes.kinds[-1], how, keeps)


# bytes of an operand's element; scales: one byte per 32 elements, or per 16 of 4 bits
_OPERAND = {"bfloat16": 2.0, "float8": 1.0, "mxfp8": 33 / 32, "nvfp4": 9 / 16}


@pytest.mark.parametrize("number_format", _OPERAND)
def test_a_dense_block_keeps_its_operands_as_cast(number_format: str) -> None:
    """Per token of Llama-3 8B, without dropout: both norms' inputs in 16 bits and results as cast; queries, keys,
    values and attention's result in 16 bits, the result again as cast; gate and up in 16 bits, their product as cast.
    """
    how = _of("llama3-8b", number_format=number_format)
    operand = _OPERAND[number_format]
    hidden, kv, ffn = 4096, 1024, 14336
    again = 0.0 if operand == 2 else operand
    by_hand = hidden * (2 * 2 + 2 * operand) + 2 * (2 * hidden + 2 * kv) + again * hidden + ffn * (2 * 2 + operand)
    kept = _block_bytes(*how, profile("megatron-bridge-26.04"))
    assert float(kept) == pytest.approx(4096 * by_hand)


def test_experts_keep_their_routed_input_as_cast() -> None:
    """Per token of Mixtral 8x7B: as a dense block, but the router reads the second norm's result in 16 bits; for each
    of two experts the input, gate and up, and their product."""
    how = _of("mixtral-8x7b", "dp=8,zero=1,ep=8", "float8")
    hidden, kv, ffn = 4096, 1024, 14336
    attention = hidden * (2 * 2 + 1 + 2) + 2 * (2 * hidden + 2 * kv) + hidden
    by_hand = attention + 2 * (ffn * (2 * 2 + 1) + hidden * 1)
    assert float(_block_bytes(*how, profile("megatron-bridge-26.04"))) == pytest.approx(4096 * by_hand)


def test_stacks_that_do_not_keep_operands_as_cast() -> None:
    for stack in ("torchtitan-2025-06", "phalanx", "maxtext"):
        assert float(_block_bytes(*_of("llama3-8b", number_format="float8"), profile(stack))) == pytest.approx(
            float(_block_bytes(*_of("llama3-8b"), profile(stack)))
        )


@pytest.mark.parametrize(
    ("stack", "number_format", "bytes_"),
    [
        ("megatron-core", "bfloat16", 0.0),
        ("megatron-core", "float8", 2.0),
        ("megatron-bridge-26.04", "float8", 0.0),
        ("megatron-bridge-26.04", "nvfp4", 2 * 9 / 16),
        ("phalanx", "float8", 0.0),
    ],
)
def test_values_of_weights_beside_the_weights(stack: str, number_format: str, bytes_: float) -> None:
    _, how = _of("llama3-8b", number_format=number_format)
    assert float(cast_weight_bytes(how, profile(stack))) == pytest.approx(bytes_)


def test_gradients_in_bf16_save_two_bytes_of_a_parameter() -> None:
    model, how = _of("llama3-8b")
    recipe = profile("megatron-bridge-26.04")
    in_fp32 = replace(recipe, accumulated_bytes=4.0, kept_bytes=6.0, whole_bytes=18.0)
    for level, bytes_ in ((0, 2.0), (1, 2.0), (2, 2.0 / 8)):
        at = replace(how, zero=level, shards=8 if level else 1)
        more = memory(model, at, in_fp32).terms["state"] - memory(model, at, recipe).terms["state"]
        assert float(more) == pytest.approx(bytes_ * model.params)


@pytest.mark.parametrize("stack", ["nanotron", "megatron-core", "phalanx"])
def test_predict_and_plan_have_the_same_room(stack: str) -> None:
    """A stack whose context and libraries take more than usual leaves its allocator less, in every command."""
    spec, cluster, s = make_model({"preset": "llama3-8b"}, Path())[0], preset("dgx-h100", 1), Strategy(dp=8)
    room = Pricing(spec, cluster, JOB, stack).usable
    assert int(estimate(spec, cluster, JOB, s, stack).allocatable_bytes) == room
    beyond = max(float(profile(stack).context_bytes) - CONTEXT_BYTES, 0)
    assert room == int(cluster.device.usable_bytes - beyond)
    assert (beyond > 0) == (stack == "nanotron")


def test_what_waits_is_more_where_another_micro_batch_follows_those_in_flight() -> None:
    """With as many micro-batches as ranks a rank's last forward pass is the last that the CPU can be ahead of."""
    by, spec = profile("nanotron"), make_model({"preset": "llama3-8b"}, Path())[0]

    def waiting(micro_batches: int) -> float:
        s = Strategy(**parse("tp=2,pp=4,zero=1"))
        how = layout(s, Job(micro_batches, 4096, Precision("bfloat16")), spec.layers)
        assert float(how.micro_batches) == micro_batches
        return float(np.max(waiting_bytes(shape(spec), how, by, np.array(2.0), np.array(0.0), np.array(1.0))))

    assert waiting(3) == waiting(4) < waiting(5) == waiting(9)


@pytest.mark.parametrize(("stack", "gradient"), [("torchtune", 4.0), ("accelerate", 4.0), ("megatron-core", 0.0)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_single_micro_batch_has_no_gradients_at_its_loss(stack: str, gradient: float, recompute: str) -> None:
    """torch frees gradients between steps, Megatron has a buffer for them. At the latest they are there with the
    first block's activations."""
    sizes, by = _of("llama3-8b")[0], profile(stack)

    def peak(accumulation: int, seq: int) -> float:
        job = Job(accumulation, seq, Precision("bfloat16"))
        return float(memory(sizes, layout(Strategy(recompute=recompute), job, 32), by).peak)

    params = float(sizes.params)
    of_step = {seq: peak(2, seq) - peak(1, seq) for seq in (16, 65536)}
    assert of_step[65536] == pytest.approx(gradient * params)
    assert 0 <= of_step[16] < 2.5 * 128256 * 4096  # the head's gradient on its way, and activations of 16 tokens
    assert peak(1, 16) > by.whole_bytes * params
