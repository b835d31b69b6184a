"""Small random models as saved by transformers, to test weights with, and a tokenizer for their vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.spec import ModelSpec

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT_NEOX = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
DEEPSEEK = {
    **LLAMA,
    **{"num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
        **{"mscale": 1.0, "mscale_all_dim": 0.5},
    },
}
TINY: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "mistral": LLAMA | {"sliding_window": 16},
    "qwen2": LLAMA | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": LLAMA | {"head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 48, "initializer_range": 0.2},
    "gpt_neox": GPT_NEOX | {"rotary_pct": 0.5},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen3_moe": LLAMA
    | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
    | {"mlp_only_layers": [0], "head_dim": 16},
    "deepseek_v2": DEEPSEEK
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}
    | {"attention_bias": True},
    "deepseek_v3": DEEPSEEK | {"q_lora_rank": 12},
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": LLAMA
    | {"num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 6, "linear_value_head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    | {"layer_types": ["linear_attention", "full_attention"] * 2}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    "nemotron_h": LLAMA
    | {"num_hidden_layers": 4, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2}
    | {"ssm_state_size": 6, "chunk_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_latent_size": 12}
    | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
}
"""Models with recurrences, which are not written from a ModelSpec yet."""
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SIGMOID = _MOE | {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NARROW = LLAMA | {"head_dim": 8}
_NEAR = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 16},
    **{"mamba_expand": 2, "num_hidden_layers": 4},
}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
_MULTIPLIERS |= {"logits_scaling": 2.0}
_MLA = {k: v for k, v in DEEPSEEK.items() if "expert" not in k and "group" not in k and k != "rope_parameters"}
_QWEN3_5 = {k: v for k, v in HYBRID["qwen3_next"].items() if "expert" not in k and "moe" not in k}
_GPT = {k: v for k, v in TINY["gpt2"].items()}
FURTHER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("arcee", "nemotron", "starcoder2", "stablelm"), LLAMA),
    **dict.fromkeys(("ernie4_5", "helium", "internlm3", "iquestcoder", "jais2", "seed_oss", "gemma"), _NARROW),
    **dict.fromkeys(("glm", "glm4"), _NARROW | {"pad_token_id": 0}),
    **dict.fromkeys(("phi3", "olmo2", "cohere"), LLAMA | {"pad_token_id": 0}),
    **{"cwm": _NARROW | _NEAR, "exaone4": _NARROW | _NEAR, "olmo3": LLAMA | _NEAR, "cohere2": _NARROW | _NEAR},
    "ministral": _NARROW | {"sliding_window": 16},
    "smollm3": LLAMA | {"pad_token_id": 0, "no_rope_layers": [1, 0]},
    "granite": LLAMA | _MULTIPLIERS,
    "gpt_bigcode": _GPT | {"multi_query": True},
    "falcon": {k: v for k, v in GPT_NEOX.items() if k != "intermediate_size"} | {"multi_query": True},
    "youtu": {k: v for k, v in _MLA.items() if not k.startswith(("n_", "moe", "first"))} | {"q_lora_rank": 12},
    # Experts.
    "flex_olmo": LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    "olmoe": LLAMA | {"num_experts": 6, "num_experts_per_tok": 2},
    "mellum": _NARROW | _MOE,
    "minimax_m2": _NARROW | _FEW | {"rotary_dim": 4},
    "qwen2_moe": LLAMA | _MOE | {"shared_expert_intermediate_size": 24},
    "glm4_moe": _NARROW | _SIGMOID | {"first_k_dense_replace": 1, "use_qk_norm": True},
    "glm4_moe_lite": DEEPSEEK | {"q_lora_rank": 12, "rope_parameters": None, "n_group": 1, "topk_group": 1},
    "deepseek_v32": DEEPSEEK
    | {"q_lora_rank": 12, "index_n_heads": 8, "index_head_dim": 8, "index_topk": 7, "first_k_dense_replace": 1},
    "solar_open": _NARROW | _SIGMOID,
    "exaone_moe": _NARROW | _MOE | _NEAR | {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "hy_v3": _NARROW | _MOE | {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "afmoe": _NARROW | _MOE | _NEAR | {"num_shared_experts": 1, "num_dense_layers": 1, "mup_enabled": True},
    "granitemoe": LLAMA | _FEW,
    "granitemoeshared": LLAMA | _FEW | {"shared_intermediate_size": 24},
    # Convolutions and recurrences.
    "lfm2": LLAMA | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": LLAMA
    | _MOE
    | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "kimi_linear": _MLA
    | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "pad_token_id": 0}
    | {"linear_head_dim": 6, "linear_num_heads": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]}
    | {"num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 16},
    "bamba": LLAMA | _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": LLAMA
    | _MAMBA
    | _FEW
    | _MULTIPLIERS
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 24},
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 6, "expand": 2}
    | {"num_hidden_layers": 2, "chunk_size": 16},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": HYBRID["qwen3_next"],
}
"""Further families whose weights are read and written, without a writer of their config.json."""
ROUTED = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def spec_of(folder: Path) -> ModelSpec:
    return make_model({"config": str(folder / "config.json")}, folder)[0]


def maker(base: Callable[[], Path]) -> Callable[..., Path]:
    """Return a function that saves a model by transformers under `base`, given its family, type and shard size."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    @cache
    def make(family: str, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> Path:
        torch.manual_seed(1)
        config = AutoConfig.for_model(family, vocab_size=97, bos_token_id=1, eos_token_id=2, **TINY[family])
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        for p in model.parameters():  # biases and norms too, so that a lost tensor shows
            torch.nn.init.normal_(p, std=0.2)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(b, std=0.2)
        folder = base() / family
        model.save_pretrained(folder, max_shard_size=shard)
        return folder

    return make


def tensors(folder: Path) -> dict[str, Tensor]:
    found = [safetensors.torch.load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: t for part in found for name, t in part.items()}


def logits(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits  # type: ignore[no-any-return]


def save(folder: Path, like: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((like / "config.json").read_text())
    safetensors.torch.save_file(change(tensors(like)), folder / "model.safetensors")
    return folder


def tokenizer(path: Path, first: int = 0) -> Tokenizer:
    """Write a tokenizer.json of 97 words, w0 to w96, with ids from `first` on and spaces inside words, as Llama's."""
    from tokenizers import decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"\u2581w{(first + i) % 97}": i for i in range(97)}, "\u2581w0"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    made.decoder = decoders.Metaspace()  # type: ignore[assignment]
    made.save(str(path))
    return made
