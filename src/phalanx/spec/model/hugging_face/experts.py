"""The config.json of Mixtral, Qwen 3 MoE and gpt-oss."""

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
