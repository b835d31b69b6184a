"""Served models by their Hugging Face name: the sizes that determine a step's price, from their config.json.
`tests/spec/data/served_configs.json` has the sizes of 44 of those files; a test compares every row with it. The table
includes mechanisms that Phalanx prices but does not run: gated linear attention along with full attention (Yang et
al. 2024), sparse attention over selected tokens (DeepSeek-V3.2). `served_of` makes rows of models that it runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.spec import ModelSpec, expert_layers


@dataclass(frozen=True)
class ServedModel:
    """Sizes of a served decoder, in elements; 0: the model has no such part."""

    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the dense MLP; 0: every layer has experts."""
    tied: int = 0
    window: int = 0
    """Window of layers with one, in tokens."""
    window_layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    expert_layers: int = 0
    kv_rank: int = 0
    """Size of latent attention's key and value latent, with `q_rank` (0: queries come from the token), `nope_dim`,
    `rope_dim`, `v_dim`."""
    q_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    linear_layers: int = 0
    """Layers of gated linear attention, whose state does not grow; with heads of `linear_dim`."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_dim: int = 0
    index_top: int = 0
    """Tokens selected by sparse attention, with `index_heads` of `index_dim`."""
    index_heads: int = 0
    index_dim: int = 0
    wide_norm: int = 0
    """1: queries and keys are normalised over all heads at once."""
    gated: int = 1
    """1: three matrices of an MLP; 0: two."""

    @property
    def latent(self) -> bool:
        """Whether latents are cached in place of keys and values."""
        return self.kv_rank > 0

    @property
    def attention_layers(self) -> int:
        """Layers whose cache grows."""
        return self.layers - self.linear_layers

    @property
    def latent_elements(self) -> int:
        """Elements of latent projections and routers, which are replicated in a group."""
        down = self.hidden * (self.kv_rank + self.rope_dim + self.q_rank) if self.latent else 0
        index = self.hidden * self.index_dim + (self.q_rank or self.hidden) * self.index_heads * self.index_dim
        return (
            self.layers * (down + (index if self.index_top else 0)) + self.expert_layers * self.experts * self.hidden
        )

    @property
    def attention_elements(self) -> int:
        """Elements of projections split by tensor parallelism."""
        h = self.hidden
        if self.latent:
            q = (self.q_rank or h) * self.heads * (self.nope_dim + self.rope_dim)
            each = q + self.kv_rank * self.heads * (self.nope_dim + self.v_dim) + h * self.heads * self.v_dim
        else:
            each = 2 * h * self.heads * self.head_dim + 2 * h * self.kv_heads * self.head_dim
            each += h * self.heads * self.head_dim if self.linear_layers else 0  # such models gate attention too
        linear = h * self.linear_dim * (2 * self.linear_key_heads + 3 * self.linear_value_heads)
        return self.attention_layers * each + self.linear_layers * linear

    @property
    def mlp_elements(self) -> int:
        """Elements of dense MLPs and shared experts."""
        each = (2 + self.gated) * self.hidden
        return each * ((self.layers - self.expert_layers) * self.ffn + self.expert_layers * self.shared_ffn)

    @property
    def expert_elements(self) -> int:
        """Elements of routed experts."""
        return (2 + self.gated) * self.hidden * self.expert_ffn * self.experts * self.expert_layers

    @property
    def parameters(self) -> int:
        """All parameters except norms and biases."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.attention_elements + self.latent_elements + self.mlp_elements + self.expert_elements + ends

    @property
    def cache_elements(self) -> int:
        """Cached elements of one token in one attention layer: keys and values of all heads, or the latent."""
        index = self.index_dim if self.index_top else 0
        return (self.kv_rank + self.rope_dim if self.latent else 2 * self.kv_heads * self.head_dim) + index


def _moe(count: int, top_k: int, ffn: int, layers: int, shared: int = 0) -> dict[str, int]:
    return {
        "experts": count,
        "top_k": top_k,
        "expert_ffn": ffn,
        "expert_layers": layers,
        "shared_ffn": shared,
    }


