"""The model and the stack of GPT-NeoX's YAML (EleutherAI/gpt-neox ea7aefd8, megatron/neox_arguments/neox_args.py)."""

from typing import Any

from phalanx.frameworks.configuration import Config, Keys, StatedLayout
from phalanx.frameworks.values import number, truth
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec

_SIGNS = ("pipe_parallel_size", "num_layers", "hidden_size")
_VOCABULARIES = {"20B_tokenizer": 50277, "gpt2-vocab": 50257}
"""Tokens of published vocabularies, by a part of vocab_file."""
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
}
_KERNELS = ("global", "flash")
"""Kinds of attention_config that are softmax attention over everything before."""
_POSITIONS = {"rotary": "rotary", "learned": "learned", "none": "none"}


def is_neox(config: Config) -> bool:
    """Whether tables are GPT-NeoX's, which has DeepSpeed's keys too."""
    return any(name in config or name.replace("_", "-") in config for name in _SIGNS)


def stack(precision: str | None) -> str:
    """Return the stack that prices GPT-NeoX: DeepSpeed's engine around Megatron's blocks, as in its published
    runs."""
    return "megatron-deepspeed-2022-bf16" if precision == "bf16" else "megatron-deepspeed-2022"


def attention(keys: Keys) -> str:
    """Return attention's kernel."""
    return "flash" if "flash" in str(keys.take("attention_config", "options.attention", "")) else "unfused"


def sizes(keys: Keys) -> dict[str, Any]:
    """Return the sizes of the model that a file states, by the names of a config.json."""
    return {theirs: keys.take(ours, f"model.{theirs}") for theirs, ours in _SIZES.items()}


def model(keys: Keys, layout: StatedLayout) -> tuple[ModelSpec | None, str, tuple[str, ...]]:
    """Return the model, or None and the reason; and what is assumed of the model."""

    def count(name: str, default: int | None = None) -> int | None:
        return keys.count(name, f"model.{name}", default)

    def on(name: str, default: bool) -> bool:
        return truth(keys.take(name, f"model.{name}", default)) is True

    layers, hidden, heads = (count(name) for name in ("num_layers", "hidden_size", "num_attention_heads"))
    if not (layers and hidden and heads):
        return None, "the file leaves num_layers, hidden_size or num_attention_heads open", ()
    core = str(keys.take("attention_config", "options.attention", "global"))
    if not any(kind in core for kind in _KERNELS) or (count("moe_num_experts", 1) or 1) > 1:
        return None, "its experts, or attention of another kind, are not read", ()
    position = str(keys.take("pos_emb", "model.position", "learned"))
    if position not in _POSITIONS:
        return None, f"pos_emb {position} is not a position of a ModelSpec", ()
    file = str(keys.take("vocab_file", "model.vocab", ""))
    exact = count("padded_vocab_size")
    tokens = exact or next((n for part, n in _VOCABULARIES.items() if part in file), None)
    if tokens is None:
        return None, "the file leaves padded_vocab_size open", ()
    padded = keys.count("make_vocab_size_divisible_by", "options.vocab_multiple", 128) or 128
    every = 1 if exact else padded * (layout.tp or 1)
    gated = keys.take("activation", "model.activation", "gelu") == "swiglu"
    width, multiple = count("intermediate_size") or 4 * hidden, count("mlp_multiple_of", 1) or 1
    inner = int(width * 2 / 3) // 2 if gated else width  # megatron/model/transformer.py:122
    rms = keys.take("norm", "model.norm", "layernorm") == "rmsnorm"
    bias = on("use_bias_in_attn_linear", True)
    fields: dict[str, Any] = {
        "family": "llama" if rms and gated else "gpt_neox",
        "vocab": -(-tokens // every) * every,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": count("num_kv_heads") or heads,
        "ffn": -(-inner // multiple) * multiple,
        "max_seq": count("max_position_embeddings") or layout.seq,
        "norm": "rms" if rms else "layer",
        "norm_eps": number(keys.take("rms_norm_epsilon" if rms else "layernorm_epsilon", "model.norm_eps"), 1e-5),
        "position": _POSITIONS[position],
        "activation": "swiglu" if gated else "gelu",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": on("use_bias_in_mlp", True) and not gated,
        "tied": not on("no_weight_tying", False),
    }
    if on("gpt_j_residual", False):
        fields["residual"] = "parallel_one_norm" if on("gpt_j_tied", False) else "parallel"
    elif fields["family"] == "gpt_neox":
        fields["residual"] = "serial"
    if position == "rotary":
        share = number(keys.take("rotary_pct", "model.rotary_dim"), 1.0)
        fields |= {"rotary_dim": int(hidden // heads * share)} if share < 1 else {}
        fields["rope_theta"] = number(keys.take("rotary_emb_base", "model.rope_theta"), 10_000.0)
    try:
        assumed = () if exact else (f"a vocabulary of {tokens:,} tokens, by {file}",)
        return build(ModelSpec, complete(fields), "model"), "", assumed
    except InputError as error:
        return None, f"its model cannot be described: {error}", ()
