"""Write the config.json of Mixtral, Qwen 3 MoE, and DeepSeek V2 and V3."""

from phalanx.spec.model.hugging_face import writing as write
from phalanx.spec.model.hugging_face.reading import Fields
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec


def write_mixtral(spec: ModelSpec) -> Fields:
    """Return the config of a Mixtral model."""
    x = write.experts(spec)
    routed = {"num_local_experts": x.count, "num_experts_per_tok": x.top_k, "sliding_window": spec.window}
    return write.llama_fields(spec) | routed | _write_losses(x)


def write_qwen3_moe(spec: ModelSpec) -> Fields:
    """Return the config of a Qwen 3 MoE model."""
    x = write.experts(spec)
    return (
        write.llama_fields(spec)
        | {"attention_bias": spec.qkv_bias, "sliding_window": spec.window}
        | {"use_sliding_window": spec.window is not None, "decoder_sparse_step": 1}
        | {"num_experts": x.count, "num_experts_per_tok": x.top_k, "moe_intermediate_size": x.ffn}
        | {"mlp_only_layers": list(x.dense_layers), "norm_topk_prob": x.normalized}
        | _write_losses(x)
    )


def _write_losses(x: Experts) -> Fields:
    """Return the coefficients for `transformers`, where the experts' shares of tokens sum to top_k; ours sum to 1.
    Its configurations have no z loss: the key is written only if it is used."""
    z_loss = {"router_z_loss_coef": x.z_loss} if x.z_loss else {}
    return {"router_aux_loss_coef": x.balance_loss / x.top_k, **z_loss}


def write_deepseek_v2(spec: ModelSpec) -> Fields:
    """Return the config of a DeepSeek V2 model."""
    x = write.experts(spec)
    method = "group_limited_greedy" if x.groups > 1 else "greedy"
    more = {"topk_method": method, "scoring_func": "softmax", "mlp_bias": spec.mlp_bias}
    return _write_shared(spec, x) | more


def write_deepseek_v3(spec: ModelSpec) -> Fields:
    """Return the config of a DeepSeek V3 model."""
    assert spec.latent is not None
    more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": spec.latent.interleaved}
    return _write_shared(spec, write.experts(spec)) | more


def _write_shared(spec: ModelSpec, x: Experts) -> Fields:
    a = spec.latent
    assert a is not None
    return (
        write.llama_fields(spec)
        | {"attention_bias": spec.qkv_bias, "head_dim": a.rope_dim}
        | {"q_lora_rank": a.q_rank, "kv_lora_rank": a.kv_rank, "v_head_dim": a.v_dim}
        | {"qk_nope_head_dim": a.nope_dim, "qk_rope_head_dim": a.rope_dim}
        | {"n_routed_experts": x.count, "num_experts_per_tok": x.top_k, "moe_intermediate_size": x.ffn}
        | {"n_shared_experts": x.shared_ffn // x.ffn, "first_k_dense_replace": len(x.dense_layers)}
        | {"moe_layer_freq": 1, "norm_topk_prob": x.normalized, "routed_scaling_factor": x.scale}
        | {"n_group": x.groups, "topk_group": x.top_groups, "aux_loss_alpha": x.balance_loss, "seq_aux": True}
    )
