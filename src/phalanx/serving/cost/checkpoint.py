"""Quantised checkpoints: their types of weights, blocks of fp8 weights that share a scale (`weight_block_size`), and
the matrices that they keep in 16 bits, by the names of modules.

vLLM and SGLang stop while loading experts if a rank would hold part of a block: vllm-project/vllm#17569, #54178,
fp8.py, `Fp8MoEMethod.create_weights`; sgl-project/sglang#10852, fp8.py:557. Weights that an engine quantises on load
have one scale a tensor, and can be cut anywhere.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import translate
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from phalanx.serving.cost.layout import ServingLayout
from phalanx.spec.documents import read_json
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import Conv, Scan
from phalanx.spec.model.spec import ModelSpec

BLOCKWISE = ("vllm", "sglang")
"""Engines that stop at a block that is cut."""
_BLOCK = 128
_PUBLISHED = re.compile(r"qwen3.*-fp8|deepseek-(v3|r1)(?!.*distill)|minimax-m2|kimi-k2(?!-thinking|[.][56])")
"""Checkpoints whose config.json has blocks of 128 x 128."""

_UNQUANTIZED_MODULES = ((re.compile(r"meta-llama/(meta-)?llama-3\.1-405b(-instruct)?-fp8"),
          ("*.self_attn.*", "*.layers.0.mlp.*", "*.layers.125.mlp.*")),
         (re.compile(r"(openai/)?gpt-oss-\d+b|moonshotai/kimi-k2(-thinking|\.[56])"), ("!*.experts.*",)))  # fmt: skip
"""Names of published checkpoints -> modules in 16 bits, in addition to the embedding and the head: arXiv 2407.21783,
6.2 (attention, and the first and last layer; so does vllm-project/vllm#6746); of gpt-oss and Kimi K2 all but the
routed experts (`modules_to_not_convert` and `ignore` of their config.json)."""
_QUANTISED = re.compile("fp8|fp4|awq|gptq|int4|w4a16")
"""Parts of the names of checkpoints with matrices in fewer than 16 bits."""


_METHODS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "w8a8_fp8", "modelopt", "modelopt_fp8"), "fp8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "moe_wna16"), "int4"),
    "mxfp4": "mxfp4",
    **dict.fromkeys(("modelopt_fp4", "nvfp4", "nvfp4_online"), "nvfp4"),
}
"""Words of --quantization, and of a config.json's quant_method -> types of weights."""
_NAME_PARTS = (
    (re.compile("gpt-oss(?!.*bf16)|mxfp4"), "mxfp4"),
    (re.compile("fp4"), "nvfp4"),
    (re.compile("awq|gptq|int4|w4a16|kimi-k2(-thinking|[.][56])"), "int4"),
    (_INT8 := re.compile("int8|w8a(8|16)"), "fp8"),
    (re.compile(r"fp8|deepseek-(v3|r1)(?!.*distill)|kimi-k2|minimax-m2|ministral-3-\d+b-instruct(?!.*bf16)"), "fp8"),
)
"""Parts of a name -> the type of weights: experts of gpt-oss are in MXFP4 (arXiv 2508.10925, 2.1), of Kimi K2 since
its thinking model in int4 (its config.json, quantization_config)."""


def by_method(word: object) -> str:
    """Return the type of weights by a word of --quantization or a quant_method; empty: unknown."""
    return _METHODS.get(word, "") if isinstance(word, str) else ""


def published_weights(name: str) -> str:
    """Return the type of a checkpoint's weights, by its config.json or its name; bf16 by default. Raises InputError
    for an unreadable file."""
    table = _quantization(name)
    groups = table.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if isinstance(weights, dict):  # compressed-tensors, and modelopt's newer files
        kind = f"{weights.get('type')}{weights.get('num_bits')}"
        if kind in (stated := {"float8": "fp8", "float4": "nvfp4", "int4": "int4"}):
            return stated[kind]
    if kind := by_method("nvfp4" if table.get("quant_algo") == "NVFP4" else table.get("quant_method")):
        return kind
    short = "/".join(Path(name.removesuffix("/config.json")).parts[-2:]).lower()
    return next((kind for names, kind in _NAME_PARTS if names.search(short)), "bf16")


def served_weights(method: object, name: str) -> str:
    """Return the type of the weights of a server with this --quantization. Of ModelOpt's formats a checkpoint says
    which it has (vllm-project/vllm, quantization/modelopt.py, override_quantization_method). Raises InputError for an
    unreadable file."""
    published = published_weights(name)
    return published if method == "modelopt" and published == "nvfp4" else by_method(method) or published


def published_note(name: str) -> tuple[str, ...]:
    """Return a note if a published checkpoint is quantised and its name does not say so."""
    kind = published_weights(name)
    if kind == "bf16" or _is_file(name) or _QUANTISED.search(name.lower()):
        return ()
    if _INT8.search(name.lower()):
        return ("assumed: weights of int8 take the bytes and, on Hopper and later, the time of fp8's",)
    part = "its experts in " if "gpt-oss" in name.lower() else ""
    return (f"assumed: weights in {kind}, the type of {part}the published checkpoint: --weights for another",)


def of_checkpoint(model: ModelSpec, name: str) -> ModelSpec:
    """Return a model with the 16-bit modules of the published checkpoint of this name."""
    kept = next((kept for names, kept in _UNQUANTIZED_MODULES if names.fullmatch(name.lower())), ())
    return replace(model, unquantised=kept) if kept else model


def checkpoint_assumption(model: ModelSpec, name: str, weights: str) -> str:
    """Return the assumption about a quantised checkpoint of which only the name is known; empty: there is none."""
    stated = _is_file(name) or (weights == "fp8" and scale_block(name))
    if stated or weights == "bf16" or model.unquantised or not _QUANTISED.search(name.lower()):
        return ""
    remedy = "a checkpoint may keep some in 16 bits, which its config.json lists: name that as the model"
    return f"assumed: all matrices of the layers are in {weights}: {remedy}"


def scale_block(name: str) -> int:
    """Return the rows of a block of a model's fp8 weights, as published or by its config.json; 0: no blocks. Raises
    InputError for an unreadable file."""
    if not _is_file(name):
        return _BLOCK if _PUBLISHED.search(name.lower()) else 0
    sizes = _quantization(name).get("weight_block_size")
    rows = sizes[0] if isinstance(sizes, list) and sizes else 0
    return rows if isinstance(rows, int) and rows > 0 else 0


def _is_file(name: str) -> bool:
    return name.endswith(".json") or Path(name).is_dir()


def _quantization(name: str) -> dict[str, Any]:
    """Return the quantization_config of a config.json; empty if it has none, or the file is not here."""
    path = Path(name) if name.endswith(".json") else Path(name) / "config.json"
    if not _is_file(name) or not path.exists():  # a plan may be started where its model is not
        return {}
    config = read_json(path, "model")
    table = config.get("quantization_config") if isinstance(config, dict) else None
    return table if isinstance(table, dict) else {}


def cut_block_error(model: ModelSpec, x: ServingLayout, block: int) -> str:
    """Return which matrix a layout cuts inside a block of `block` rows, and a remedy; empty: none."""
    e = model.experts
    widths = (("experts'", e.ffn, x.moe_tp), ("shared expert's", e.shared_ffn, x.tp)) if e else ()
    for owner, width, ranks in (*widths, ("MLP's", 0 if e and not e.dense_layers else model.ffn, x.tp)):
        if block and ranks > 1 and width % (block * ranks):
            part = f"{width // ranks} of the {owner} width {width} on a rank are no whole blocks of {block}"
            wide = f"ep={ranks}, or " if owner == "experts'" else ""
            why = "which share a scale in this fp8 checkpoint: the engine stops as it loads them"
            return f"{part}, {why}; use {wide}a smaller tp"
    return ""


_BEFORE = ("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers",
           "transformer.h")  # fmt: skip
_SUBLAYERS = {
    "attention": ("self_attn", "attention", "attn", "self_attention", "mixer"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "moe", "mixer"),
    "delta": ("linear_attn",),
    "channel_delta": ("self_attn",),
    "lightning": ("self_attn",),
    "ssd": ("mixer", "mamba"),
    "selective": ("mixer", "mamba"),
    "conv": ("conv", "short_conv"),
}
"""Kind of a recurrence, or name of a sublayer -> names of its module."""
_INTO = {
    "delta": ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba"),
    "ssd": ("in_proj",),
    "selective": ("in_proj", "x_proj", "dt_proj"),
    "conv": ("in_proj",),
}
"""Kind of a recurrence -> names of its fused input projections."""
_PARTS = {
    **{part: (f"{part}_proj", "qkv_proj") for part in "qkv"},
    "o": ("o_proj", "out_proj", "dense"),
    "q_down": ("q_a_proj",),
    "q_up": ("q_b_proj", "q_proj"),
    "kv_down": ("kv_a_proj_with_mqa",),
    "kv_up": ("kv_b_proj",),
    **{part: (f"{part}_proj", *fused) for part, fused in (
        ("gate", ("gate_up_proj", "w1")), ("up", ("gate_up_proj", "w3")), ("down", ("w2",)))},
    "router": ("gate", "router"),
}  # fmt: skip
_WITHIN = {"experts": ("experts.0", "experts"), "shared": ("shared_experts", "shared_expert"), "index": ("indexer",)}


def _names(i: int, s: Sublayer, weight: str) -> Iterator[str]:
    """Yield the possible names, in files of checkpoints, of the module of a matrix of layer `i`."""
    scan = s.first(Scan)
    kind = scan.kind if scan is not None else "conv" if s.first(Conv) is not None else s.name
    *within, part = weight.split(".")[:-1] or [weight]
    parts = _INTO.get(kind, ()) if part != "o" else ()
    parts = parts or _PARTS.get(part, (part,))
    inside = [f"{w}." for w in _WITHIN.get(".".join(within), (".".join(within),))] if within else [""]
    for before, module, where, name in product(_BEFORE, _SUBLAYERS.get(kind, (s.name,)), inside, parts):
        yield f"{before}.{i}.{module}.{where}{name}"


@cache
def _patterns(wildcards: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the modules in 16 bits, and of the only quantised modules (`!`)."""
    apart = [[w.removeprefix("!") for w in wildcards if w.startswith("!") is alone] for alone in (False, True)]
    named, alone = (re.compile("|".join(map(translate, some)) or "(?!)") for some in apart)
    return named, alone


def is_whole(model: ModelSpec, i: int, s: Sublayer, weight: str) -> bool:
    """Whether the model's quantised checkpoint keeps a matrix of layer `i` in 16 bits."""
    named, alone = _patterns(model.unquantised)
    names = list(_names(i, s, weight))
    return any(map(named.match, names)) or (
        any(w.startswith("!") for w in model.unquantised) and not any(map(alone.match, names))
    )
