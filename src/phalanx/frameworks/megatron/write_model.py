"""A model as Megatron-LM's arguments, or the mechanism that has no argument."""

from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron.write_blocks import Blocks, block_settings, blocks_of, compact, positionless
from phalanx.frameworks.megatron.write_blocks import refuse as _refuse
from phalanx.frameworks.writing.program import Setting, settings
from phalanx.spec.model.mechanisms import Experts, Latent, RopeScaling
from phalanx.spec.model.spec import ModelSpec

KEYS = key_table("megatron")


def model_settings(m: ModelSpec) -> tuple[Setting, ...]:
    """Return the arguments of a model. Raises InputError for a mechanism that Megatron-LM has no argument for."""
    if m.residual != "serial":
        raise _refuse("residual", m.residual, "its MLP follows attention")
    if m.sinks:
        raise _refuse("sinks", True, "a checkpoint's sinks come through Megatron-Bridge")
    if m.norm == "layer" and not m.norm_bias:
        raise _refuse("norm_bias", False, "its LayerNorm has a bias")
    if m.norms != "before":
        raise _refuse("norms", m.norms, "its norms are before attention and the MLP")
    fixed = {
        "norm_weights": True,
        "embed_norm": False,
        "output_gate_over": "element",
        "head_bias": False,
        "streams": 1,
    }
    for name, value in {**fixed, "only_priced": ()}.items():
        if getattr(m, name) != value:
            raise _refuse(name, getattr(m, name), "it is of another decoder")
    if m.qk_norm and m.qk_norm_over != "head":
        raise _refuse("qk_norm_over", m.qk_norm_over, "queries and keys are normed over each head")
    if m.output_gate and m.latent is not None:  # transformer_config.py:3348
        raise _refuse("output_gate", True, "latent attention has no output gate")
    blocks = blocks_of(m)
    rotary = m.position == "rotary" and not positionless(blocks)
    position = "rope" if rotary else "learned_absolute" if m.position == "learned" else "none"
    return (
        *settings(
            ("--use-mcore-models", True),
            ("--transformer-impl", "transformer_engine"),
            (KEYS["model.layers"], len(blocks.words)),
            (KEYS["model.hidden"], m.hidden),
            (KEYS["model.ffn"], m.ffn),
            (KEYS["model.heads"], m.heads),
            ("--group-query-attention", m.kv_heads < m.heads and m.latent is None),
            (KEYS["model.kv_heads"], m.kv_heads if m.kv_heads < m.heads and m.latent is None else None),
            (KEYS["model.head_dim"], m.head_dim if m.latent is None else None),
            (KEYS["model.max_seq"], m.max_seq),
            (KEYS["model.vocab"], m.vocab),
            ("--untie-embeddings-and-output-weights", not m.tied),
            ("--normalization", {"rms": "RMSNorm", "layer": "LayerNorm"}[m.norm]),
            (KEYS["model.norm_eps"], m.norm_eps),
            (KEYS["model.qk_norm"], m.qk_norm),
            (KEYS["model.output_gate"], m.output_gate),
            ("--position-embedding-type", position),
        ),
        *(_rotary(m) if rotary else ()),
        *_activation(m),
        *_biases(m),
        *settings(("--attention-dropout", 0.0), ("--hidden-dropout", 0.0)),
        *block_settings(blocks),
        *(_latent(m.latent) if m.latent else ()),
        *(_experts(m.experts, blocks) if m.experts else ()),
    )


def _rotary(m: ModelSpec) -> tuple[Setting, ...]:
    if m.rope_theta != int(m.rope_theta):
        raise _refuse("rope_theta", m.rope_theta, "--rotary-base is an integer")
    share = m.rotary_width / (m.latent.rope_dim if m.latent else m.head_dim)
    base = settings((KEYS["model.rope_theta"], int(m.rope_theta)), ("--rotary-percent", share))
    if m.rope_scaling is None:
        return (*base, *settings(("--rope-type", "rope" if m.latent else None)))
    return (*base, *_scaled(m, m.rope_scaling))


def _scaled(m: ModelSpec, r: RopeScaling) -> tuple[Setting, ...]:
    if m.latent is not None:
        if r.kind != "yarn":
            raise _refuse("rope_scaling.kind", r.kind, "latent attention has rope and yarn there", "use yarn")
        _require_fixed(r, "yarn of latent attention", original_max_seq=4096, beta_fast=32.0, beta_slow=1.0)
        return settings(
            ("--rope-type", "yarn"),
            ("--rotary-scaling-factor", r.factor),
            ("--mscale", r.mscale_all_dim or 1.0),
            ("--mscale-all-dim", r.mscale_all_dim),
        )
    if r.kind == "linear":
        if r.factor != int(r.factor):
            raise _refuse("rope_scaling.factor", r.factor, "its interpolation factor is an integer")
        return settings(("--rotary-seq-len-interpolation-factor", int(r.factor)))
    if r.kind == "llama3":
        _require_fixed(r, "--use-rope-scaling", low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=8192)
        return settings(("--use-rope-scaling", True), ("--rope-scaling-factor", r.factor))
    raise _refuse("rope_scaling.kind", r.kind, "yarn is for latent attention or gpt_oss there", "use llama3")


