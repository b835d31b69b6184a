"""Every shape of a served model beside the config.json that its authors published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.spec.model.served import SERVED, ServedModel, served

CONFIGS = json.loads((Path(__file__).parent / "data" / "served_configs.json").read_text())["configs"]
_SAME = {
    **{"vocab": "vocab_size", "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"},
    **{"kv_heads": "num_key_value_heads", "expert_ffn": "moe_intermediate_size", "kv_rank": "kv_lora_rank"},
    **{"q_rank": "q_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim"},
    **{"linear_key_heads": "linear_num_key_heads", "linear_value_heads": "linear_num_value_heads"},
    **{"linear_dim": "linear_key_head_dim", "index_top": "index_topk", "index_heads": "index_n_heads"},
    **{"index_dim": "index_head_dim", "linear_layers": "linear_layers"},
}


def differences(m: ServedModel, config: dict[str, int]) -> dict[str, tuple[float, float]]:
    """What a row and a config.json say otherwise."""
    pairs = {ours: (getattr(m, ours), config[theirs]) for ours, theirs in _SAME.items() if theirs in config}
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = next((config[k] for k in names if k in config), 0)
    pairs["experts"] = (m.experts, experts)
    if experts:
        pairs["top_k"] = (m.top_k, config.get("num_experts_per_tok", config.get("top_k_experts")))
    if "head_dim" in config and not m.latent:
        wide = (config["head_dim"] + config.get("v_head_dim", config["head_dim"])) / 2
        pairs["head_dim"] = (m.head_dim, wide)
    if m.latent:
        pairs["v_dim"] = (m.v_dim, config["v_head_dim"])
        pairs["head_dim"] = (m.head_dim, config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    if m.ffn:  # of dense layers; where every layer has experts, none is left to compare
        pairs["ffn"] = (m.ffn, config.get("intermediate_size_mlp", config.get("intermediate_size")))
    if "n_shared_experts" in config:
        pairs["shared_ffn"] = (m.shared_ffn, config["n_shared_experts"] * config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        pairs["shared_ffn"] = (m.shared_ffn, config["shared_expert_intermediate_size"])
    if "first_k_dense_replace" in config:
        pairs["expert_layers"] = (m.expert_layers, m.layers - config["first_k_dense_replace"])
    if "window_layers" in config:
        pairs["window_layers"] = (m.window_layers, config["window_layers"])
        if config["window_layers"]:
            pairs["window"] = (m.window, config["sliding_window"])
    if config.get("tie_word_embeddings"):
        pairs["tied"] = (m.tied, 1)
    return {name: both for name, both in pairs.items() if both[0] != both[1]}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_served_model_is_as_its_config_says(name: str) -> None:
    assert differences(served(name), CONFIGS[name]) == {}


def test_how_many_the_page_says() -> None:
    """docs/serving.md."""
    assert (len(SERVED), len(CONFIGS)) == (64, 44)
