"""The model of llm-foundry's mpt_causal_lm (llmfoundry/models/mpt/configuration_mpt.py, models/utils/
config_defaults.py), and attention's kernel of either kind of model."""

from typing import Any

from phalanx.frameworks.configuration import Keys
from phalanx.frameworks.trainer_tuning import ATTENTION
from phalanx.frameworks.values import number
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec

TRITON = "triton"
"""FlashAttention 1 in Triton, of releases before v0.7; no StackOptions has it."""
_KERNELS = ATTENTION | {TRITON: TRITON, "flash": "flash2", "torch": "unfused"}
_ACTIVATIONS = {("mptmlp", "gelu"): "gelu", ("mptglu", "gelu"): "geglu", ("mptgeglu", "gelu"): "geglu",
    ("mptglu", "silu"): "swiglu"}  # fmt: skip
"""(ffn_type, its function) -> activation of a ModelSpec."""
_ATTENTION_TABLES = ("model.attn_config", "model.config_overrides.attn_config")


def attention(keys: Keys, mpt: bool) -> str:
    """Return attention's kernel, as a value of options.attention or TRITON; "" where transformers chooses it. `mpt`:
    whether the model is an MPT, whose default is FlashAttention 2."""
    paths = tuple(f"{at}.attn_impl" for at in _ATTENTION_TABLES)
    named = keys.take((*paths, "model.attn_implementation"), "options.attention")
    flash = keys.truth("model.use_flash_attention_2", "options.attention")
    if named is None and not flash:
        return "flash2" if mpt else ""
    return "flash2" if flash else _KERNELS.get(str(named), "")


def model(keys: Keys, seq: int | None) -> tuple[ModelSpec | None, str]:
    """Return the model, or None with the reason: a size that is not stated, or a part that a ModelSpec cannot
    describe. `seq`: tokens of a sequence."""

    def of(name: str, default: Any = None) -> Any:
        return keys.take(f"model.{name}", f"model.{name.rpartition('.')[2]}", default)

    def size(name: str) -> int | None:
        return keys.count(f"model.{name}", f"model.{name}")

    def core(name: str, default: Any = None) -> Any:
        return of(f"attn_config.{name}", default)

    layers, hidden, heads, vocab = (size(name) for name in ("n_layers", "d_model", "n_heads", "vocab_size"))
    if not (layers and hidden and heads and vocab):
        return None, "the file leaves d_model, n_layers, n_heads or vocab_size open"
    table, function = str(of("ffn_config.ffn_type", "mptmlp")), of("ffn_config.ffn_act_fn.name", "gelu")
    activation = _ACTIVATIONS.get((table, str(function)))
    kinds = {"multihead_attention": heads, "multiquery_attention": 1}
    groups = kinds.get(str(core("attn_type", "multihead_attention"))) or keys.count(
        "model.attn_config.kv_n_heads", "model.kv_heads"
    )
    if activation is None or groups is None:
        return None, f"an MPT with {table} of {function}, or attention of another kind, is not read"
    rotary, biased = core("rope", False) is True, core("alibi", False) is True
    learned = of("learned_pos_emb", True) is not False and not (rotary or biased)
    bias = of("no_bias", False) is not True
    fields: dict[str, Any] = {
        "family": "gpt2",
        "vocab": vocab,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": groups,
        "ffn": size("ffn_config.ffn_hidden_size") or round(number(of("expansion_ratio"), 4.0) * hidden),
        "max_seq": seq or 2048,
        "norm": "rms" if "rms" in str(of("norm_type", "low_precision_layernorm")) else "layer",
        "norm_bias": bias,
        "position": "rotary" if rotary else "learned" if learned else "none",
        "activation": activation,
        "qk_norm": core("qk_ln", False) is True,
        "qkv_bias": of("attention_bias", bias) is True,
        "out_bias": bias,
        "mlp_bias": bias,
        "tied": of("tie_word_embeddings", True) is not False,
    }
    if head_dim := size("head_dim"):
        fields["head_dim"] = head_dim
    if rotary and (theta := core("rope_theta")) is not None:
        fields["rope_theta"] = number(theta, 10_000.0)
    try:
        return build(ModelSpec, complete(fields), "model"), ""
    except InputError as error:
        return None, f"its model cannot be described: {error}"
