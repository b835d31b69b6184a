"""The model of a row: its ModelSpec from the published sizes, completed by what is known of its name."""

from __future__ import annotations

from functools import cache
from typing import Any

from phalanx.spec.errors import InputError
from phalanx.spec.model.families import complete
from phalanx.spec.model.mechanisms import Experts, Latent
from phalanx.spec.model.presets import PRESETS
from phalanx.spec.model.spec import ModelSpec
from phalanx.validate.records import Row

_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "topk")
_VOCAB = 51200
"""Of rows that leave it out: GPT-2's, padded, as Megatron's tests have it."""


class Unspecified(Exception):
    """Why a row cannot be predicted."""


def model_of(row: Row) -> ModelSpec:
    """Raises Unspecified with the reason."""
    sizes = tuple(row.count(name) for name in _SIZES)
    return _model(
        row["model"].lower(), row["arch"], sizes, row.count("seq_len") or 0, "tied_embeddings=False" in row["options"]
    )


@cache
def _model(name: str, arch: str, sizes: tuple[int | None, ...], seq: int, untied: bool) -> ModelSpec:
    layers, hidden, ffn, heads, kv, vocab, experts, top_k = sizes
    if not layers or not hidden:
        raise Unspecified("the model's shape is not stated")
    if "hybrid" in arch:
        raise Unspecified(f"architecture {arch} is not modelled")
    if not heads:
        raise Unspecified("the number of heads is not stated")
    given: dict[str, Any] = {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv or heads,
        "vocab": vocab or _VOCAB,
        "ffn": ffn or 4 * hidden,
        "max_seq": seq,
    }
    if arch.startswith("gpt"):
        given["family"] = "gpt2"
        if "alibi" in arch or name.startswith("mpt"):
            given["position"] = "rotary"  # no table of positions; alibi's bias costs nothing of note
    elif arch.startswith("llama"):
        given["tied"] = not untied and name in ("llama-1.34b", "llama-3.57b")
    elif arch == "palm":
        given["family"] = "palm"
    elif arch == "moe" and name.startswith("moe-gpt3"):
        given["family"] = "gpt2"
    if "qwen3" in name:
        given |= {"head_dim": 128, "qk_norm": True}
    if hidden % heads and "head_dim" not in given:
        raise Unspecified(f"hidden = {hidden} is no multiple of heads = {heads}")
    if experts:
        width = ffn or 4 * hidden
        if given["family"] == "gpt2":  # ungated: gated ones of two thirds the width weigh, multiply and keep as much
            given["activation"], width = "swiglu", round(width * 2 / 3)
        given["experts"] = Experts(experts, top_k or 1, width)
    if experts and "mla" in arch and "deepseek" not in name:
        # Of DeepSeek-V3's kind: its latent attention, one shared expert, the first layer dense.
        given["experts"] = Experts(experts, top_k or 1, ffn or 2048, shared_ffn=ffn or 2048, dense_layers=(0,))
        given |= {"latent": Latent(**PRESETS["deepseek-v3"]["latent"]), "ffn": 18432, "head_dim": 192}
    if "deepseek-v3" in name or "deepseek-v2" in name:
        known = PRESETS["deepseek-v3" if "v3" in name else "deepseek-v2"]
        given |= {"experts": Experts(**{**known["experts"], "dense_layers": tuple(known["experts"]["dense_layers"])})}
        given |= {"latent": Latent(**known["latent"]), "ffn": known["ffn"], "head_dim": 192}
    try:
        return ModelSpec(**complete(given))
    except (InputError, TypeError) as error:
        raise Unspecified(str(error)) from None
