"""The config.json of Mixtral, Qwen 3 MoE, gpt-oss, and DeepSeek V2 and V3."""

from __future__ import annotations

from phalanx.spec.model.hugging_face import reading as read
from phalanx.spec.model.hugging_face import writing as write
from phalanx.spec.model.hugging_face.reading import Config, Fields
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec


def read_mixtral(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of Mixtral."""
    c.only("router_jitter_noise", 0.0)
    fields = (
        read.sizes(c, 131072, 1e-5, kv_heads=8)
        | read.head_dim(c)
        | read.rope(c, 1e6)
        | {"window": c("sliding_window")}
    )
    routed = {"count": c("num_local_experts", 8), "top_k": c("num_experts_per_tok", 2), "ffn": fields["ffn"]}
    return fields | {"experts": routed | _read_losses(c, routed["top_k"])}


def write_mixtral(spec: ModelSpec) -> Fields:
    """Return the config of a Mixtral model."""
    x = write.experts(spec)
    routed = {"num_local_experts": x.count, "num_experts_per_tok": x.top_k, "sliding_window": spec.window}
    return write.of_llama(spec) | routed | _write_losses(x)


def read_qwen3_moe(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of Qwen 3 MoE."""
    fields = read.sizes(c, 32768, kv_heads=4) | read.head_dim(c) | read.biases(c) | read.rope(c)
    if c("use_sliding_window", False):
        fields["window"] = c("sliding_window")
    step, dense = c("decoder_sparse_step", 1), c("mlp_only_layers", [])
    routed = {
        "count": c("num_experts") or c("num_local_experts", 128),
        "top_k": c("num_experts_per_tok", 8),
        "ffn": c("moe_intermediate_size", 768),
        "dense_layers": [i for i in range(fields["layers"]) if i in dense or (i + 1) % step],
        "normalized": c("norm_topk_prob", False),
    }
    return fields | {"experts": routed | _read_losses(c, routed["top_k"])}


def write_qwen3_moe(spec: ModelSpec) -> Fields:
    """Return the config of a Qwen 3 MoE model."""
    x = write.experts(spec)
    return (
        write.of_llama(spec)
        | {"attention_bias": spec.qkv_bias, "sliding_window": spec.window}
        | {"use_sliding_window": spec.window is not None, "decoder_sparse_step": 1}
        | {"num_experts": x.count, "num_experts_per_tok": x.top_k, "moe_intermediate_size": x.ffn}
        | {"mlp_only_layers": list(x.dense_layers), "norm_topk_prob": x.normalized}
        | _write_losses(x)
    )


def read_gpt_oss(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of gpt-oss."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    fields = read.sizes(c, 131072, 1e-5, kv_heads=8) | read.head_dim(c, 64) | read.biases(c, default=True)
    fields |= read.rope(c, 150_000.0, default=yarn)
    fields |= read.windows(c, range(0, fields["layers"], 2))
    routed = {
        "count": c("num_local_experts", 128),
        "top_k": c("num_experts_per_tok", 4),
        "ffn": fields["ffn"],
        "bias": True,
        "router_bias": True,
    }
    return fields | {"experts": routed}


def _read_losses(c: Config, top_k: int) -> Fields:
    """Read the router's loss coefficients. In `transformers` the balance loss is the number of experts x the sum over
    them of (share of tokens x mean score), with shares that sum to top_k; ours sum to 1."""
    return {"balance_loss": c("router_aux_loss_coef", 0.001) * top_k, "z_loss": c("router_z_loss_coef", 0.0)}


def _write_losses(x: Experts) -> Fields:
    """Return the coefficients for `transformers`, where the experts' shares of tokens sum to top_k; ours sum to 1.
    Its configurations have no z loss: the key is written only if it is used."""
    z_loss = {"router_z_loss_coef": x.z_loss} if x.z_loss else {}
    return {"router_aux_loss_coef": x.balance_loss / x.top_k, **z_loss}


def read_deepseek_v2(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of DeepSeek V2.

    norm_topk_prob is refused: transformers ignores it, and DeepSeek's own code then omits the scale.
    """
    for key, wanted in (("scoring_func", "softmax"), ("norm_topk_prob", False)):
        c.only(key, wanted)
    c.only("topk_method", "greedy", "group_limited_greedy")
    fields = _read_shared(c, 2048) | {"mlp_bias": c("mlp_bias", False)}
    fields["experts"] |= {"scale": c("routed_scaling_factor", 1.0)}
    if c("topk_method") == "group_limited_greedy":
        fields["experts"] |= {"groups": c.need("n_group"), "top_groups": c.need("topk_group")}
    return fields


def write_deepseek_v2(spec: ModelSpec) -> Fields:
    """Return the config of a DeepSeek V2 model."""
    x = write.experts(spec)
    method = "group_limited_greedy" if x.groups > 1 else "greedy"
    more = {"topk_method": method, "scoring_func": "softmax", "mlp_bias": spec.mlp_bias}
    return _write_shared(spec, x) | more


def read_deepseek_v3(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of DeepSeek V3."""
    for key, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        c.only(key, wanted)
    fields = _read_shared(c, 4096)
    fields["latent"] |= {"interleaved": c("rope_interleave", True)}
    fields["experts"] |= {
        "normalized": c("norm_topk_prob", True),
        "scale": c("routed_scaling_factor", 2.5),
        "groups": c("n_group", 8),
        "top_groups": c("topk_group", 4),
    }  # families.py has the rest
    return fields


def write_deepseek_v3(spec: ModelSpec) -> Fields:
    """Return the config of a DeepSeek V3 model."""
    more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    interleaved = spec.latent is None or spec.latent.interleaved
    return _write_shared(spec, write.experts(spec)) | more | {"rope_interleave": interleaved}


def _read_shared(c: Config, max_seq: int) -> Fields:
    """Read the fields shared by both generations. Sizes whose defaults differ between them must be present."""
    c.only("moe_layer_freq", 1)
    if c("aux_loss_alpha"):
        c.only("seq_aux", True)
    fields = read.sizes(c, max_seq) | read.biases(c) | read.rope(c)
    if "rope_scaling" in fields:
        rope = c("rope_parameters") or c("rope_scaling")
        fields["rope_scaling"] |= {"mscale_all_dim": float(rope.get("mscale_all_dim") or 0)}
    fields["kv_heads"] = fields["heads"]  # each head has its own keys, projected from the shared latent
    ffn = c.need("moe_intermediate_size")
    latent = {
        "q_rank": c("q_lora_rank") if "q_lora_rank" in c.keys else 1536,
        "kv_rank": c("kv_lora_rank", 512),
        "nope_dim": c("qk_nope_head_dim", 128),
        "rope_dim": c("qk_rope_head_dim", 64),
        "v_dim": c("v_head_dim", 128),
    }
    routed = {
        "count": c.need("n_routed_experts"),
        "top_k": c.need("num_experts_per_tok"),
        "ffn": ffn,
        "shared_ffn": c.need("n_shared_experts") * ffn,
        "dense_layers": list(range(min(c.need("first_k_dense_replace"), fields["layers"]))),
        "balance_loss": c("aux_loss_alpha", 0.0),
    }
    return fields | {"latent": latent, "experts": routed}


def _write_shared(spec: ModelSpec, x: Experts) -> Fields:
    a = spec.latent
    assert a is not None
    return (
        write.of_llama(spec)
        | {"attention_bias": spec.qkv_bias, "head_dim": a.rope_dim}
        | {"q_lora_rank": a.q_rank, "kv_lora_rank": a.kv_rank, "v_head_dim": a.v_dim}
        | {"qk_nope_head_dim": a.nope_dim, "qk_rope_head_dim": a.rope_dim}
        | {"n_routed_experts": x.count, "num_experts_per_tok": x.top_k, "moe_intermediate_size": x.ffn}
        | {"n_shared_experts": x.shared_ffn // x.ffn, "first_k_dense_replace": len(x.dense_layers)}
        | {"moe_layer_freq": 1, "norm_topk_prob": x.normalized, "routed_scaling_factor": x.scale}
        | {"n_group": x.groups, "topk_group": x.top_groups, "aux_loss_alpha": x.balance_loss, "seq_aux": True}
    )
