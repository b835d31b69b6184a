"""Keys of a config.json that a reader need not know, and names that it must not pass over.

A key that a row does not read is one of three kinds: known here to change no layer; named like what changes layers,
so that a config with it is refused; or anything else, such as what a tool notes about itself.
"""

from __future__ import annotations

import re

_KEYS = """
architectures model_type transformers_version torch_dtype dtype _name_or_path auto_map quantization_config
use_cache cache_implementation tie_word_embeddings tie_encoder_decoder is_encoder_decoder is_decoder
add_cross_attention chunk_size_feed_forward id2label label2id num_labels problem_type return_dict
output_attentions output_hidden_states output_router_logits output_past torchscript pruned_heads
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id eod_token_id
image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id image_token_index
initializer_range initializer_factor init_std init_method embed_init_std embedding_initializer_range
attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop
attn_pdrop emb_pdrop resid_dropout embed_dropout embedding_dropout residual_dropout classifier_dropout dropout
mlp_dropout layerdrop activation_dropout attention_dropout_prob classifier_dropout_rate dropout_rate
summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
pretraining_tp model_parallel_size ep_size max_window_layers use_sliding_window rope_theta rope_scaling
rope_parameters partial_rotary_factor max_position_embeddings original_max_position_embeddings
initial_context_length seq_length max_sequence_length model_max_length max_seq_len keep_window_size
router_aux_loss_coef aux_loss_alpha seq_aux aux_loss_coef router_z_loss_coef router_jitter_noise
input_jitter_noise z_loss_coefficient use_aux_loss router_dtype moe_router_dtype output_router_logits
attn_implementation _attn_implementation use_flash_attn use_flash_attn_2 attention_softmax_in_fp32
scale_attention_softmax_in_fp32 reorder_and_upcast_attn gradient_checkpointing slow_but_exact
num_logits_to_keep use_mamba_kernels use_mambapy use_associative_scan mamba_ssm_dtype mamba_ssm_cache_dtype
time_step_min time_step_max time_step_floor time_step_limit time_step_scale time_step_init_scheme
rescale_prenorm_residual residual_in_fp32 fp32_residual_connection enable_moe_fp32_combine
moe_shared_expert_overlap norm_head _experts_implementation mtp_loss_scaling_factor enable_lm_head_fp32
num_nextn_predict_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings mtp_layers_block_type
mtp_hybrid_override_pattern mtp_layer_types num_mtp_layers num_hidden_layers qk_head_dim max_num_tiles
transformers.js_config language_config_override ignore_index sliding_window_pattern per_layer_config
use_mem_eff_path head_dtype moe_dtype unsloth_version unsloth_fixed
"""
NEUTRAL = frozenset(_KEYS.split())
"""They change no size and no cost, or are read by every row. Multi-token prediction is among them: it is left out of
totals, as transformers leaves it out, and a note says so."""

STRUCTURAL = re.compile(
    r"^(?!.*_eps(ilon)?$).*"
    r"(heads?(_|$)|layers?(_|$)|(_|^)(dim|rank|size|width|ratio|factor|interval|freq|period|offset)(_|s?$)"
    r"|expert|moe|norm|window|attn|attention|mlp|ffn|mamba|conv|ssm|state|linear|delta|lightning|index|compress"
    r"|(^|_)hc_|altup|laurel|gram|latent|lora|bias|gate|residual|block|pattern|parallel|shared|sink|loop|recur"
    r"|memory|kv_|chunk)"
)
"""Names of what changes layers, in the vocabulary of the configurations that transformers 5 has."""
