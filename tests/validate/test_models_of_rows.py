"""The model of a published row, by its sizes and its name."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.spec.model.presets import PRESETS
from phalanx.validate.models import Unspecified, model_of
from phalanx.validate.records import Row

_SIZES = {"layers": "4", "hidden": "512", "heads": "8", "seq_len": "1024"}


def _model(arch: str = "llama", model: str = "of mine", **cells: str) -> Any:
    return model_of(Row({**_SIZES, "arch": arch, "model": model, **cells}))


@pytest.mark.parametrize(
    ("arch", "model", "family", "position"),
    [
        ("llama", "mine", "llama", "rotary"),
        ("gpt", "mine", "gpt2", "learned"),
        ("gpt-alibi", "bloom", "gpt2", "rotary"),
        ("gpt", "mpt-7b", "gpt2", "rotary"),
        ("palm", "mine", "palm", "rotary"),
        ("", "mine", "llama", "rotary"),
    ],
)
def test_an_architecture_is_a_family(arch: str, model: str, family: str, position: str) -> None:
    m = _model(arch, model)
    assert (m.family, m.position, m.experts, m.latent) == (family, position, None, None)
    assert (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.vocab) == (4, 512, 8, 8, 2048, 51200)
    assert m.max_seq == 1024
    m = _model(arch, model, ffn="1500", vocab="999", kv_heads="8")
    assert (m.ffn, m.vocab) == (1500, 999)


def test_what_a_name_says_of_a_model() -> None:
    for name, tied in (("llama-1.34b", True), ("llama-3.57b", True), ("llama-8b", False)):
        assert _model("llama", name).tied == tied
        assert not _model("llama", name, options="tied_embeddings=False").tied
    assert (_model(model="qwen3-x").head_dim, _model(model="qwen3-x").qk_norm) == (128, True)
    assert (_model(model="gpt-oss-x").head_dim, _model(heads="16").head_dim) == (64, 32)
    assert _model(model="Llama3-8B", layers="", hidden="").layers == 32  # a preset's, without a shape
    assert _model(model="llama3-8b").layers == 4
    assert model_of(Row({**_SIZES, "source_group": "vtrain/single-node", "vocab": "1"})).vocab == 50257


def test_experts_of_rows() -> None:
    given = {"experts": "4", "topk": "2", "ffn": "300"}
    m = _model("moe", "mixtral", **given)
    assert (m.family, m.experts.count, m.experts.top_k, m.experts.ffn) == ("llama", 4, 2, 300)
    assert (_model("moe", "x", experts="4").experts.top_k, _model("moe", "x", experts="4").experts.ffn) == (1, 2048)
    ungated = _model("moe", "moe-gpt3-x", **given)  # two matrices of 300 are three of 200
    assert (ungated.family, ungated.activation, ungated.experts.ffn) == ("gpt2", "swiglu", 200)
    latent = _model("moe-mla", "kimi", **given)
    x = latent.experts
    assert (x.count, x.top_k, x.ffn, x.shared_ffn, x.dense_layers) == (4, 2, 300, 300, (0,))
    assert (latent.ffn, latent.head_dim, latent.latent.kv_rank) == (18432, 192, 512)
    plain = _model("moe-mla", "kimi", experts="4").experts
    assert (plain.top_k, plain.ffn, plain.shared_ffn) == (1, 2048, 2048)
    for name in ("deepseek-v3", "deepseek-v2"):
        m, known = _model("moe-mla", name, layers="8", **given), PRESETS[name]
        assert (m.experts.count, m.experts.ffn) == (known["experts"]["count"], known["experts"]["ffn"])
        assert (m.ffn, m.latent.kv_rank, m.head_dim) == (known["ffn"], known["latent"]["kv_rank"], 192)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"layers": ""}, "the model's shape is not stated"),
        ({"hidden": "0"}, "the model's shape is not stated"),
        ({"arch": "hybrid-mamba"}, "architecture hybrid-mamba is not modelled"),
        ({"heads": ""}, "the number of heads is not stated"),
        ({"heads": "7"}, "hidden = 512 is not a multiple of heads = 7"),
        ({"kv_heads": "3"}, "model.kv_heads = 3: "),
    ],
)
def test_what_a_row_lacks(cells: dict[str, str], words: str) -> None:
    with pytest.raises(Unspecified) as refused:
        _model(**cells)
    assert str(refused.value).startswith(words)
