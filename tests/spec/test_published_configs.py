"""Models are as large as published, by their config.json: 72 of the Hugging Face hub, and one of each type that
transformers 5.23 or 5.24 counts on its meta device. data/published_configs.json has name, parameters, those that a
token uses (null: not counted), and the keys that say so; lists of layers are shortened to the part that repeats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.families import FAMILIES, from_hugging_face, to_hugging_face
from phalanx.spec.model.hugging_face.expressions import evaluate, names

_PATH = Path(__file__).parent / "data" / "published_configs.json"
_INEXACT = {
    # The published formula leaves out norms of queries and keys, or biases.
    *("inclusionAI/Ling-mini-2.0", "inclusionAI/Ling-flash-2.0", "inclusionAI/Ling-1T", "XiaomiMiMo/MiMo-7B-Base"),
    # transformers counts biases of scores, rows of positions and numbers of an activation that we leave out.
    *("transformers: afmoe", "transformers: ernie4_5_moe", "transformers: apertus", "transformers: biogpt"),
    *("transformers: opt", "transformers: persimmon", "transformers: jetmoe", "transformers: laguna"),
    *("transformers: beam", "transformers: apertus1p5_text"),
}


def _in_full(table: dict[str, Any]) -> Any:
    if table.keys() != {"repeats", "entries"}:
        return table
    return [table["repeats"][i % len(table["repeats"])] for i in range(table["entries"])]


ROWS = json.loads(_PATH.read_text(), object_hook=_in_full)


def test_parameters_are_as_published(tmp_path: Path) -> None:
    path, wrong = tmp_path / "config.json", {}
    for name, total, active, config in ROWS:
        path.write_text(json.dumps(config))
        model, _ = make_model({"config": str(path)}, tmp_path)
        counts = (model.parameter_count, model.active_count if active else None)
        off = max(abs(counts[0] / total - 1), abs(counts[1] / active - 1) if active and counts[1] else 0)
        if off > (1e-4 if name in _INEXACT else 0):
            wrong[name] = (*counts, total, active)
    assert not wrong


def test_a_model_of_one_layer_is_read(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8}
    fields, _ = _read({"model_type": "mamba2", **sizes}, tmp_path)
    assert fields["pattern"] == ["mamba"]


@pytest.mark.parametrize("interleaved", [True, False])
def test_how_pairs_are_turned_is_written_and_read(interleaved: bool, tmp_path: Path) -> None:
    spec, _ = make_model({"preset": "deepseek-v3"}, tmp_path)
    assert spec.latent is not None
    spec = replace(spec, latent=replace(spec.latent, interleaved=interleaved))
    fields, _ = _read(to_hugging_face(spec), tmp_path)
    assert fields["latent"]["interleaved"] is interleaved


def test_every_row_of_the_families_is_read() -> None:
    for name in FAMILIES:
        assert FAMILIES[name].known is not None
        assert not FAMILIES[name].part or FAMILIES[name].inner in FAMILIES


def _read(config: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return from_hugging_face(folder / "config.json")


_SIZES = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}


def test_layers_that_draft_may_stand_behind_the_others(tmp_path: Path) -> None:
    """As in the file of Step-3.5-Flash (huggingface.co/stepfun-ai/Step-3.5-Flash): 48 kinds of 45 layers and 3."""
    kinds = ["full_attention", "sliding_attention"] * 2
    config = {**_SIZES, "model_type": "step3p5", "num_attention_groups": 1, "layer_types": kinds}
    fields, _ = _read(config | {"num_nextn_predict_layers": 2}, tmp_path)
    assert fields["pattern"] == ["attention+mlp", "near+mlp"]
    with pytest.raises(InputError, match="layer_types has 4 entries for 2 layers"):
        _read(config | {"num_nextn_predict_layers": 1}, tmp_path)


def test_experts_of_hy3_have_the_name_of_its_file(tmp_path: Path) -> None:
    """huggingface.co/tencent/Hy3: `expert_hidden_dim` and `route_norm`, where transformers has names of its own."""
    config = {**_SIZES, "model_type": "hy_v3", "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}
    fields, _ = _read(config | {"expert_hidden_dim": 6, "route_norm": False, "qk_norm": True}, tmp_path)
    experts = fields["experts"]
    assert (experts["ffn"], experts["shared_ffn"], experts["normalized"]) == (6, 6, False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "num_memory_heads": 3}, "num_memory_heads = 3 is not known for model_type 'llama'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 2 layers"),
        ({"model_type": "zaya"}, "compressed convolutional attention"),
        ({"model_type": "bart"}, "attention to an encoder"),
        ({"model_type": "opt", "word_embed_proj_dim": 4}, "an embedding of another width"),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "= 'relu' is not supported"),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "ring"]}, "layer type 'ring' is not supported"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"model_type": "llava", "text_config": {"model_type": "t5"}}, "model_type 't5' is not supported"),
        ({"model_type": ["llama", "gemma"]}, "model_type ['llama', 'gemma'] is not supported"),
        ({"model_type": "hunyuan_v1_dense", "use_cla": True}, "layers that share keys and values"),
    ],
)
def test_what_no_row_describes_is_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        _read({**_SIZES, **config}, tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_text_part_is_read_and_said(tmp_path: Path) -> None:
    text = {**_SIZES, "model_type": "llama"}
    fields, notes = _read({"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 4}}, tmp_path)
    assert (fields["family"], fields["hidden"]) == ("llama", 8)
    assert notes == ["the text part of llava is read and priced, without its other parts"]


def test_depths_of_multi_token_prediction_are_left_out_and_said(tmp_path: Path) -> None:
    _, notes = _read({**_SIZES, "model_type": "llama", "num_nextn_predict_layers": 1}, tmp_path)
    assert notes == ["multi-token prediction is left out (num_nextn_predict_layers = 1)"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a | 3", 2),
        ("none_such | 3", 3),
        ("null | 3", 3),
        ("has(null) and not has(none_such)", True),
        ("kinds[i]", "full"),
        ("missing[i] | 'all'", "all"),
        ("rope.factor * a + 1", 9),
        ("'all' if i % 2 else 'window'", "all"),
        ("-a // 2 < 0 and i in [1, 2]", True),
        ("spec.layers - len(kinds)", 5),
    ],
)
def test_expressions(text: str, value: Any) -> None:
    keys = {"a": 2, "null": None, "kinds": ["window", "full"], "rope": {"factor": 4}}
    assert evaluate(text, keys, spec={"layers": 7}, i=1) == value


@pytest.mark.parametrize("text", ["a.__class__", "open(a)", "[x for x in a]", "a ** 9", "'x' * 10**9", "lambda: 1"])
def test_expressions_reach_nothing_else(text: str) -> None:
    with pytest.raises((SyntaxError, TypeError, KeyError, AttributeError)):
        evaluate(text, {"a": 9})


def test_the_keys_of_an_expression_are_known() -> None:
    assert names("int(a.b) + c[i] | has(d) if spec.e else none") == {"a", "c", "d"}