def _require_fixed(r: RopeScaling, what: str, **values: float) -> None:
    for name, value in values.items():
        if getattr(r, name) != value:
            raise _refuse(f"rope_scaling.{name}", getattr(r, name), f"{what} has {value:g}")


def _activation(m: ModelSpec) -> tuple[Setting, ...]:
    if m.activation == "swiglu_clamped":
        raise _refuse("activation", m.activation, "its products with biases come through Megatron-Bridge")
    if m.activation == "relu2":
        return settings(("--squared-relu", True))
    if m.activation in ("geglu", "relu", "xielu"):
        raise _refuse("activation", m.activation, "its gate is SiLU's, and others are gelu and the square of relu")
    if m.activation == "gelu_tanh":  # the fused kernel is the approximation by tanh
        return ()
    return settings(("--swiglu", True)) if m.activation == "swiglu" else settings(("--no-bias-gelu-fusion", True))


def _biases(m: ModelSpec) -> tuple[Setting, ...]:
    if m.out_bias != m.mlp_bias:
        raise _refuse("out_bias", m.out_bias, "attention's output and the MLP have biases together, or neither has")
    if m.out_bias:
        if not m.qkv_bias:
            raise _refuse("qkv_bias", False, "linear layers with biases have them at queries, keys and values too")
        return ()
    return settings(("--disable-bias-linear", True), ("--add-qkv-bias", m.qkv_bias))


def _latent(x: Latent) -> tuple[Setting, ...]:
    return settings(
        ("--multi-latent-attention", True),
        (KEYS["model.latent.q_rank"], x.q_rank),
        (KEYS["model.latent.kv_rank"], x.kv_rank),
        (KEYS["model.latent.nope_dim"], x.nope_dim),
        (KEYS["model.latent.rope_dim"], x.rope_dim),
        (KEYS["model.latent.v_dim"], x.v_dim),
    )


def frequency(blocks: Blocks) -> str | None:
    """Return the value of --moe-layer-freq, a list in Python with 1 for blocks with experts; None of a hybrid model,
    whose pattern says so."""
    has = [word.endswith("experts") for word in blocks.words]
    return None if blocks.symbols else "1" if all(has) else f"({compact(has)})"


def _experts(x: Experts, blocks: Blocks) -> tuple[Setting, ...]:
    if x.chooser != "tokens":
        raise _refuse("experts.chooser", x.chooser, "its tokens choose experts", "use tokens")
    if x.bias or x.router_bias:
        raise _refuse("experts.bias", True, "experts and routers have no biases of their own")
    if x.score == "sigmoid" and not x.normalized and x.top_k > 1:
        raise _refuse("experts.normalized", False, "sigmoid scores are divided by their sum", "use normalized = true")
    if x.score == "softmax" and x.normalized and x.groups > 1:
        raise _refuse("experts.normalized", True, "groups choose before the scores are normalized")
    if x.groups > 1 and x.top_k // x.top_groups != {"max": 1, "top2": 2}[x.group_score]:
        best = x.top_k // x.top_groups
        raise _refuse(
            "experts.group_score", x.group_score, f"a group's score is the sum of its best top_k / groups = {best}"
        )
    if x.identity:
        raise _refuse("experts.identity", x.identity, "experts that return their input are not in Megatron-Core")
    grouped = x.groups > 1
    return settings(
        (KEYS["model.experts.count"], x.count),
        (KEYS["model.experts.top_k"], x.top_k),
        (KEYS["model.experts.ffn"], x.ffn),
        (KEYS["model.experts.shared_ffn"], x.shared_ffn or None),
        ("--moe-layer-freq", frequency(blocks)),
        (KEYS["model.experts.shared_gate"], x.shared_gate),
        (KEYS["model.experts.latent"], x.latent or None),
        ("--moe-grouped-gemm", True),
        (KEYS["model.experts.score"], x.score),
        # softmax over the chosen logits equals scores that are divided by their sum
        ("--moe-router-pre-softmax", x.score == "softmax" and not x.normalized),
        (KEYS["model.experts.scale"], x.scale if x.scale != 1 else None),
        (KEYS["model.experts.groups"], x.groups if grouped else None),
        (KEYS["model.experts.top_groups"], x.top_groups if grouped else None),
        ("--moe-router-enable-expert-bias", x.balance_bias is not None),
        (KEYS["model.experts.balance_bias"], x.balance_bias),
        ("--moe-router-load-balancing-type", "seq_aux_loss" if x.balance_loss else "none"),
        ("--moe-aux-loss-coeff", x.balance_loss or None),
        (KEYS["model.experts.z_loss"], x.z_loss or None),
        (KEYS["model.experts.capacity"], x.capacity),
        ("--moe-token-drop-policy", "position" if x.capacity else None),
    )
