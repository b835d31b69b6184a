"""The model that Megatron-LM's arguments describe (megatron/training/arguments.py, transformer_config.py): the
inverse of frameworks/megatron/write_model.py.

Flags that are not given have Megatron's defaults: LayerNorm, learned positions, GELU, biases, a tied head, an MLP of
four times the hidden size (8/3 with a gate). The family follows from the mechanisms; no argument names it.
"""

from typing import Any

from phalanx.frameworks.megatron import read_blocks as blocks
from phalanx.frameworks.megatron.patterns import LATENT, Flag, HybridPattern
from phalanx.frameworks.megatron.read_blocks import zeros_and_ones
from phalanx.frameworks.values import count, number, truth
from phalanx.spec.errors import InputError
from phalanx.spec.model import presets
from phalanx.spec.model.mechanisms import MOST_LAYERS, Experts, Latent, RopeScaling
from phalanx.spec.model.spec import ModelSpec

_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokens of tokenizers that have one published vocabulary."""
PADDED = ("padded_vocab_size", "pad_vocab_size_to")
"""Flags of the rows of the vocabulary, padded ones included; the second is Megatron-DeepSpeed's."""


def _named_vocabulary(flag: Flag) -> int | None:
    """Return the tokens of the published model whose tokenizer is named."""
    name = str(flag("tokenizer_model", "tokenizer", "") or "")
    known = presets.published(name) if name else None
    return int(presets.PUBLISHED[known]["vocab"]) if known else None


def model(flag: Flag, hybrid: HybridPattern | None = None) -> tuple[ModelSpec | None, str, tuple[str, ...]]:
    """Return the model, or None and the reason (a size that is not stated, a mechanism that a ModelSpec cannot
    describe); and what is assumed of the model. `hybrid`: its pattern, which gives the number of blocks too."""
    needed = {"num_layers": None, "hidden_size": None, "num_attention_heads": None}
    sizes = {name: count(flag(name, f"model.{name}")) for name in needed}
    if hybrid is not None:
        sizes["num_layers"] = len(hybrid.symbols)
    vocab = next((n for name in (*PADDED, "vocab_size") if (n := count(flag(name, "model.vocab")))), None)
    assumptions: tuple[str, ...] = ()
    merges = "GPT2BPETokenizer" if flag("merge_file", "tokenizer") else ""
    tokenizer = str(flag("tokenizer_type", "tokenizer", merges) or merges)
    if not vocab and (vocab := _VOCABULARIES.get(tokenizer) or _named_vocabulary(flag)):
        assumptions = (f"a vocabulary of {vocab:,} tokens, as that of its tokenizer",)
    missing = [name.replace("_", "-") for name, value in sizes.items() if value is None]
    missing += [] if vocab else ["padded-vocab-size"]
    experts, dense = _experts(flag, sizes["num_layers"], hybrid is None)
    latent = _latent(flag, hybrid is not None and any(symbol in hybrid.symbols for symbol in LATENT))
    position = str(flag("position_embedding_type", "model.position", "learned_absolute"))
    if truth(flag("use_rotary_position_embeddings", "model.position")):
        position = "rope"
    if position != "learned_absolute":
        flag("no_position_embedding", "model.position")
    swiglu, squared = (bool(truth(flag(n, "model.activation"))) for n in ("swiglu", "squared_relu"))
    quick = truth(flag("quick_geglu", "model.activation"))
    if missing:
        return None, f"the file leaves {', '.join('--' + m for m in missing)} open", ()
    if position not in ("rope", "learned_absolute", "yarn", "none", "alibi"):
        return None, f"position-embedding-type {position} is not a position of a ModelSpec", ()
    if quick:
        return None, "--quick-geglu is not an activation of a ModelSpec", ()
    if (kind := blocks.variant(flag)) not in ("", "gdn", "dsa"):
        return None, f"--experimental-attention-variant {kind} is not a mechanism of a ModelSpec", ()
    if dense is None:
        return None, "--moe-layer-freq cannot be read", ()
    layers, hidden, heads = (sizes[name] or 1 for name in needed)
    words = {"learned_absolute": "learned", "none": "none" if latent is None else "rotary", "alibi": "none"}
    rotary = words.get(position, "rotary") == "rotary"
    head_dim = latent.nope_dim + latent.rope_dim if latent else count(flag("kv_channels", "model.head_dim"))
    if head_dim is None and hidden % heads:
        return None, "--kv-channels is missing, and the heads do not divide the hidden size", ()
    head_dim = head_dim or hidden // heads
    grouped = truth(flag("group_query_attention", "model.kv_heads")) and latent is None
    groups = count(flag("num_query_groups", "model.kv_heads", 1))
    qkv, linear = _biases(flag)
    norm = "rms" if flag("normalization", "model.norm", "LayerNorm") == "RMSNorm" or latent else "layer"
    fused = not truth(flag("no_bias_gelu_fusion", "model.activation"))
    width = count(flag("ffn_hidden_size", "model.ffn"))
    fields: dict[str, Any] = {
        "vocab": vocab,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": (groups if grouped else heads) or heads,
        "head_dim": head_dim,
        "ffn": width or (int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden),
        "max_seq": count(flag("max_position_embeddings", "model.max_seq"))
        or count(flag("seq_length", "job.seq"))
        or 1,
        "norm": norm,
        "norm_eps": number(flag("norm_epsilon", "model.norm_eps"), 1e-5),
        "position": words.get(position, "rotary"),
        "activation": "swiglu" if swiglu else "relu2" if squared else "gelu_tanh" if fused else "gelu",
        "qkv_bias": qkv,
        "out_bias": linear,
        "mlp_bias": linear,
        "tied": not truth(flag("untie_embeddings_and_output_weights", "model.tied")),
        "embed_norm": truth(flag("embed_layernorm", "model.embed_norm")) is True,
        "qk_norm": bool(truth(flag("qk_layernorm", "model.qk_norm"))) and latent is None,
        "output_gate": bool(truth(flag("attention_output_gate", "model.output_gate"))),
        "experts": experts,
        "latent": latent,
    }
    try:
        if hybrid is not None:
            fields |= blocks.hybrid(flag, hidden, hybrid, fields)
        elif (described := blocks.transformer(flag, hidden, dense, fields)) is not None:
            fields |= described
        else:
            return None, "--linear-attention-freq cannot be read", ()
        if rotary:
            fields |= _rotary(flag, latent, head_dim)
        fields["family"] = "bloom" if position == "alibi" else family(fields)
        return ModelSpec(**fields), "", assumptions
    except InputError as error:
        return None, f"{error.field}: {error.reason}", ()


