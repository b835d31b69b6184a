"""The one table of MaxText's keys and Phalanx's fields, for reading and for writing (maxtext/configs/types.py).

Degrees are products of a key inside a slice (ici, here a node) and one between slices (dcn): write.py spreads them.
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "max_target_length": "job.seq",
    "gradient_clipping_threshold": "job.clip",
    "adam_b1": "job.optimizer.betas.0",
    "adam_b2": "job.optimizer.betas.1",
    "adam_eps": "job.optimizer.eps",
    "adam_weight_decay": "job.optimizer.weight_decay",
    "base_emb_dim": "model.hidden",
    "base_mlp_dim": "model.ffn",
    "base_num_decoder_layers": "model.layers",
    "base_num_query_heads": "model.heads",
    "base_num_kv_heads": "model.kv_heads",
    "head_dim": "model.head_dim",
    "vocab_size": "model.vocab",
    "normalization_layer_epsilon": "model.norm_eps",
    "use_qk_norm": "model.qk_norm",
    "logits_via_embedding": "model.tied",
    "attention_bias": "model.qkv_bias",
    "num_experts": "model.experts.count",
    "num_experts_per_tok": "model.experts.top_k",
    "base_moe_mlp_dim": "model.experts.ffn",
    "load_balance_loss_weight": "model.experts.balance_loss",
    "first_num_dense_layers": "model.experts.dense_layers",
    "q_lora_rank": "model.latent.q_rank",
    "kv_lora_rank": "model.latent.kv_rank",
    "qk_nope_head_dim": "model.latent.nope_dim",
    "qk_rope_head_dim": "model.latent.rope_dim",
    "v_head_dim": "model.latent.v_dim",
    "mtp_num_layers": "options.mtp",
    "parameter_memory_host_offload": "options.parameter_offload",
}
"""Key -> table.field, for values that are the same in both."""
WORDS: dict[str, tuple[str, dict[str, str]]] = {
    "remat_policy": ("strategy.recompute", {"none": "none", "full": "full"}),
    "quantization": (
        "options.products",
        {
            "": "bfloat16",
            "te_fp8_delayedscaling": "float8-delayed",
            "te_fp8_currentscaling": "float8",
            "te_mxfp8": "mxfp8",
        },
    ),
    "mu_dtype": ("options.first_moment", {"float32": "float32", "bfloat16": "bfloat16"}),
    "context_parallel_strategy": ("options.context", {"ring": "p2p", "all_gather": "all_gather"}),
    "decoder_block": (
        "model.family",
        {
            "llama2": "llama",
            "mistral": "mistral",
            "mixtral": "mixtral",
            "qwen2": "qwen2",
            "qwen3": "qwen3",
            "qwen3_moe": "qwen3_moe",
            "deepseek": "deepseek_v3",
        },
    ),
}
"""Key -> (table.field, {its word: the field's value})."""
AXES = ("tensor", "tensor_sequence", "expert", "context", "fsdp", "data", "pipeline")
"""Mesh axes from the innermost: in this order they fill a node."""
KEY = {field: key for key, field in FIELDS.items()}
"""The key that holds a field's value."""
WORD = {field: (key, {value: word for word, value in words.items()}) for key, (field, words) in WORDS.items()}
"""The key of a field, and its word for each value."""
