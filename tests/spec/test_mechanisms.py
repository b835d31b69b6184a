"""Parameters of every mechanism, against the modules of transformers on the meta device."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.hybrids import hybrid

from phalanx.spec.files.job_file import make_model

transformers = pytest.importorskip("transformers")
_SIZES = {"family": "llama", "vocab": 1000, "hidden": 256, "heads": 8, "ffn": 384, "max_seq": 4096}
_COMMON = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 384}


def _theirs(kind: str, **sizes: Any) -> int:
    """Return the parameters of a model of transformers, each once."""
    import torch

    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, "pad_token_id": None, **sizes})
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return sum(p.numel() for p in model.parameters())


def _ours(**fields: Any) -> int:
    return make_model({**_SIZES, **fields}, Path())[0].parameter_count


def test_lightning_attention() -> None:
    """MiniMax-01: seven lightning blocks to a full one, experts in each."""
    theirs = _theirs(
        "MiniMax",
        num_hidden_layers=4,
        num_key_value_heads=4,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    )
    ours = _ours(
        layers=4,
        kv_heads=4,
        head_dim=32,
        experts={"count": 4, "top_k": 2, "ffn": 384},
        mixers=[{"name": "lightning", "kind": "lightning", "heads": 8, "head_dim": 32}],
        pattern=["lightning+experts"] * 3 + ["attention+experts"],
    )
    assert ours == theirs


def test_short_convolutions() -> None:
    """LFM2: gated short convolutions, and attention with normed heads."""
    theirs = _theirs(
        "Lfm2",
        num_hidden_layers=3,
        num_key_value_heads=4,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention"],
        tie_word_embeddings=True,
    )
    ours = _ours(
        layers=3,
        kv_heads=4,
        qk_norm=True,
        tied=True,
        mixers=[{"name": "conv", "kind": "short_conv", "channels": 256}],
        pattern=["conv+mlp", "conv+mlp", "attention+mlp"],
    )
    assert ours == theirs


def test_selective_state_spaces() -> None:
    """Jamba: Mamba with inner norms, attention without positions, experts in every second block."""
    theirs = _theirs(
        "Jamba",
        num_hidden_layers=4,
        num_key_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=16,
        mamba_dt_rank=32,
        use_mamba_kernels=False,
    )
    mamba = {"name": "mamba", "kind": "selective", "channels": 512, "state": 16, "step_rank": 32, "inner_norms": True}
    ours = _ours(
        layers=4,
        kv_heads=4,
        experts={"count": 4, "top_k": 2, "ffn": 384},
        mixers=[mamba, {"name": "nope", "kind": "attention", "rotary_dim": 0}],
        pattern=["mamba+mlp", "mamba+experts", "nope+mlp", "mamba+experts"],
    )
    assert ours == theirs


def test_a_delta_net_with_a_decay_for_each_channel() -> None:
    """Kimi Linear: three Kimi delta attentions to a latent one without positions."""
    linear = {"num_heads": 8, "head_dim": 32, "short_conv_kernel_size": 4}
    theirs = _theirs(
        "KimiLinear",
        num_hidden_layers=4,
        num_key_value_heads=8,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=384,
        num_shared_experts=1,
        first_k_dense_replace=1,
        linear_attn_config={**linear, "kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    )
    ours = _ours(
        layers=4,
        head_dim=48,
        latent={"kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "v_dim": 32},
        experts={"count": 4, "top_k": 2, "ffn": 384, "shared_ffn": 384},
        mixers=[{"name": "kda", "kind": "channel_delta", "heads": 8, "head_dim": 32}],
        pattern=["kda+mlp", "kda+experts", "kda+experts", "attention+experts"],
    )
    assert ours == theirs


def test_compressed_keys_and_hyper_connections() -> None:
    """DeepSeek-V4: windows beside compressed keys, chosen by an index or not, on four residual streams."""
    kinds = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
    theirs = _theirs(
        "DeepseekV4",
        num_hidden_layers=3,
        num_attention_heads=8,
        head_dim=64,
        q_lora_rank=96,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=384,
        o_groups=4,
        o_lora_rank=48,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        sliding_window=128,
        layer_types=kinds,
        mlp_layer_types=["moe"] * 3,
    )
    sizes = {"kind": "compressed", "heads": 8, "head_dim": 64, "q_rank": 96, "rotary_dim": 8, "window": 128}
    sizes |= {"result_groups": 4, "result_rank": 48}
    ours = _ours(
        layers=3,
        kv_heads=1,
        head_dim=64,
        streams=4,
        experts={"count": 4, "top_k": 2, "ffn": 384, "shared_ffn": 384},
        mixers=[
            {**sizes, "name": "near"},
            {**sizes, "name": "heavy", "ratio": 128},
            {**sizes, "name": "sparse", "ratio": 4, "overlapping": True, "index": {"heads": 4, "dim": 32, "top": 64}},
        ],
        pattern=["near+experts", "heavy+experts", "sparse+experts"],
    )
    assert ours == theirs


@pytest.mark.parametrize("kind", ["mamba", "delta", "lightning", "kda", "scan", "conv"])
def test_ranks_share_a_mixer_s_heads_and_keep_the_rest(kind: str) -> None:
    sizes = next(m for m in hybrid(0, (kind,)).mixers if m.name == kind)
    half = sizes.of_rank(2)
    assert {f.name for f in fields(sizes) if getattr(half, f.name) != getattr(sizes, f.name)} == set(sizes.divided)
    assert all(2 * getattr(half, name) == getattr(sizes, name) for name in sizes.divided)
    assert (sizes.of_rank(1), half.of_rank(2)) == (sizes, sizes.of_rank(4))
