"""The shape of every family is that of transformers, parameter by parameter, for configs at random; the presets have
the sizes that were published."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hf_configs import configs
from support.in_process_cli import phalanx

from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.families import WRITERS, from_hugging_face
from phalanx.spec.model.modules import require_modules
from phalanx.spec.model.presets import PRESETS, PUBLISHED, preset
from phalanx.spec.model.spec import ModelSpec, parameters


def as_transformers_has_them(spec: ModelSpec) -> Counter[tuple[int, ...]]:
    """Our shapes, whichever way round, with those in one that transformers keeps in one."""
    fused: dict[str, list[tuple[int, ...]]] = {}
    for p in parameters(spec):
        name = re.sub(r"experts\.(gate|up)\.", "experts.gate_up.", p.fqn)
        if spec.family in ("gpt2", "gpt_neox"):
            name = re.sub(r"attention\.[qkv]\.", "attention.qkv.", name)
        fused.setdefault(name, []).append(p.shape)
    found: Counter[tuple[int, ...]] = Counter()
    for name, shapes in fused.items():
        whole, axis = list(shapes[0]), int(".experts." in name)
        whole[axis] = sum(shape[axis] for shape in shapes)
        found[tuple(sorted(whole))] += 1
    return found


@pytest.mark.parametrize("family", [*WRITERS, "gpt_oss", "granite", "olmo2", "starcoder2", "seed_oss"])
def test_parameters_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    @settings(max_examples=8)
    @given(configs(family), st.booleans())
    def equal(arguments: dict[str, Any], use_diff: bool) -> None:
        config = AutoConfig.for_model(family, **arguments)
        with torch.device("meta"):
            theirs = [tuple(p.shape) for p in AutoModelForCausalLM.from_config(config).parameters()]
        path = tmp_path / "config.json"
        path.write_text(config.to_json_string(use_diff=use_diff))
        spec, _ = make_model({"config": str(path)}, tmp_path)
        assert Counter(tuple(sorted(shape)) for shape in theirs) == as_transformers_has_them(spec)

    equal()


@pytest.mark.parametrize(
    ("name", "count", "active"),
    [
        # The weights on the Hugging Face hub, to the last one.
        ("gpt2", 124_439_808, None),
        ("gpt2-xl", 1_557_611_200, None),
        ("llama2-7b", 6_738_415_616, None),
        ("llama2-13b", 13_015_864_320, None),
        ("llama2-70b", 68_976_648_192, None),
        ("llama3-8b", 8_030_261_248, None),
        ("llama3-70b", 70_553_706_496, None),
        ("llama3-405b", 405_853_388_800, None),
        ("mistral-7b", 7_241_732_096, None),
        ("qwen2-7b", 7_615_616_512, None),
        ("qwen3-32b", 32_762_123_264, None),
        ("gpt-neox-20b", 20_554_567_680, None),
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),  # Jiang et al. 2024: 13B active
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),  # the model card: 30.5B, 3.3B active
        # The papers: rounded as they print them.
        ("gpt3-175b", 175e9, None),
        ("mt-nlg-530b", 530e9, None),
        ("gpt-1t", 1008.0e9, None),
        ("palm-540b", 540.35e9, None),
        ("llama-7b", 6.7e9, None),
        ("llama-13b", 13.0e9, None),
        ("llama-33b", 32.5e9, None),
        ("llama-65b", 65.2e9, None),
        ("deepseek-v2", 236e9, 21e9),
        ("deepseek-v3", 671e9, 37e9),
        ("gpt-oss-20b", 20.91e9, 3.61e9 + 201088 * 2880),  # they count no embedding as active
        ("gpt-oss-120b", 116.83e9, 5.13e9 + 201088 * 2880),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, count: float, active: float | None) -> None:
    model, _ = make_model({"preset": name}, Path())
    if isinstance(count, int):
        assert model.parameter_count == count
    assert model.parameter_count == pytest.approx(count, rel=6e-3)
    assert model.active_count == pytest.approx(active or count, rel=2e-2)


def test_every_preset_has_unique_names_and_survives_its_own_record() -> None:
    for name in PRESETS:
        model, _ = make_model({"preset": name}, Path())
        names = [p.fqn for p in parameters(model)]
        assert len(set(names)) == len(names)
        assert make_model(asdict(model), Path())[0] == model


def _published(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {"model_type": kind, **dict(zip((*names, "max_position_embeddings"), sizes, strict=True), **more)}


_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("name", "config"),
    [  # as transformers 4 wrote them
        (
            "gpt-neox-20b",
            _published("gpt_neox", (50432, 6144, 44, 64, 24576, 2048), rotary_pct=0.25, hidden_act="gelu_fast"),
        ),
        (
            "mistral-7b",
            _published("mistral", (32000, 4096, 32, 32, 14336, 32768), rms_norm_eps=1e-5, num_key_value_heads=8)
            | {"sliding_window": 4096, "rope_theta": 10000.0},
        ),
        (
            "qwen3-32b",
            _published("qwen3", (151936, 5120, 64, 64, 25600, 40960), rms_norm_eps=1e-6, num_key_value_heads=8)
            | {"head_dim": 128, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None},
        ),
        (
            "deepseek-v2",
            _published("deepseek_v2", (102400, 5120, 60, 128, 12288, 163840), moe_intermediate_size=1536, **_MLA)
            | {"n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
            | {"rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "moe_layer_freq": 1}
            | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "norm_topk_prob": False}
            | {"routed_scaling_factor": 16.0, "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True},
        ),
        (
            "deepseek-v3",
            _published("deepseek_v3", (129280, 7168, 61, 128, 18432, 163840), moe_intermediate_size=2048, **_MLA)
            | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
            | {"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "moe_layer_freq": 1}
            | {"topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
            | {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "aux_loss_alpha": 0.0001, "seq_aux": True},
        ),
        (
            "mixtral-8x7b",
            _published("mixtral", (32000, 4096, 32, 32, 14336, 32768), rms_norm_eps=1e-5, num_key_value_heads=8)
            | {"rope_theta": 1e6, "router_aux_loss_coef": 0.02, "num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        (
            "qwen3-30b-a3b",
            _published("qwen3_moe", (151936, 2048, 48, 32, 6144, 40960), rms_norm_eps=1e-6, num_key_value_heads=4)
            | {"head_dim": 128, "rope_theta": 1e6, "decoder_sparse_step": 1, "moe_intermediate_size": 768}
            | {"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
        ),
        (
            "gpt-oss-20b",
            _published("gpt_oss", (201088, 2880, 24, 64, 2880, 131072), num_key_value_heads=8, num_local_experts=32)
            | {"sliding_window": 128, "head_dim": 64, "rope_theta": 150000, "attention_bias": True},
        ),
    ],
)
def test_a_published_config_is_the_preset(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert make_model({"config": str(path)}, tmp_path)[0] == make_model({"preset": name}, tmp_path)[0]


def _phalanx(*words: str) -> Any:
    from typer.testing import CliRunner

    from phalanx.cli.app import app

    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("command", ["plan", "train", "parity"])
@pytest.mark.parametrize("line", ["auto", "dp=2"])
def test_a_model_of_which_only_the_shape_is_known_is_refused_before_anything_starts(
    command: str, line: str, tmp_path: Path
) -> None:
    if (command, line) == ("parity", "auto"):
        line = "dp=1"  # parity examines one strategy
    job = tmp_path / "job.toml"
    job.write_text('model.preset = "gpt-oss-20b"\njob = { global_batch = 4, seq = 8 }\ntrain.data = "none.txt"\n')
    found = _phalanx(command, str(job), "--strategy", line)
    assert found.exit_code == 2
    assert "attention sinks: the runtime has no module for it" in found.stderr
    assert found.stderr.count("\n") == 1


def test_latent_attention_without_experts_runs() -> None:
    latent = {"kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128, "q_rank": 1536}
    require_modules(make_model({"preset": "llama2-7b", "head_dim": 192, "latent": latent}, Path())[0])


@pytest.mark.parametrize("field", [{"sinks": True}, {"activation": "swiglu_clamped"}])
def test_what_no_module_computes_is_refused_in_a_dense_model_too(field: dict[str, Any]) -> None:
    model, _ = make_model({"preset": "llama2-7b", **field}, Path())
    with pytest.raises(InputError, match="the runtime has no module for it"):
        require_modules(model)


def test_one_expert_without_weights_is_one_that_no_module_computes() -> None:
    model, _ = make_model({"preset": "mixtral-8x7b"}, Path())
    assert model.experts is not None
    require_modules(model)
    with pytest.raises(InputError, match="experts without weights"):
        require_modules(replace(model, experts=replace(model.experts, identity=1)))


def test_models_are_shown(tmp_path: Path) -> None:
    shown = _phalanx("tables", "models").stdout
    assert all(name in shown for name in PRESETS)
    assert "671,026,404,352 parameters, 37,552,282,624 of them" in _phalanx("tables", "models", "deepseek-v3").stdout
    drawn = _phalanx("tables", "models", "Qwen/Qwen3-Next-80B-A3B").stdout
    assert "A  36 x gated delta net + experts\nB  12 x attention + experts\n" + "AAAB" * 12 + "\n" in drawn
    assert "x attention + mlp, no positions" in _phalanx("tables", "models", "HuggingFaceTB/SmolLM3-3B").stdout
    assert "\n32 x attention + mlp\n" in _phalanx("tables", "models", "llama3-8b").stdout
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 7, "n_embd": 4, "n_layer": 1, "n_head": 2}))
    found = json.loads(_phalanx("tables", "models", str(config), "--json").stdout)
    assert found["parameters"] == found["active"] == sum(found["roles"].values())
    assert found["roles"]["embedding"] == 28
    assert json.loads(_phalanx("tables", "models", str(tmp_path), "--json").stdout) == found
    (tmp_path / "empty").mkdir()
    wrong = _phalanx("tables", "models", str(tmp_path / "empty"))
    assert (wrong.exit_code, "empty/config.json': no such file" in wrong.stderr) == (2, True)
    wrong = _phalanx("tables", "models", "deepseek-v4")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "'t5' is not supported"),
        ({"model_type": "gpt2"}, "has no 'n_embd'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "cannot be read"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; use silu"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["linear"]},
            "layer type 'linear' is not supported",
        ),
        ({"num_hidden_layers": 2**70}, "must be at most 10,000"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 2**70}, "must be at most 10,000"),
        ({"model_type": "gpt_oss", "num_hidden_layers": 10**9, "sliding_window": 4}, "must be at most 10,000"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": -(10**9)},
            "has a negative max_window_layers",
        ),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **sizes, "intermediate_size": 8, **config}))
    if config.get("model_type") == "gpt2":
        path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=re.escape(words)) as error:
        from_hugging_face(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 0}, "model.window = 0: must be at least 1"),
        ({"window_layers": [0]}, "needs model.window"),
        ({"window": 4, "window_layers": [2]}, "is not a layer: there are 2, numbered from 0"),
        ({"rotary_dim": 3}, "rotary positions turn pairs"),
        ({"rotary_dim": 6}, "is not between 2 and head_dim = 4"),
        ({"family": "mixtral"}, "model.experts: is missing"),
        ({"experts": {"count": 2, "top_k": 3, "ffn": 4}}, "is more than count = 2"),
        ({"latent": {"kv_rank": 4, "nope_dim": 4, "rope_dim": 2, "v_dim": 4}, "head_dim": 4}, "nope_dim + rope_dim"),
        ({"latent": {"kv_rank": 4, "nope_dim": 4, "rope_dim": 2, "v_dim": 4}, "kv_heads": 1}, "attention needs 2"),
        (
            {"latent": {"kv_rank": 4, "nope_dim": 3, "rope_dim": 3, "v_dim": 4}},
            "latent.rope_dim = 3: rotary positions",
        ),
        ({"rope_scaling": {"factor": 2.0, "kind": "linear", "mscale_all_dim": 1.0}}, "belongs to latent attention"),
        ({"rope_scaling": {"factor": 2.0, "kind": "yarn"}}, "original_max_seq: is missing"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"factor": 2.0, "kind": "yarn", "original_max_seq": 8}},
            "model.rope_theta = 1.0: must be above 1 with yarn",
        ),
        ({"residual": "paralel"}, "model.residual"),
    ],
)
def test_wrong_models_say_why(fields: dict[str, Any], words: str) -> None:
    sizes = {"family": "llama", "vocab": 8, "hidden": 8, "layers": 2, "heads": 2, "ffn": 8, "max_seq": 8}
    with pytest.raises(InputError, match=r"^model") as error:
        make_model({**sizes, **fields}, Path())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lama", "did you mean llama?"),
        ("mixtrl", "did you mean mixtral?"),
        ("qwen4_next", "no other model_type represents it"),
        ("llama5", "no other model_type represents it"),
        ("deepseek_v5", "no other model_type represents it"),
    ],
)
def test_another_release_of_a_family_is_no_slip(tmp_path: Path, kind: str, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InputError, match=re.escape(said)):
        from_hugging_face(tmp_path / "config.json")


def test_a_name_of_two_tables_is_suggested_once() -> None:
    with pytest.raises(InputError, match=r"did you mean llama3-8b or llama3-70b\?"):
        preset("llama3-9b")


def test_every_model_that_is_known_is_listed(tmp_path: Path) -> None:
    """Presets in a table, published ones by organisation; each name that is listed is taken."""
    table, _, rest = phalanx(tmp_path, "tables models")[1].partition("more by their Hugging Face names")
    assert [row.split()[0] for row in table.splitlines()[3:] if row.strip()][: len(PRESETS)] == list(PRESETS)
    lines = (line.strip().partition(": ") for line in rest.splitlines()[1:] if line.strip())
    listed = [f"{organisation}/{name}" for organisation, _, names in lines for name in names.split(", ")]
    assert sorted(listed) == sorted(PUBLISHED)
    assert all(preset(name.partition("/")[2]) for name in listed)


@pytest.mark.parametrize(
    ("name", "said"),  # Mixtral: 46.7 B, 12.9 B a token; with one expert a layer 46.7 - 7/8 x 45.1 = 7.2 B
    [("mixtral-8x7b", "in all 6.4 times the parameters for 1.8 times the FLOPs"), ("llama3-8b", "")],
)
def test_what_experts_give_for_their_compute_is_said(tmp_path: Path, name: str, said: str) -> None:
    out = phalanx(tmp_path, f"tables models {name}")[1]
    assert ("experts: 8 times one expert's parameters for 2 times its FLOPs" in out) == bool(said)
    assert said in " ".join(out.split())


@pytest.mark.parametrize(
    ("windows", "told"),
    [
        ({"layer_types": ["full_attention"] * 3}, ""),
        ({"max_window_layers": 3}, ""),
        ({"max_window_layers": 2}, "windows in some layers"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "windows in some layers"),
    ],
)
def test_a_window_of_dots_that_no_layer_has_is_none(windows: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = {
        "model_type": "dots1", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 4096, **windows,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not told:
        assert make_model({"config": "config.json"}, tmp_path)[0].window is None
        return
    with pytest.raises(InputError, match=told):
        make_model({"config": "config.json"}, tmp_path)
