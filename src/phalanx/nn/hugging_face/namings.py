"""How Hugging Face files name the parameters of each model family: one row a family, most of them like another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Joined:
    """Modules of ours whose tensors are one in a file, in order: once, or in every one of its groups."""

    tensor: str
    parts: tuple[str, ...]
    groups: Literal["", "heads", "key heads"] = ""


@dataclass(frozen=True)
class Naming:
    """Names of a model family: our module, or parameter -> the Hugging Face one, with a star for the number of an
    expert. `base` is the prefix of all but the head, and may be missing in a file."""

    base: str
    block: str
    outside: dict[str, str]
    inside: dict[str, str]
    joined: tuple[Joined, ...] = ()
    transposed: bool = False  # matrices of blocks are (in, out)
    buffers: str = r"(?!)"  # non-parameters in older files
    balance: str = ""  # the experts' balance biases
    recurrent: Naming | None = None  # blocks with a recurrence in place of attention
    less_one: frozenset[str] = frozenset()  # modules whose weights are stored less one
    also: tuple[str, str] = ("", "")  # a part of names in other files, and what it is here
    spread: frozenset[str] = frozenset()  # vectors (n,) that are stored as (1, 1, n, 1)


_LLAMA = Naming(
    base="model.",
    block="layers",
    outside={"embed.token": "embed_tokens", "head.norm": "norm", "head.linear": "lm_head"},
    inside={
        "norm1": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "norm2": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    buffers=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
_ROUTED = {
    "mlp.router": "mlp.gate",
    **{f"mlp.experts.{part}": f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")},
}
_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    **{
        f"mlp.experts.{part}": f"block_sparse_moe.experts.*.w{n}" for part, n in (("gate", 1), ("up", 3), ("down", 2))
    },
}
_LATENT = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
_SHARED = {f"mlp.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_BALANCE = "mlp.gate.e_score_correction_bias"
_DEEPSEEK = replace(_LLAMA, inside=_LLAMA.inside | _LATENT | _ROUTED | _SHARED)
_GPT2 = Naming(
    base="transformer.",
    block="h",
    outside={"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f", "head.linear": "lm_head"},
    inside={
        "norm1": "ln_1",
        "attention.o": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    joined=(Joined("attn.c_attn", ("attention.q", "attention.k", "attention.v")),),
    transposed=True,
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
)
_GPT_NEOX = Naming(
    base="gpt_neox.",
    block="layers",
    outside={"embed.token": "embed_in", "head.norm": "final_layer_norm", "head.linear": "embed_out"},
    inside={
        "norm1": "input_layernorm",
        "attention.o": "attention.dense",
        "norm2": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    joined=(Joined("attention.query_key_value", ("attention.q", "attention.k", "attention.v"), "heads"),),
    buffers=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.(inv_freq|cos_cached|sin_cached))",
)
_DELTA = {
    "attention.dt_bias": "linear_attn.dt_bias",
    "attention.a_log": "linear_attn.A_log",
    "attention.norm": "linear_attn.norm",
    "attention.o": "linear_attn.out_proj",
}
_SHARED_ALONE = {f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_STREAM_NORMS = frozenset({"norm1", "norm2", "head.norm"})
_QWEN3_NEXT = replace(
    _LLAMA,
    inside=_LLAMA.inside | _ROUTED | _SHARED_ALONE | {"mlp.shared.scale": "mlp.shared_expert_gate"},
    joined=(Joined("self_attn.q_proj", ("attention.q", "attention.gate"), "heads"),),
    less_one=_STREAM_NORMS | {"attention.q_norm", "attention.k_norm"},
    buffers=r"mtp\..+",
)
_MIXER = {
    "norm1": "norm",
    **{f"attention.{part}": f"mixer.{part}_proj" for part in ("q", "k", "v", "o")},
    "mamba.dt_bias": "mixer.dt_bias",
    "mamba.a_log": "mixer.A_log",
    "mamba.d": "mixer.D",
    "mamba.norm": "mixer.norm",
    "mamba.o": "mixer.out_proj",
    "mlp.router": "mixer.gate",
    "mlp.narrow": "mixer.fc1_latent_proj",
    "mlp.wide": "mixer.fc2_latent_proj",
    **{f"mlp.{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"mlp.shared.{part}": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    **{f"mlp.experts.{part}": f"mixer.experts.*.{part}_proj" for part in ("up", "down")},
}
_NEMOTRON_H = Naming(
    base="backbone.",
    block="layers",
    outside={"embed.token": "embeddings", "head.norm": "norm_f", "head.linear": "lm_head"},
    inside=_MIXER,
    joined=(
        Joined("mixer.in_proj", tuple(f"mamba.{part}" for part in ("z", "x", "b", "c", "dt"))),
        Joined("mixer.conv1d", tuple(f"mamba.conv.{part}" for part in "xbc")),
    ),
    buffers=r"mtp\..+",
    balance="mixer.gate.e_score_correction_bias",
)
_GLM = replace(_LLAMA, joined=(Joined("mlp.gate_up_proj", ("mlp.gate", "mlp.up")),))
_AFTER = {"norm1_after": "post_attention_layernorm", "norm2_after": "post_feedforward_layernorm"}
_DENSE = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_PLAIN = {"mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
_MAMBA = {
    **{f"mamba.{ours}": f"mamba.{name}" for ours, name in (("dt_bias", "dt_bias"), ("a_log", "A_log"), ("d", "D"))},
    **{"mamba.norm": "mamba.norm", "mamba.o": "mamba.out_proj"},
}
_OF_MAMBA = (
    Joined("mamba.in_proj", tuple(f"mamba.{part}" for part in ("z", "x", "b", "c", "dt"))),
    Joined("mamba.conv1d", tuple(f"mamba.conv.{part}" for part in "xbc")),
)
_OF_GRANITE = (
    Joined("block_sparse_moe.input_linear", ("mlp.experts.gate", "mlp.experts.up")),
    Joined("shared_mlp.input_linear", ("mlp.shared.gate", "mlp.shared.up")),
    Joined("shared_mlp.input_linear", ("mlp.gate", "mlp.up")),
)
_GRANITE = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts.down": "block_sparse_moe.output_linear",
    "mlp.shared.down": "shared_mlp.output_linear",
    "mlp.down": "shared_mlp.output_linear",
}
_ROUTED_SHARED = replace(_LLAMA, inside=_LLAMA.inside | _ROUTED | _SHARED, balance=_BALANCE)
_AROUND = {"mlp.router": "mlp.router.gate"}
_QWEN3_5_DELTA = (
    Joined("linear_attn.in_proj_qkv", tuple(f"attention.{part}" for part in "qkv")),
    Joined("linear_attn.conv1d", tuple(f"attention.conv.{part}" for part in "qkv")),
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    recurrent=replace(
        _QWEN3_NEXT,
        inside=_QWEN3_NEXT.inside
        | _DELTA
        | {
            f"attention.{ours}": f"linear_attn.in_proj_{name}"
            for ours, name in (("z", "z"), ("beta", "b"), ("alpha", "a"))
        },
        joined=_QWEN3_5_DELTA,
    ),
)
_LFM2 = replace(
    _LLAMA,
    outside=_LLAMA.outside | {"head.norm": "embedding_norm"},
    inside=_LLAMA.inside
    | {"norm1": "operator_norm", "norm2": "ffn_norm", "attention.o": "self_attn.out_proj", "conv.o": "conv.out_proj"}
    | {f"attention.{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"}
    | {f"mlp.{part}": f"feed_forward.w{n}" for part, n in (("gate", 1), ("up", 3), ("down", 2))}
    | {"mlp.router": "feed_forward.gate"}
    | {f"mlp.experts.{part}": f"feed_forward.experts.*.w{n}" for part, n in (("gate", 1), ("up", 3), ("down", 2))},
    joined=(
        Joined("conv.in_proj", tuple(f"conv.{part}" for part in "bcx")),
        Joined("conv.conv", ("conv.conv.x",)),
    ),
    balance="feed_forward.expert_bias",
)
_KIMI = replace(
    _DEEPSEEK,
    inside=_DEEPSEEK.inside
    | {name: theirs.replace("mlp.", "block_sparse_moe.") for name, theirs in (_ROUTED | _SHARED | _DENSE).items()}
    | _MIXTRAL,
    also=("mlp.", "block_sparse_moe."),  # the dense block, in files that transformers did not write
    balance="block_sparse_moe.gate.e_score_correction_bias",
)
_OF_KIMI = {
    **{"beta": "b_proj", "f_down": "f_a_proj", "f_up": "f_b_proj", "z_down": "g_a_proj", "z_up": "g_b_proj"},
    **{"norm": "o_norm", "dt_bias": "dt_bias", "a_log": "A_log"},
}
NAMINGS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "mixtral": replace(_LLAMA, inside=_LLAMA.inside | _MIXTRAL),
    "qwen3_moe": replace(_LLAMA, inside=_LLAMA.inside | _ROUTED),
    "deepseek_v2": _DEEPSEEK,
    "qwen3_next": replace(
        _QWEN3_NEXT,
        recurrent=replace(
            _QWEN3_NEXT,
            inside=_QWEN3_NEXT.inside | _DELTA,
            joined=(
                Joined("linear_attn.in_proj_qkvz", tuple(f"attention.{part}" for part in "qkvz"), "key heads"),
                Joined("linear_attn.in_proj_ba", ("attention.beta", "attention.alpha"), "key heads"),
                Joined("linear_attn.conv1d", tuple(f"attention.conv.{part}" for part in "qkv")),
            ),
        ),
    ),
    **dict.fromkeys(("nemotron_h", "mamba2"), _NEMOTRON_H),
    # Its 62nd layer predicts a second token; neither we nor transformers count it as part of the model.
    "deepseek_v3": replace(_DEEPSEEK, buffers=rf"{_LLAMA.buffers}|layers\.61\..+", balance=_BALANCE),
    # Those below are read and written, and have no writer of a config.json.
    **dict.fromkeys(
        ("cwm", "ernie4_5", "granite", "internlm3", "iquestcoder", "ministral", "seed_oss", "smollm3"), _LLAMA
    ),
    **dict.fromkeys(("helium", "stablelm", "arcee", "jais2", "cohere", "cohere2"), _LLAMA),
    "nemotron": replace(_LLAMA, less_one=_STREAM_NORMS),
    "starcoder2": replace(_LLAMA, inside=_LLAMA.inside | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
    "phi3": replace(
        _LLAMA,
        joined=(
            Joined("self_attn.qkv_proj", ("attention.q", "attention.k", "attention.v")),
            Joined("mlp.gate_up_proj", ("mlp.gate", "mlp.up")),
        ),
    ),
    "gpt_bigcode": replace(
        _GPT2,
        transposed=False,
        joined=(Joined("attn.c_attn", ("attention.q", "attention.k", "attention.v"), "key heads"),),
    ),
    "falcon": Naming(
        base="transformer.",
        block="h",
        outside={"embed.token": "word_embeddings", "head.norm": "ln_f", "head.linear": "lm_head"},
        inside={
            **{"norm1": "input_layernorm", "attention.o": "self_attention.dense"},
            **{"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"},
        },
        joined=(
            Joined("self_attention.query_key_value", ("attention.q", "attention.k", "attention.v"), "key heads"),
        ),
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        inside=_GLM.inside | {"norm1_after": "post_self_attn_layernorm", "norm2_after": "post_mlp_layernorm"},
    ),
    "gemma": replace(_LLAMA, less_one=_STREAM_NORMS),
    # Norms after sublayers.
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), replace(_LLAMA, inside=_LLAMA.inside | _AFTER)),
    "flex_olmo": replace(_LLAMA, inside=_LLAMA.inside | _AFTER | _ROUTED),
    "deepseek_v32": replace(
        _DEEPSEEK,
        inside=_DEEPSEEK.inside
        | {
            **{"attention.index.q": "self_attn.indexer.wq_b", "attention.index.k": "self_attn.indexer.wk"},
            "attention.index.k_norm": "self_attn.indexer.k_norm",
            "attention.index.weights": "self_attn.indexer.weights_proj",
        },
        balance=_BALANCE,
    ),
    # Experts.
    **dict.fromkeys(("olmoe", "mellum"), replace(_LLAMA, inside=_LLAMA.inside | _ROUTED)),
    "minimax_m2": replace(
        _LLAMA, inside=_LLAMA.inside | _MIXTRAL, balance="block_sparse_moe.e_score_correction_bias"
    ),
    "qwen2_moe": replace(
        _LLAMA,
        inside=_LLAMA.inside | _ROUTED | _SHARED_ALONE | {"mlp.shared.scale": "mlp.shared_expert_gate"},
    ),
    **dict.fromkeys(("glm4_moe", "solar_open"), _ROUTED_SHARED),
    "exaone_moe": replace(_ROUTED_SHARED, balance="mlp.e_score_correction_bias"),
    "glm4_moe_lite": replace(_DEEPSEEK, balance=_BALANCE),
    "youtu": _DEEPSEEK,
    "hy_v3": replace(
        _LLAMA,
        inside=_LLAMA.inside
        | _ROUTED
        | _AROUND
        | {f"mlp.shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        balance="mlp.expert_bias",
    ),
    "afmoe": replace(
        _LLAMA,
        inside=_LLAMA.inside
        | _ROUTED
        | _SHARED
        | _AROUND
        | {"attention.gate": "self_attn.gate_proj", "norm1_after": "post_attention_layernorm"}
        | {"norm2": "pre_mlp_layernorm", "norm2_after": "post_mlp_layernorm"},
        balance="mlp.expert_bias",
    ),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        replace(_LLAMA, inside=_LLAMA.inside | _GRANITE | _MAMBA, joined=(*_OF_GRANITE, *_OF_MAMBA)),
    ),
    # Convolutions and recurrences.
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "kimi_linear": replace(
        _KIMI,
        recurrent=replace(
            _KIMI,
            inside=_KIMI.inside | {f"attention.{ours}": f"self_attn.{name}" for ours, name in _OF_KIMI.items()},
            joined=tuple(Joined(f"self_attn.{part}_conv1d", (f"attention.conv.{part}",)) for part in "qkv"),
            spread=frozenset({"attention.a_log"}),
        ),
    ),
    "bamba": replace(
        _LLAMA,
        outside=_LLAMA.outside | {"head.norm": "final_layernorm"},
        inside=_LLAMA.inside
        | _MAMBA
        | {"norm2": "pre_ff_layernorm"}
        | {f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        joined=_OF_MAMBA,
    ),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN3_5),
}
"""The rows by model_type."""
