"""Every published model beside the config.json of its authors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Router, Scan
from phalanx.spec.model.presets import PRESETS, PUBLISHED, published
from phalanx.spec.model.spec import ModelSpec

CONFIGS = json.loads((Path(__file__).parent / "data" / "served_configs.json").read_text())["configs"]
_SAME = {
    **{"vocab": "vocab_size", "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"},
    **{"kv_heads": "num_key_value_heads", "experts.ffn": "moe_intermediate_size", "latent.kv_rank": "kv_lora_rank"},
    **{"latent.q_rank": "q_lora_rank", "latent.nope_dim": "qk_nope_head_dim", "latent.rope_dim": "qk_rope_head_dim"},
    **{"key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads"},
    **{"key_dim": "linear_key_head_dim", "index.top": "index_topk", "index.heads": "index_n_heads"},
    **{"index.dim": "index_head_dim", "linear_layers": "linear_layers"},
}


def sizes(m: ModelSpec) -> dict[str, Any]:
    """The sizes of a model by name, those of its mechanisms too."""
    blocks = architecture(m).blocks
    parts: dict[str, Any] = {"experts": m.experts, "latent": m.latent, "index": m.latent and m.latent.index}
    flat = {f"{name}.{k}": v for name, part in parts.items() if part is not None for k, v in vars(part).items()}
    attends = [a for b in blocks if (a := b.first(Attend)) is not None]
    flat |= {"linear_layers": sum(b.first(Scan) is not None for b in blocks)}
    flat |= {"window_layers": sum(a.window is not None for a in attends)}
    flat |= {"value_dim": max(a.value for a in attends), "window": max(a.window or 0 for a in attends)}
    flat |= {"expert_layers": sum(b.first(Router) is not None for b in blocks)}
    delta = next((x for x in m.mixers if x.kind == "delta"), None)
    return vars(m) | flat | (vars(delta) if delta is not None else {})


def differences(m: ModelSpec, config: dict[str, int]) -> dict[str, tuple[float, float]]:
    """What a row and a config.json say otherwise."""
    ours = sizes(m)
    pairs = {name: (ours.get(name) or 0, config[theirs]) for name, theirs in _SAME.items() if theirs in config}
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = next((config[k] for k in names if k in config), 0)
    pairs["experts"] = (ours.get("experts.count", 0), experts)
    if experts:
        pairs["top_k"] = (ours["experts.top_k"], config.get("num_experts_per_tok", config.get("top_k_experts", 0)))
    if m.latent:
        pairs["v_dim"] = (m.latent.v_dim, config["v_head_dim"])
        pairs["head_dim"] = (m.head_dim, config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    elif "head_dim" in config:
        pairs["head_dim"] = (m.head_dim, config["head_dim"])
        if "v_head_dim" in config:
            pairs["value_dim"] = (ours["value_dim"], config["v_head_dim"])
    if ours["expert_layers"] < m.layers:
        pairs["ffn"] = (m.ffn, config.get("intermediate_size_mlp", config.get("intermediate_size", 0)))
    if "n_shared_experts" in config:
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        pairs["shared_ffn"] = (ours.get("experts.shared_ffn", 0), shared)
    if "shared_expert_intermediate_size" in config:
        pairs["shared_ffn"] = (ours["experts.shared_ffn"], config["shared_expert_intermediate_size"])
    if "first_k_dense_replace" in config:
        pairs["expert_layers"] = (ours["expert_layers"], m.layers - config["first_k_dense_replace"])
    if "window_layers" in config:
        pairs["window_layers"] = (ours["window_layers"], config["window_layers"])
        if config["window_layers"]:
            pairs["window"] = (ours["window"], config["sliding_window"])
    if config.get("tie_word_embeddings"):
        pairs["tied"] = (m.tied, 1)
    return {name: both for name, both in pairs.items() if both[0] != both[1]}


def _model(name: str) -> ModelSpec:
    return make_model({"preset": name}, Path())[0]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_published_model_is_as_its_config_says(name: str) -> None:
    assert differences(_model(name), CONFIGS[name]) == {}


def test_how_many_the_page_says() -> None:
    """docs/serving.md."""
    assert (len(PUBLISHED), len(CONFIGS)) == (145, 44)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("Qwen/Qwen3-32B", 32.8),
        ("deepseek-ai/DeepSeek-V3", 671),
        ("bigscience/bloom", 176.25),
        ("MiniMaxAI/MiniMax-M2.5", 229),
        ("Qwen/Qwen3.5-397B-A17B", 397),
        ("Qwen/Qwen3.5-9B-Base", 8.954),
        ("Qwen/Qwen3.5-4B", 4.206),
        ("zai-org/GLM-5", 744),
        ("zai-org/GLM-5.2-FP8", 743.4),  # by its published config.json
        ("stepfun-ai/Step-3.5-Flash", 197),  # 196.81 and routers' biases (its model card)
        ("tencent/Hy3-preview", 295),
        ("mistralai/Ministral-3-3B-Reasoning-2512", 3.43),  # without what sees
        ("mistralai/Ministral-3-14B-Instruct-2512", 13.5),
        ("Qwen/Qwen3Guard-Gen-8B", 8.19),
        ("amd/Llama-3.1-405B-Instruct-MXFP4-Preview", 405.85),
        ("moonshotai/Kimi-K2.5", 1026),
        ("openai/gpt-oss-120b", 117),
        ("Qwen/Qwen3-235B-A22B", 235),
    ],
)
def test_parameters_are_those_that_models_are_known_by(name: str, billions: float) -> None:
    assert _model(name).parameter_count / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("nvidia/DeepSeek-R1-0528-FP4", "deepseek-ai/DeepSeek-R1"),
        ("DeepSeek-V3/R1-671B", "deepseek-ai/DeepSeek-R1"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen/Qwen3-235B-A22B"),
        ("zhipuai/GLM-5", "zai-org/GLM-5"),
        ("models_hf/llama2-7B-hf/", "meta-llama/Llama-2-7b"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen/Qwen2.5-32B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "Qwen/Qwen2.5-14B"),
        ("alignment-handbook/zephyr-7b-sft-full", "mistralai/Mistral-7B-v0.3"),
        ("lmsys/vicuna-13b-v1.5-16k", "meta-llama/Llama-2-13b"),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "meta-llama/Llama-3.1-405B"),
        ("cyankiwi/gemma-4-31B-it-AWQ-4bit", "google/gemma-4-31B"),
        ("Intel/Qwen3.5-397B-A17B-int4-AutoRound", "Qwen/Qwen3.5-397B-A17B"),
    ],
)
def test_names_say_how_a_model_was_tuned_and_quantised(written: str, meant: str) -> None:
    assert published(written) == meant
    assert replace(_model(written), max_seq=1) == replace(_model(meant), max_seq=1)


def test_a_release_tuned_for_long_contexts_says_so_by_its_date() -> None:
    assert _model("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8").max_seq == 262_144
    assert _model("Qwen/Qwen3-235B-A22B").max_seq == 40_960


def test_a_preset_is_never_taken_for_a_published_model() -> None:
    assert [name for name in PRESETS if "/" in name] == []
    assert published("Qwen/Qwen3-33B") is None


@pytest.mark.parametrize("name", ["cyankiwi/Qwen3-8B-AWQ-8bit", "Intel/Qwen3-8B-AutoRound"])
def test_a_name_that_does_not_say_the_bits_of_its_weights_is_not_known(name: str) -> None:
    """Its weights would be taken for ones of 4 or of 16 bits."""
    assert published(name) is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen1.5-0.5B", 463_987_712),
        ("Qwen/Qwen1.5-1.8B", 1_836_828_672),
        ("Qwen/Qwen1.5-4B", 3_950_369_280),
        ("Qwen/Qwen1.5-14B-Chat", 14_167_290_880),
        ("Qwen/Qwen1.5-32B", 32_512_218_112),
        ("Qwen/Qwen1.5-72B-Chat", 72_287_920_128),
        ("Qwen/Qwen1.5-110B", 111_209_914_368),
        ("Qwen/Qwen2-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 7_615_616_512),
        ("deepseek-ai/deepseek-llm-7b-chat", 6_910_365_696),
        ("deepseek-ai/deepseek-coder-6.7b-base", 6_740_512_768),
        ("deepseek-ai/deepseek-coder-33b-instruct", 33_342_991_360),
        ("01-ai/Yi-6B", 6_061_035_520),
        ("codellama/CodeLlama-7b-hf", 6_738_546_688),
        ("codellama/CodeLlama-13b-hf", 13_016_028_160),
        ("codellama/CodeLlama-34b-hf", 33_743_970_304),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120),
        ("HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384),
        ("allenai/OLMo-2-0425-1B", 1_484_916_736),
        ("allenai/OLMo-2-1124-13B", 13_716_198_400),
    ],
)
def test_parameters_are_as_many_as_their_weights_have(name: str, parameters: int) -> None:
    assert _model(name).parameter_count == parameters