def _linear(layers: int, keys: int, values: int) -> dict[str, int]:
    return {"linear_layers": layers, "linear_key_heads": keys, "linear_value_heads": values, "linear_dim": 128}


_MLA = {"kv_rank": 512, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
_QWEN, _LLAMA, _OSS = 151936, 128256, 201088
_S = ServedModel
_DEEPSEEK = _S(129280, 61, 7168, 128, 128, 192, 18432, **_moe(256, 8, 2048, 58, 2048), **_MLA)
_KIMI = _S(163840, 61, 7168, 64, 64, 192, 18432, **_moe(384, 8, 2048, 60, 2048), **_MLA)
_GLM4 = _S(151552, 92, 5120, 96, 8, 128, 12288, **_moe(160, 8, 1536, 89, 1536))
_MINIMAX = _S(200064, 62, 3072, 48, 8, 128, 0, wide_norm=1, **_moe(256, 8, 1536, 62))
_INDEX = {"index_top": 2048, "index_dim": 128}
_GLM5_LATENT = {"kv_rank": 512, "q_rank": 2048, "nope_dim": 192, "rope_dim": 64, "v_dim": 256}
_GLM5 = _S(
    154880, 78, 6144, 64, 64, 256, 12288, index_heads=32, **_moe(256, 8, 2048, 75, 2048), **_GLM5_LATENT, **_INDEX
)

SERVED: dict[str, ServedModel] = {
    "meta-llama/Llama-3.2-1B": _S(_LLAMA, 16, 2048, 32, 8, 64, 8192, tied=1),
    "meta-llama/Llama-3.2-3B": _S(_LLAMA, 28, 3072, 24, 8, 128, 8192, tied=1),
    "meta-llama/Llama-3.1-8B": _S(_LLAMA, 32, 4096, 32, 8, 128, 14336),
    "meta-llama/Llama-3.1-70B": _S(_LLAMA, 80, 8192, 64, 8, 128, 28672),
    "meta-llama/Llama-3.1-405B": _S(_LLAMA, 126, 16384, 128, 8, 128, 53248),
    "meta-llama/Llama-2-7b": _S(32000, 32, 4096, 32, 32, 128, 11008),
    "meta-llama/Llama-2-13b": _S(32000, 40, 5120, 40, 40, 128, 13824),
    "meta-llama/Llama-2-70b": _S(32000, 80, 8192, 64, 8, 128, 28672),
    "meta-llama/Llama-4-Scout-17B-16E": _S(
        202048, 48, 5120, 40, 8, 128, 0, window=8192, window_layers=36, **_moe(16, 1, 8192, 48, 8192)
    ),
    "meta-llama/Llama-4-Maverick-17B-128E": _S(
        202048, 48, 5120, 40, 8, 128, 16384, window=8192, window_layers=36, **_moe(128, 1, 8192, 24, 8192)
    ),
    "mistralai/Mistral-7B-v0.3": _S(32768, 32, 4096, 32, 8, 128, 14336),
    "mistralai/Mistral-Small-24B": _S(131072, 40, 5120, 32, 8, 128, 32768),
    "mistralai/Mistral-Large": _S(32768, 88, 12288, 96, 8, 128, 28672),
    "mistralai/Mixtral-8x7B": _S(32000, 32, 4096, 32, 8, 128, 0, **_moe(8, 2, 14336, 32)),
    "mistralai/Mixtral-8x22B": _S(32000, 56, 6144, 48, 8, 128, 0, **_moe(8, 2, 16384, 56)),
    "Qwen/Qwen2.5-7B": _S(152064, 28, 3584, 28, 4, 128, 18944),
    "Qwen/Qwen2.5-14B": _S(152064, 48, 5120, 40, 8, 128, 13824),
    "Qwen/Qwen2.5-32B": _S(152064, 64, 5120, 40, 8, 128, 27648),
    "Qwen/Qwen2.5-72B": _S(152064, 80, 8192, 64, 8, 128, 29568),
    "Qwen/Qwen3-0.6B": _S(_QWEN, 28, 1024, 16, 8, 128, 3072, tied=1),
    "Qwen/Qwen3-1.7B": _S(_QWEN, 28, 2048, 16, 8, 128, 6144, tied=1),
    "Qwen/Qwen3-4B": _S(_QWEN, 36, 2560, 32, 8, 128, 9728, tied=1),
    "Qwen/Qwen3-8B": _S(_QWEN, 36, 4096, 32, 8, 128, 12288),
    "Qwen/Qwen3-14B": _S(_QWEN, 40, 5120, 40, 8, 128, 17408),
    "Qwen/Qwen3-32B": _S(_QWEN, 64, 5120, 64, 8, 128, 25600),
    "Qwen/Qwen3-30B-A3B": _S(_QWEN, 48, 2048, 32, 4, 128, 0, **_moe(128, 8, 768, 48)),
    "Qwen/Qwen3-235B-A22B": _S(_QWEN, 94, 4096, 64, 4, 128, 0, **_moe(128, 8, 1536, 94)),
    "Qwen/Qwen3-Coder-480B-A35B": _S(_QWEN, 62, 6144, 96, 8, 128, 0, **_moe(160, 8, 2560, 62)),
    "Qwen/Qwen3-Next-80B-A3B": _S(
        _QWEN, 48, 2048, 16, 2, 256, 0, **_moe(512, 10, 512, 48, 512), **_linear(36, 16, 32)
    ),
    "Qwen/Qwen3.5-397B-A17B": _S(
        248320, 60, 4096, 32, 2, 256, 0, **_moe(512, 10, 1024, 60, 1024), **_linear(45, 16, 64)
    ),
    "Qwen/Qwen3.5-122B-A10B": _S(
        248320, 48, 3072, 32, 2, 256, 0, **_moe(256, 8, 1024, 48, 1024), **_linear(36, 16, 64)
    ),
    "Qwen/Qwen3.5-35B-A3B": _S(248320, 40, 2048, 16, 2, 256, 0, **_moe(256, 8, 512, 40, 512), **_linear(30, 16, 32)),
    "Qwen/Qwen3.5-27B": _S(248320, 64, 5120, 24, 4, 256, 17408, **_linear(48, 16, 48)),
    "Qwen/Qwen3.6-35B-A3B": _S(248320, 40, 2048, 16, 2, 256, 0, **_moe(256, 8, 512, 40, 512), **_linear(30, 16, 32)),
    "Qwen/Qwen3.6-27B": _S(248320, 64, 5120, 24, 4, 256, 17408, **_linear(48, 16, 48)),
    "openai/gpt-oss-20b": _S(_OSS, 24, 2880, 64, 8, 64, 0, window=128, window_layers=12, **_moe(32, 4, 2880, 24)),
    "openai/gpt-oss-120b": _S(_OSS, 36, 2880, 64, 8, 64, 0, window=128, window_layers=18, **_moe(128, 4, 2880, 36)),
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK,
    "deepseek-ai/DeepSeek-V3.2": ServedModel(**{**vars(_DEEPSEEK), **_INDEX, "index_heads": 64}),
    "deepseek-ai/DeepSeek-V2": _S(102400, 60, 5120, 128, 128, 192, 12288, **_moe(160, 6, 1536, 59, 3072), **_MLA),
    "deepseek-ai/DeepSeek-V2-Lite": _S(
        102400, 27, 2048, 16, 16, 192, 10944, **_moe(64, 6, 1408, 26, 2816), **{**_MLA, "q_rank": 0}
    ),
    "moonshotai/Kimi-K2": _KIMI,
    "moonshotai/Kimi-K2.5": _KIMI,
    "moonshotai/Kimi-K2.6": _KIMI,
    "moonshotai/Kimi-K2.7-Code": _KIMI,
    "zai-org/GLM-4.5": _GLM4,
    "zai-org/GLM-4.6": _GLM4,
    "zai-org/GLM-4.7": _GLM4,
    "zai-org/GLM-4.5-Air": _S(151552, 46, 4096, 96, 8, 128, 10944, **_moe(128, 8, 1408, 45, 1408)),
    "zai-org/GLM-5": _GLM5,
    "zai-org/GLM-5.1": _GLM5,
    "MiniMaxAI/MiniMax-M2": _MINIMAX,
    "MiniMaxAI/MiniMax-M2.1": _MINIMAX,
    "MiniMaxAI/MiniMax-M2.5": _MINIMAX,
    "MiniMaxAI/MiniMax-M2.7": _MINIMAX,
    "XiaomiMiMo/MiMo-7B": _S(151680, 36, 4096, 32, 8, 128, 11008),
    # Keys of 192 and values of 128: 160 each. Its windows have 8 key heads, with a small cache.
    "XiaomiMiMo/MiMo-V2-Flash": _S(
        152576, 48, 4096, 64, 4, 160, 16384, window=128, window_layers=39, **_moe(256, 8, 2048, 47)
    ),
    # Full attention of Gemma 4 has fewer, wider key heads whose values are the keys; here it is as its windows'.
    "google/gemma-4-26B-A4B": _S(
        262144, 30, 2816, 16, 8, 256, 0, tied=1, window=1024, window_layers=25, **_moe(128, 8, 704, 30, 2112)
    ),
    "google/gemma-4-31B": _S(262144, 60, 5376, 32, 16, 256, 21504, tied=1, window=1024, window_layers=50),
    "google/gemma-3-12b": _S(262208, 48, 3840, 16, 8, 256, 15360, tied=1, window=1024, window_layers=40),
    "google/gemma-3-27b": _S(262208, 62, 5376, 32, 16, 128, 21504, tied=1, window=1024, window_layers=52),
    "microsoft/phi-4": _S(100352, 40, 5120, 40, 10, 128, 17920),
}
"""Rows by Hugging Face name, without the suffixes of tuning and quantisation."""

_TUNED = re.compile(
    r"-(instruct|thinking|chat|base|it|hf|fp8|fp4|nvfp4|mxfp4|awq|gptq|int4|w4a16|bf16|dynamic|terminus|exp|v0\.\d"
    r"|\d{4}|\d+e)(?=-|$)"
)
_SAME = {"llama-3.3": "llama-3.1", "r1-671b": "deepseek-r1", "meta-llama": "llama", "qwen3-vl": "qwen3"}


def _plain(name: str) -> str:
    """A model's name without its organisation, tuning and quantisation."""
    short = name.split("/")[-1].lower().replace("_", "-")
    for was, now in _SAME.items():
        short = short.replace(was, now)
    while (cut := _TUNED.sub("", short)) != short:
        short = cut
    return short


_BY_PLAIN = {_plain(name): name for name in SERVED}


def served(*names: str) -> ServedModel:
    """Return the first of these Hugging Face names that is known. Raises InputError with the nearest."""
    for name in names:
        if name in SERVED:
            return SERVED[name]
        if (shape := _BY_PLAIN.get(_plain(name))) is not None:
            return SERVED[shape]
    raise InputError("model", names[0], "is not a served model that Phalanx knows", nearest(names[0], SERVED))


def served_of(model: ModelSpec) -> ServedModel:
    """Return the row of a model that Phalanx runs."""
    more: dict[str, Any] = {}
    if model.experts is not None:
        x = model.experts
        more |= _moe(x.count, x.top_k, x.ffn, len(expert_layers(model)), x.shared_ffn)
    if model.latent is not None:
        a = model.latent
        more |= {"kv_rank": a.kv_rank, "q_rank": a.q_rank or 0, "nope_dim": a.nope_dim, "rope_dim": a.rope_dim}
        more |= {"v_dim": a.v_dim}
    if model.window is not None:
        local = sum(model.window_of(i) is not None for i in range(model.layers))
        more |= {"window": model.window, "window_layers": local}
    return ServedModel(
        model.vocab,
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.ffn,
        tied=int(model.tied),
        gated=int(model.gated),
        **more,
    )
