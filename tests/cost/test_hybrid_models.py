"""Models whose blocks differ, priced under any stack: as the sum over their kinds of blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cost.analytic.estimate import estimate
from phalanx.cost.analytic.profile import profile
from phalanx.cost.ledger.flops import active_params, forward_per_token
from phalanx.cost.ledger.layer_flows import layer_flows
from phalanx.cost.ledger.live_bytes import block_bytes
from phalanx.cost.ledger.model_shape import kinds_of_blocks, shape, side_by_side
from phalanx.cost.ledger.policy import PLAIN
from phalanx.cost.ledger.rank_layout import layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.blocks.mamba import MambaSizes
from phalanx.spec.model.blocks.selective import SelectiveSizes
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy, parse

JOB = Job(64, 4096, Precision("bfloat16"))


def next_80b() -> ModelSpec:
    return make_model({"preset": "qwen3-next-80b-a3b"}, Path())[0]


def mamba() -> ModelSpec:
    """Nemotron-H-56B: one sublayer a block."""
    llama = make_model({"preset": "llama3-8b"}, Path())[0]
    mixer = MambaSizes("mamba", 256, 64, 8, 256)
    sizes = {"hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 32768, "activation": "relu2"}
    return replace(llama, **sizes, layers=4, mixers=(mixer,), pattern=("mamba", "mlp", "mamba", "attention"))


@pytest.mark.parametrize("model", [next_80b(), mamba()], ids=["qwen3-next", "nemotron-h"])
def test_parameters_are_counted_to_the_unit(model: ModelSpec) -> None:
    assert shape(model).params == model.parameter_count
    assert len(kinds_of_blocks(model)) == model.layers


def test_active_parameters_are_those_published() -> None:
    assert active_params(shape(next_80b())) == pytest.approx(3.875e9, rel=1e-3)


def test_a_recurrence_multiplies_as_megatron_counts() -> None:
    """Mamba-2: 2 h (2 d + 2 G N + H) + 7 d N + 2 d h, and the convolution (training.py:885)."""
    kind = next(k for k in shape(mamba()).kinds if k.label == "Mamba-2")
    h, d, groups, state, heads = 8192, 16384, 8, 256, 256
    by_hand = 2 * h * (2 * d + 2 * groups * state + heads) + 7 * d * state + 2 * d * h
    alone = replace(shape(mamba()), kinds=(replace(kind, count=1),))
    conv = 2 * 4 * (d + 2 * groups * state)
    assert forward_per_token(alone, 4096)[0] == by_hand + conv


def test_a_mixer_keeps_what_its_kernels_read() -> None:
    """The projection and the ungated result, and the gated one; of each block's stream, the input and its norm."""
    kind = next(k for k in shape(mamba()).kinds if k.label == "Mamba-2")
    how, by = layout(Strategy(), JOB, 4), replace(profile("megatron-core"), kept_hidden=8.0)
    projection = 2 * 16384 + 2 * 8 * 256 + 256
    by_hand = 2 * (projection + 2 * 16384) + 2 * 2 * 8192
    assert float(block_bytes(kind, how, by)) == pytest.approx(4096 * by_hand)


def test_context_parallelism_moves_whole_sequences_of_some_heads() -> None:
    """And repeats the groups where ranks are more: per token x, B and C, dt, and the result."""
    sizes, how = shape(mamba()), layout(Strategy(tp=4, sp=True, cp=4), JOB, 4)
    sent = {f.what: float(f.bytes) for f in layer_flows(sizes, how, PLAIN) if f.axis == "cp"}
    tokens, x, shared, dt = 1024, 16384 / 4, 2 * 8 * 256 / 4, 256 / 4
    assert sent["inputs of recurrences"] == tokens * 2 * (x + dt + shared * 4 / 2)
    assert sent["results of recurrences"] == tokens * 2 * x


@pytest.mark.parametrize("line", ["dp=8,zero=1", "tp=4,sp=1,dp=2", "cp=2,dp=4,recompute=full", "pp=2,dp=4"])
def test_terms_of_a_hybrid_sum_to_its_step(line: str) -> None:
    found = estimate(mamba(), preset("dgx-h100", 1), JOB, Strategy(**parse(line)), "megatron-core")
    assert sum(float(t) for t in found.step.terms.values()) == pytest.approx(float(found.seconds))
    assert float(found.step.terms["recurrence"]) > 0
    assert 0 < float(found.mfu) < 1
    assert float(found.hardware_flops) >= float(found.model_flops) * 0.9


def test_models_of_unlike_blocks_are_priced_side_by_side() -> None:
    models = [next_80b(), mamba(), make_model({"preset": "llama3-8b"}, Path())[0]]
    shapes = side_by_side([shape(m) for m in models])
    for i, m in enumerate(models):
        assert float(shapes.params[i]) == m.parameter_count
        assert forward_per_token(shapes, 4096)[0][i] == pytest.approx(forward_per_token(shape(m), 4096)[0])


def test_a_mechanism_without_a_price_is_refused_by_name() -> None:
    one = SelectiveSizes("mamba", 1024, 16, 64)
    with pytest.raises(InputError, match="is a recurrence without a price yet"):
        shape(replace(mamba(), mixers=(one,)))
