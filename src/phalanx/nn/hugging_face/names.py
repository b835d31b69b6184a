"""Mapping from our parameters to Hugging Face tensors, or parts of them: one table per family, and one formula.

Row r of our tensor, (rows, width), is row `first + r // run * stride + r % run` of the Hugging Face tensor, or that
column if the Hugging Face tensor is (in, out):

    full tensors                                   first = 0        run = stride = rows
    gpt2's c_attn, q above k above v               first = j rows   run = rows      stride = 3 rows
    gpt_neox's query_key_value, head by head       first = j d      run = d         stride = 3 d     (d = head_dim)
    several of ours in one tensor, in g groups     first = what is before in a group, run = rows / g, stride = all / g

Every expert has a tensor of its own; in order they are the parts of ours. Some families store norm weights less one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Scan
from phalanx.spec.model.spec import ModelSpec, Parameter, buffers, parameters


@dataclass(frozen=True)
class Source:
    """The place of a parameter, or of a part of it, in a Hugging Face file. `tensor`, `shape`: of the Hugging Face
    tensor; `first`, `run`, `stride`: as in the formula above; `transposed`: whether it is stored as (in, out)."""

    tensor: str
    shape: tuple[int, ...]
    first: int
    run: int
    stride: int
    transposed: bool = False
    less: float = 0.0
    """What the stored numbers lack: ours are larger by it."""

    @property
    def ours(self) -> tuple[int, ...]:
        """The shape of our tensor, or of that part of it."""
        rows, *others = self.shape[::-1] if self.transposed else self.shape
        return (rows // self.stride * self.run, *others)


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
    "nemotron_h": Naming(
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
    ),
    # Its 62nd layer predicts a second token; neither we nor transformers count it as part of the model.
    "deepseek_v3": replace(_DEEPSEEK, buffers=rf"{_LLAMA.buffers}|layers\.61\..+", balance=_BALANCE),
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def source(spec: ModelSpec, p: Parameter) -> tuple[Source, ...]:
    """Return the location of a parameter in this model's Hugging Face files, as saved by `transformers`, in equal
    parts."""
    naming = NAMINGS[spec.family]
    module, kind = p.fqn.rsplit(".", 1)
    rows = p.shape[0]
    block = _BLOCK.fullmatch(module)
    if block is None:
        base = "" if module == "head.linear" else naming.base
        less = float(module in naming.less_one)
        return (Source(f"{base}{naming.outside[module]}.{kind}", p.shape, 0, rows, rows, less=less),)
    number, rest = block.groups()
    if naming.recurrent is not None and architecture(spec).blocks[int(number)].first(Scan) is not None:
        naming = naming.recurrent
    transposed = naming.transposed and len(p.shape) == 2
    prefix = f"{naming.base}{naming.block}.{number}"
    if p.role == "balance":
        return (Source(f"{prefix}.{naming.balance}", p.shape, 0, rows, rows),)
    if p.of_experts:
        each, out = f"{prefix}.{naming.inside[rest]}.{kind}", p.shape[1]
        return tuple(Source(each.replace("*", str(e)), p.shape[1:], 0, out, out) for e in range(rows))
    for joined in naming.joined:
        if rest in joined.parts:
            return (_part(spec, joined, int(number), rest, kind, p, prefix, transposed),)
    shape = p.shape[::-1] if transposed else p.shape
    name = naming.inside.get(f"{rest}.{kind}") or f"{naming.inside[rest]}.{kind}"
    return (Source(f"{prefix}.{name}", shape, 0, rows, rows, transposed, float(rest in naming.less_one)),)


def _part(
    spec: ModelSpec, joined: Joined, block: int, rest: str, kind: str, p: Parameter, prefix: str, transposed: bool
) -> Source:
    """Return the place of a parameter in a tensor that has several."""
    every = _by_name(spec)
    all_parts = [every[f"blocks.{block}.{part}.{kind}"] for part in joined.parts]
    groups = 1
    if joined.groups == "heads":
        groups = all_parts[0].dims[0].count
    elif joined.groups == "key heads":
        scan = architecture(spec).blocks[block].first(Scan)
        assert scan is not None
        groups = scan.groups.count
    runs = [part.shape[0] // groups for part in all_parts]
    at = joined.parts.index(rest)
    inner = (1, *p.shape[1:]) if p.role == "conv" else p.shape[1:]
    whole = (sum(runs) * groups, *inner)
    shape = whole[::-1] if transposed else whole
    return Source(f"{prefix}.{joined.tensor}.{kind}", shape, sum(runs[:at]), runs[at], sum(runs), transposed)


@lru_cache(maxsize=16)
def _by_name(spec: ModelSpec) -> dict[str, Parameter]:
    return {p.fqn: p for p in parameters(spec)}


def sources(spec: ModelSpec) -> dict[str, tuple[Source, ...]]:
    """Return the sources of every parameter, and of the family's buffers, by our names. Raises InputError for a
    family without a naming."""
    if spec.family not in NAMINGS:
        reason = "has no Hugging Face weights that this decoder takes"
        raise InputError("model.family", spec.family, reason, nearest(spec.family, NAMINGS))
    learned = buffers(spec) if NAMINGS[spec.family].balance else ()
    return {p.fqn: source(spec, p) for p in (*parameters(spec), *learned)}


def plain(family: str, tensor: str) -> str:
    """Normalize a tensor's name; files of one family differ in the base model's prefix, and in transformers 5 in the
    head's name."""
    naming = NAMINGS[family]
    return {"lm_head.weight": f"{naming.outside['head.linear']}.weight"}.get(tensor, tensor.removeprefix(naming.base))


def is_buffer(spec: ModelSpec, tensor: str) -> bool:
    """Whether a tensor, by its plain name, is not a parameter: a buffer of older files, or a tied head's copy."""
    naming = NAMINGS[spec.family]
    head = f"{naming.outside['head.linear']}.weight"
    return bool(re.fullmatch(naming.buffers, tensor)) or (spec.tied and tensor == head)