def family(fields: dict[str, Any]) -> str:
    """Return the family of a model with these fields of a ModelSpec."""
    experts, kinds = fields["experts"], [mixer.kind for mixer in fields.get("mixers", ())]
    if "mamba" in kinds:
        return "nemotron_h"
    if "delta" in kinds:
        return "qwen3_next"
    if fields["latent"] is not None and fields["latent"].index is not None:
        return "deepseek_v32"
    if fields["latent"] is not None:
        return "deepseek_v3" if experts is not None and experts.score == "sigmoid" else "deepseek_v2"
    if experts is not None:
        return "qwen3_moe" if fields["qk_norm"] else "mixtral"
    if fields["norm"] == "layer" or fields["position"] == "learned":
        return "gpt2"
    if fields["qk_norm"]:
        return "qwen3"
    return "qwen2" if fields["qkv_bias"] else "mistral" if fields["window"] else "llama"


def _biases(flag: Flag) -> tuple[bool, bool]:
    linear = not truth(flag("disable_bias_linear", "model.mlp_bias"))
    return linear or bool(truth(flag("add_qkv_bias", "model.qkv_bias"))), linear


def _rotary(flag: Flag, latent: Latent | None, head_dim: int) -> dict[str, Any]:
    share = number(flag("rotary_percent", "model.rotary_dim"), 1.0)
    fields: dict[str, Any] = {"rope_theta": number(flag("rotary_base", "model.rope_theta"), 10_000)}
    if share < 1 and latent is None:
        fields["rotary_dim"] = round(share * head_dim)
    kind = flag("rope_type", "model.rope_scaling", "yarn" if latent else "rope")
    scaled = number(flag("rotary_scaling_factor", "model.rope_scaling"), 1.0)
    both, one = (number(flag(n, "model.rope_scaling"), d) for n, d in (("mscale", 1.0), ("mscale_all_dim", 0.0)))
    llama = truth(flag("use_rope_scaling", "model.rope_scaling"))
    factor = number(flag("rope_scaling_factor", "model.rope_scaling"), 8.0)
    stretched = flag("rotary_seq_len_interpolation_factor", "model.rope_scaling")
    if latent is not None and kind == "yarn":
        equal = 1.0 if both == one else None
        scaling = RopeScaling(scaled, kind="yarn", original_max_seq=4096, attention_factor=equal, mscale_all_dim=one)
        return fields | {"rope_scaling": scaling}
    if llama:
        return fields | {"rope_scaling": RopeScaling(factor, original_max_seq=8192)}
    if stretched:
        return fields | {"rope_scaling": RopeScaling(number(stretched, 1.0), kind="linear")}
    return fields


