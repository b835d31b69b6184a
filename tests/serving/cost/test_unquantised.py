"""What a quantised checkpoint keeps in 16 bits is read from its config.json, and is priced in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.planning.lookup import model_named
from phalanx.serving.cost.checkpoint import checkpoint_assumption, of_checkpoint
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.shape import ServingShape, shape_of
from phalanx.serving.question import price_of
from phalanx.spec.errors import InputError

_LLAMA = {
    **{"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096},
}
_MOE = _LLAMA | {
    **{"model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 256},
    **{"first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 64},
    **{"q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64},
}
_DELTA = _LLAMA | {
    **{"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    **{"shared_expert_intermediate_size": 256, "linear_num_value_heads": 8, "linear_num_key_heads": 4},
}


def _shape(tmp_path: Path, config: dict[str, Any], **quantised: Any) -> ServingShape:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"quantization_config": quantised}))
    return shape_of(model_named(str(file))[0])


def _shares(m: ServingShape) -> tuple[float, float, float]:
    return m.whole / m.attention, m.whole_mlp / max(m.mlp, 1), m.whole_expert / max(m.expert, 1)


@pytest.mark.parametrize(
    ("quantised", "shares"),
    [
        ({"modules_to_not_convert": ["lm_head"]}, (0, 0, 0)),
        ({"modules_to_not_convert": ["model.layers.0", "lm_head"]}, (1 / 4, 1 / 4, 0)),
        ({"modules_to_not_convert": [f"model.layers.{i}.self_attn.o_proj" for i in range(4)]}, (1 / 4, 0, 0)),
        ({"modules_to_not_convert": ["model.layers.*.self_attn"]}, (1, 0, 0)),
        ({"ignored_layers": ["q_proj", "model.layers.3.mlp.gate_up_proj"]}, (1 / 4, 2 / 3 / 4, 0)),
        ({"ignore": ["re:.*mlp\\.down_proj.*"]}, (0, 1 / 3, 0)),
        ({"exclude_modules": ["*self_attn*", "model.layers.1.mlp*"]}, (1, 1 / 4, 0)),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, (0, 0, 0)),
        ({"config_groups": {"group_0": {"targets": ["re:.*mlp.*"]}}}, (1, 0, 0)),
    ],
)
def test_lists_of_every_tool(tmp_path: Path, quantised: dict[str, Any], shares: tuple[float, ...]) -> None:
    assert _shares(_shape(tmp_path, _LLAMA, **quantised)) == pytest.approx(shares)


def test_experts_and_recurrences_are_found_by_their_modules(tmp_path: Path) -> None:
    of_experts = {"ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"]}
    assert _shares(_shape(tmp_path, _MOE, **of_experts)) == (1, 1, 0)
    assert _shares(_shape(tmp_path, _MOE, ignore=["model.layers.2.mlp.experts"]))[2] == pytest.approx(1 / 3)
    plain = _shape(tmp_path, _DELTA)
    for listed, every in ((["linear_attn", "self_attn"], True), (["self_attn"], False)):
        m = _shape(tmp_path, _DELTA, modules_to_not_convert=[rf"model\.layers\.\d+\.{each}" for each in listed])
        assert 0 < m.whole <= m.attention == plain.attention
        assert (m.whole == m.attention) is every


def test_they_are_priced_in_16_bits(tmp_path: Path) -> None:
    times = []
    for number, listed in enumerate(([], ["model.layers.*.self_attn"], [r"model\.layers\.\d+"])):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(_LLAMA | {"quantization_config": {"modules_to_not_convert": listed}}))
        price = {kind: price_of(str(file), "dgx-h100", 1, kind, "bf16") for kind in ("bf16", "fp8")}
        held = {kind: float(p.weight_bytes(ServingLayout())) for kind, p in price.items()}
        m = price["fp8"].shape
        assert held["bf16"] - held["fp8"] == m.attention - m.whole + m.mlp - m.whole_mlp
        parts = (
            price["fp8"].parts(ServingLayout(), 0, 0, 64, 64_000),
            price["bf16"].parts(ServingLayout(), 0, 0, 64, 64_000),
        )
        times.append(tuple(float(eight["projections"] / half["projections"]) for eight, half in (parts,)))
    assert times[0][0] < times[1][0] == pytest.approx(1) == times[2][0]


def test_what_is_no_list_is_one_line(tmp_path: Path) -> None:
    for wrong in ({"ignore": [1]}, {"ignore": {"a": 1}}):
        with pytest.raises(InputError, match="none of names"):
            _shape(tmp_path, _LLAMA, **wrong)
    assert _shares(_shape(tmp_path, _LLAMA, ignore=["x("])) == (0, 0, 0)


@pytest.mark.parametrize("hostile", ["re:(.*)*(.*)*X", "re:([a-z.]+)+X", "re:" + "(a|b)" * 30, "re:(?!x).*"])
def test_an_expression_that_may_take_forever_is_refused(tmp_path: Path, hostile: str) -> None:
    with pytest.raises(InputError, match="an expression that is not read"):
        _shape(tmp_path, _LLAMA, ignore=[hostile])


def test_gaps_take_linear_time(tmp_path: Path) -> None:
    assert _shares(_shape(tmp_path, _LLAMA, ignore=["re:" + ".*l" * 40 + "X"])) == (0, 0, 0)
    with pytest.raises(InputError, match="more than 2,000 modules"):
        _shape(tmp_path, _LLAMA, ignore=[f"a{i}" for i in range(3000)])


@pytest.mark.parametrize(
    ("name", "gib"),
    [("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", 56.7), ("RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8", 47.7)],
)
def test_a_published_checkpoint_keeps_what_its_name_is_known_for(name: str, gib: float) -> None:
    """vLLM loads 57.75 GiB of Meta's with twice the KV heads (vllm-project/vllm#6746), of which 126 layers have 1.0
    GiB a GPU; the other's config.json lists the head alone."""
    price = price_of(name, "dgx-h100", 8, "fp8", "bf16")
    assert price.weight_bytes(ServingLayout(8, 1, 1, 8)) / 2**30 == pytest.approx(gib, rel=0.002)


@pytest.mark.parametrize(
    ("name", "weights", "taken"),
    [
        ("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", "fp8", False),
        ("RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8", "fp8", True),
        ("RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8", "bf16", False),
        ("deepseek-ai/DeepSeek-R1", "fp8", False),
        ("nvidia/DeepSeek-R1-FP4", "nvfp4", True),
        ("llama3-70b", "fp8", False),
    ],
)
def test_what_a_name_alone_does_not_say_of_a_checkpoint_is_assumed(name: str, weights: str, taken: bool) -> None:
    model = of_checkpoint(model_named(name)[0], name)
    assert bool(checkpoint_assumption(model, name, weights)) is taken
