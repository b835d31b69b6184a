"""Models whose blocks differ, priced under any stack: as the sum over their kinds of blocks."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from phalanx.cost.analytic.estimate import estimate
from phalanx.cost.analytic.profile import profile
from phalanx.cost.ledger.flops import active_params, forward_per_token, seen_keys
from phalanx.cost.ledger.layer_flows import layer_flows, messages
from phalanx.cost.ledger.live_bytes import block_bytes, live_bytes
from phalanx.cost.ledger.model_shape import gather_shapes, kinds_of_blocks, shape
from phalanx.cost.ledger.policy import PLAIN
from phalanx.cost.ledger.rank_layout import layout
from phalanx.planning.lookup import model_named
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.blocks.block import Block
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.state_space import MambaSizes, SelectiveSizes
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
    shapes = gather_shapes([shape(m) for m in models])
    for i, m in enumerate(models):
        assert float(shapes.params[i]) == m.parameter_count
        assert forward_per_token(shapes, 4096)[0][i] == pytest.approx(forward_per_token(shape(m), 4096)[0])


def v4_flash() -> ModelSpec:
    return make_model({"preset": "deepseek-ai/DeepSeek-V4-Flash"}, Path())[0]


def jamba() -> ModelSpec:
    mixer = SelectiveSizes("mamba", 16384, 16, 512, inner_norms=True)
    return replace(mamba(), mixers=(mixer,))


PUBLISHED = ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B", "deepseek-v3", "mixtral-8x7b", "palm-540b")
"""Experts in a narrower space, shared and gated ones; latent attention; blocks in parallel."""


@pytest.mark.parametrize(
    "model",
    [v4_flash(), jamba(), next_80b(), *(model_named(name)[0] for name in PUBLISHED)],
    ids=["v4", "jamba", "next", *PUBLISHED],
)
def test_a_block_multiplies_by_every_matrix_that_it_has(model: ModelSpec) -> None:
    """Forward, two FLOPs a token and element of its weights; of routed experts, of those that a token goes to. What
    cores and recurrences do is beside it: it depends on the sequence, or has no matrix."""
    sizes = shape(model)
    for kind, block in zip(sizes.kinds, _one_of_each(model), strict=True):
        x = model.experts
        share = x.top_k / x.count if x else 1
        matrices = sum(
            prod(d.size for d in w.shape) * (share if w.role.startswith("expert") else 1)
            for _, w in block.weights()
            if len(w.shape) > 1 and w.role not in ("conv", "gate", "latent_bias")
        )
        alone = replace(sizes, kinds=(replace(kind, count=1, scan_flops=0, conv=0, index_pair=0),))
        core = 2 * seen_keys(kind, 4096, 4096) * kind.heads * (kind.head_dim + kind.value_dim)
        assert forward_per_token(alone, 4096)[0] - core == pytest.approx(2 * matrices)


def _one_of_each(model: ModelSpec) -> list[Block]:
    blocks, places = architecture(model).blocks, kinds_of_blocks(model)
    return [blocks[places.index(k)] for k in range(max(places) + 1)]


def test_compressed_attention_sees_the_nearest_keys_and_some_further_ones() -> None:
    """128 near ones; beside them one of 4 or 128 tokens, at most the 512 that an index chooses."""
    assert sorted(float(seen_keys(k, 4096, 4096)) for k in shape(v4_flash()).kinds) == [
        128,
        128 + 4096 / 128,
        128 + 512,
    ]
    priced = estimate(v4_flash(), preset("gb200-nvl72", 1), JOB, Strategy(dp=64, zero=1, ep=64), "megatron-bridge")
    assert float(priced.step.terms["attention"]) > 0


def test_every_residual_stream_travels_between_stages_and_is_kept() -> None:
    model, how = v4_flash(), layout(Strategy(pp=2), JOB, 43)
    one, four = (shape(replace(model, streams=n)) for n in (1, 4))
    assert float(messages(four, how, PLAIN, 1).bytes) == 4 * float(messages(one, how, PLAIN, 1).bytes)
    by = profile("megatron-bridge")
    kept = [float(live_bytes(s, how, by).kept) for s in (one, four)]
    # Beyond the one of a plain residual: four streams, what they join to, and what each of two sublayers adds.
    assert kept[1] - kept[0] == pytest.approx(2 * 4096 * 4096 * 2 * (4 + 1))
    freed = [
        float(live_bytes(four, layout(Strategy(recompute=r), JOB, 43), by).freed) for r in ("none", "selective:mhc")
    ]
    assert freed == [0, pytest.approx(2 * 4096 * 4096 * 2 * 4)]


def test_a_selective_scan_sums_its_step_over_ranks() -> None:
    """Mamba's step, B and C come from all channels: 512 + 2 x 16 numbers of a token, forward and backward."""
    how = layout(Strategy(tp=4), JOB, 4)
    flow = next(f for f in layer_flows(shape(jamba()), how, PLAIN) if f.what == "sums inside recurrences")
    assert (float(flow.bytes), float(flow.count("F")), float(flow.count("B"))) == (4096 * 2 * (512 + 32), 1, 1)
    found = estimate(jamba(), preset("dgx-h100", 1), JOB, Strategy(dp=8, zero=3), "accelerate")
    assert 0 < float(found.step.terms["recurrence"]) < float(found.step.terms["matmul"])