def _latent(flag: Flag, implied: bool) -> Latent | None:
    if not truth(flag("multi_latent_attention", "model.latent")) and not implied:
        return None
    names = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    kv, nope, rope, v = (count(flag(n, "model.latent", d)) or d for n, d in names.items())
    return Latent(kv, nope, rope, v, count(flag("q_lora_rank", "model.latent")))


def _experts(flag: Flag, layers: int | None, spread: bool) -> tuple[Experts | None, tuple[int, ...] | None]:
    """Return the experts, and the blocks without experts (None: they cannot be read). `spread`: whether a frequency
    states these blocks, rather than a hybrid pattern."""
    number_of = count(flag("num_experts", "model.experts"))
    if number_of is None:
        return None, ()

    def of(name: str, default: Any = None) -> Any:
        return flag(f"moe_{name}", "model.experts", default)

    dense = _dense(of("layer_freq", 1), layers or 1) if spread else ()
    score = str(of("router_score_function", "softmax"))
    groups, best = count(of("router_num_groups")) or 1, count(of("router_group_topk")) or 1
    top = count(of("router_topk", 2)) or 2
    kind = of("router_load_balancing_type", "aux_loss")
    balanced = "aux_loss" in str(kind)
    learned = truth(of("router_enable_expert_bias"))
    rate = number(of("router_bias_update_rate"), 1e-3)
    pre = truth(of("router_pre_softmax"))
    dropped = of("expert_capacity_factor")
    coefficient = of("aux_loss_coeff", 0.0)
    try:
        return (
            Experts(
                count=number_of,
                top_k=top,
                ffn=count(of("ffn_hidden_size")) or count(flag("ffn_hidden_size", "model.ffn")) or 1,
                shared_ffn=count(of("shared_expert_intermediate_size")) or 0,
                shared_gate=bool(truth(of("shared_expert_gate"))),
                latent=count(of("latent_size")) or 0,
                dense_layers=dense or (),
                score="sigmoid" if score == "sigmoid" else "softmax",
                normalized=score == "sigmoid" or not pre,
                scale=number(of("router_topk_scaling_factor"), 1.0),
                groups=groups,
                top_groups=best,
                group_score="top2" if groups > 1 and top // best == 2 else "max",
                capacity=None if dropped is None else number(dropped, 1.0),
                balance_loss=number(coefficient, 0.0) if balanced else 0.0,
                z_loss=number(of("z_loss_coeff"), 0.0),
                balance_bias=rate if learned else None,
            ),
            dense,
        )
    except (InputError, TypeError, ValueError):
        return None, None


def _dense(frequency: Any, layers: int) -> tuple[int, ...] | None:
    """Return the blocks without experts of `1`, `2` (every second has them) or `([0]*3+[1]*58)`; None if unread."""
    if layers > MOST_LAYERS:
        return None
    if (every := count(frequency)) is not None:
        return tuple(i for i in range(layers) if i % every)
    pattern = zeros_and_ones(frequency)
    return tuple(i for i, has in enumerate(pattern) if not has) if pattern and len(pattern) == layers else None
