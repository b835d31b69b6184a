"""The config.json of DeepSeek V2 and V3."""

from __future__ import annotations

from phalanx.spec.model.hugging_face import reading as read
from phalanx.spec.model.hugging_face import writing as write
from phalanx.spec.model.hugging_face.reading import Config, Fields
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec


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
