"""The model of a row: a ModelSpec from the published sizes, completed by its name."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.mechanisms import Experts, Latent
from phalanx.spec.model.presets import PRESETS, preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.validate.records import Row

_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "topk")
_VOCAB = 51200
"""Vocabulary of rows that leave it out: GPT-2's, padded as in Megatron's tests."""
_VOCABULARIES = {"vtrain/single-node": 50257}
"""Vocabularies of groups whose table states another: GPT-2's, not padded (VIA-Research/vTrain f8dda84,
src/config.py:43, which no configuration of its runs overrides)."""
_HYBRIDS: Mapping[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("hybrid_models.toml").read_text())
"""Models whose blocks are of several kinds."""


def is_hybrid(row: Row) -> bool:
    """Whether a row's model has blocks of several kinds."""
    return row["model"].lower() in _HYBRIDS


def depths_of(row: Row) -> int:
    """Return the number of multi-token prediction depths of a hybrid model's row; 0 for other models, whose tables
    leave it out."""
    known = _HYBRIDS.get(row["model"].lower())
    return 0 if known is None else row.count("mtp_layers") or int(known["depths"])


class Unspecified(Exception):
    """A row cannot be predicted; the message has the reason."""


def model_of(row: Row) -> ModelSpec:
    """Build the ModelSpec of a row; the preset's if the row names one and states no shape. Raises Unspecified if
    sizes are missing or the architecture is not modelled."""
    vocab = _VOCABULARIES.get(row.group, row.count("vocab"))
    sizes = tuple(vocab if name == "vocab" else row.count(name) for name in _SIZES)
    untied = "tied_embeddings=False" in row["options"]
    if (known := _HYBRIDS.get(row["model"].lower())) is not None:
        return build(ModelSpec, complete(preset(known["model"])), "model")
    try:
        if row["model"].lower() in PRESETS and not any(sizes[:2]):
            return build(ModelSpec, complete(preset(row["model"].lower())), "model")
        return _model(row["model"].lower(), row["arch"], sizes, row.count("seq_len") or 0, untied)
    except InputError as error:
        raise Unspecified(str(error)) from None


@cache
def _model(name: str, arch: str, sizes: tuple[int | None, ...], seq: int, untied: bool) -> ModelSpec:
    """Build a ModelSpec. Raises Unspecified, or InputError for sizes that contradict each other."""
    layers, hidden, ffn, heads, kv, vocab, experts, top_k = sizes
    if not layers or not hidden:
        raise Unspecified("the model's shape is not stated")
    if "hybrid" in arch:
        raise Unspecified(f"architecture {arch} is not modelled")
    if not heads:
        raise Unspecified("the number of heads is not stated")
    fields: dict[str, Any] = {
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
        fields["family"] = "gpt2"
        if "alibi" in arch or name.startswith("mpt"):
            fields["position"] = "rotary"  # no table of positions; alibi's bias costs next to nothing
    elif arch.startswith("llama"):
        fields["tied"] = not untied and name in ("llama-1.34b", "llama-3.57b")
    elif arch == "palm":
        fields["family"] = "palm"
    elif arch == "moe" and name.startswith("moe-gpt3"):
        fields["family"] = "gpt2"
    if "qwen3" in name:
        fields |= {"head_dim": 128, "qk_norm": True}
    if name.startswith("gpt-oss"):
        fields["head_dim"] = 64
    if hidden % heads and "head_dim" not in fields:
        raise Unspecified(f"hidden = {hidden} is not a multiple of heads = {heads}")
    if experts:
        width = ffn or 4 * hidden
        if fields["family"] == "gpt2":
            # Ungated experts: gated ones of 2/3 the width have the same parameters, FLOPs and activations.
            fields["activation"], width = "swiglu", round(width * 2 / 3)
        fields["experts"] = Experts(experts, top_k or 1, width)
    if experts and "mla" in arch and "deepseek" not in name:
        # DeepSeek-V3's kind: its latent attention, one shared expert, a dense first layer.
        fields["experts"] = Experts(experts, top_k or 1, ffn or 2048, shared_ffn=ffn or 2048, dense_layers=(0,))
        fields |= {"latent": Latent(**PRESETS["deepseek-v3"]["latent"]), "ffn": 18432, "head_dim": 192}
    if "deepseek-v3" in name or "deepseek-v2" in name:
        known = PRESETS["deepseek-v3" if "v3" in name else "deepseek-v2"]
        known_experts = known["experts"] | {"dense_layers": tuple(known["experts"]["dense_layers"])}
        fields |= {"experts": Experts(**known_experts), "latent": Latent(**known["latent"])}
        fields |= {"ffn": known["ffn"], "head_dim": 192}
    return ModelSpec(**complete(fields))
