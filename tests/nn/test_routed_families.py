"""Families with experts, configs at random: the logits of transformers, and a config.json there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hf_configs import configs
from support.saved_models import ROUTED, logits, spec_of
from support.sizes import examples

from phalanx.nn.init import create, fill_buffers
from phalanx.nn.weight_files import open_weights
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.families import to_hugging_face
from phalanx.spec.model.presets import PRESETS


@st.composite
def routed(draw: st.DrawFn, family: str) -> dict[str, Any]:
    def some(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    given = draw(configs(family)) | {"rms_norm_eps": some(1e-6, 1e-5)}
    if family == "mixtral":
        return given | {"sliding_window": some(None, 7), "router_aux_loss_coef": some(0.001, 0.02)}
    if family == "qwen3_moe":
        return given | {"norm_topk_prob": some(True, False)}
    groups, each = some((1, 4), (2, 2), (4, 2))
    given |= {"n_routed_experts": groups * each, "n_group": groups, "topk_group": min(groups, 2)}
    given |= {"num_experts_per_tok": some(1, 2, 3), "routed_scaling_factor": some(1.0, 2.5)}
    if family == "deepseek_v2":
        given["topk_method"] = some("greedy", "group_limited_greedy")
    else:
        given |= {"norm_topk_prob": some(True, False), "rope_interleave": some(True, False)}
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": some(8, 16)}
    scales = some({}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale_all_dim": 1.0}, {"mscale": 1.0})
    return given | some({}, {"rope_parameters": rope | scales})


@examples(4, 40)
@pytest.mark.parametrize("family", ROUTED)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path, examples: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    @settings(max_examples=examples)
    @given(routed(family))
    def equal(arguments: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **arguments))
        state = model.state_dict()
        for name in sorted(state):
            torch.nn.init.normal_(state[name], mean=float(name.endswith("norm.weight")), std=0.2)
        model.save_pretrained(tmp_path)
        spec = spec_of(tmp_path)
        weights = open_weights(tmp_path, spec)
        ours = create(spec, torch.float32, torch.device("cpu"))
        tokens = torch.randint(spec.vocab, (2, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for name, p in ours.named_parameters():
                p.copy_(weights.slice(name, 0, p.numel()).view(p.shape))
            fill_buffers(ours, weights)
            found, reference = ours(tokens), logits(tmp_path, tokens)
        assert (found - reference).abs().max() <= 1e-5 * max(1.0, float(reference.abs().max()))
        (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(spec)))
        assert spec_of(tmp_path) == spec
        assert torch.equal(logits(tmp_path, tokens), reference)

    equal()


@pytest.mark.parametrize("name", [name for name, given in PRESETS.items() if given["family"] in ROUTED])
def test_a_preset_has_a_config(name: str, tmp_path: Path) -> None:
    spec, _ = make_model({"preset": name}, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_hugging_face(spec)))
    assert make_model({"config": str(path)}, tmp_path)[0] == spec
