"""Hugging Face configurations of every family."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw arguments for the family's config class in transformers."""

    def some(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    heads = some(2, 4)
    given = {"vocab_size": some(61, 100), "tie_word_embeddings": some(True, False)}
    if family == "gpt2":
        return given | {"n_embd": heads * 8, "n_head": heads, "n_layer": some(1, 3), "n_inner": some(None, 40)}
    given |= {
        "hidden_size": heads * some(8, 12),
        "intermediate_size": some(24, 40),
        "num_hidden_layers": some(1, 2, 4),
        "num_attention_heads": heads,
        "max_position_embeddings": 64,
        "attention_bias": some(True, False),
    }
    if family == "gpt_neox":
        return given | {"use_parallel_residual": some(True, False), "rotary_pct": some(0.5, 1.0)}
    given["num_key_value_heads"] = some(1, 2, heads) if not family.startswith("deepseek") else heads
    if family in ("llama", "deepseek_v2"):
        given["mlp_bias"] = some(True, False)
    if family not in ("deepseek_v2", "deepseek_v3"):
        given["head_dim"] = some(4, 16)
    if family in ("mistral", "qwen2", "qwen3", "gpt_oss"):
        given |= {
            "sliding_window": some(7, 8),
            "max_window_layers": some(0, 1, 9),
            "use_sliding_window": some(True, False),
        }
    if family in ("qwen3_moe", "deepseek_v2", "deepseek_v3"):
        given |= {"moe_intermediate_size": some(8, 20), "num_experts_per_tok": some(1, 2)}
    if family in ("mixtral", "gpt_oss"):
        given |= {"num_local_experts": some(2, 4), "num_experts_per_tok": some(1, 2)}
    if family == "qwen3_moe":
        given |= {"num_experts": some(2, 4), "decoder_sparse_step": some(1, 2), "mlp_only_layers": some([], [0])}
    if family.startswith("deepseek"):
        given |= {"n_routed_experts": some(2, 4), "n_shared_experts": some(1, 2), "first_k_dense_replace": some(0, 1)}
        given |= {"q_lora_rank": some(None, 12), "kv_lora_rank": some(8, 10), "v_head_dim": some(8, 6)}
        given |= {"qk_nope_head_dim": some(8, 4), "qk_rope_head_dim": some(4, 8), "n_group": 1, "topk_group": 1}
    return given
