"""Weights of models with recurrences: equal logits with transformers, and the same files written back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.saved_models import HYBRID, logits, tensors

from phalanx.nn.hugging_face import files
from phalanx.nn.init import create, fill_buffers
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec

SIZES = {"vocab": 97, "hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "max_seq": 64}
DELTA = {"kind": "delta", "name": "delta", "key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 8}
MAMBA = {"kind": "mamba", "name": "mamba", "heads": 4, "head_dim": 8, "groups": 2, "state": 6, "chunk": 16}
QWEN3_NEXT = {
    **{"family": "qwen3_moe", "rope_theta": 10_000.0, "rotary_dim": 4, "output_gate": True, "qk_norm": True},
    "mixers": [DELTA],
    "pattern": ["delta+experts", "attention+experts"],
    "experts": {"count": 6, "top_k": 3, "ffn": 16, "shared_ffn": 24, "shared_gate": True, "normalized": True},
}
NEMOTRON_H = {
    **{"family": "llama", "activation": "relu2", "norm_eps": 1e-5},
    "mixers": [MAMBA, {"kind": "attention", "name": "nope", "rotary_dim": 0}],
    "pattern": ["mamba", "mlp", "nope", "experts"],
    "experts": {
        **{"count": 6, "top_k": 2, "ffn": 16, "shared_ffn": 24, "latent": 12, "score": "sigmoid", "scale": 2.5},
        **{"normalized": True, "balance_bias": 1e-3},
    },
}
SPECS = {"qwen3_next": QWEN3_NEXT, "nemotron_h": NEMOTRON_H}


def saved(family: str, folder: Path) -> tuple[ModelSpec, Path]:
    """Save a small random model by transformers; biases and norms are random too, so that a lost tensor shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(family, vocab_size=97, bos_token_id=1, eos_token_id=2, **HYBRID[family])
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(b, std=0.2)
    model.save_pretrained(folder)
    spec = build(ModelSpec, complete(SIZES | SPECS[family]), "model")
    return replace(spec, family=family), folder


@pytest.mark.parametrize("family", SPECS)
def test_logits_are_those_of_transformers_and_files_come_back(family: str, tmp_path: Path) -> None:
    spec, folder = saved(family, tmp_path / "theirs")
    weights = files.read(folder, spec)
    model = create(spec, torch.float32, torch.device("cpu"))
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights.slice(name, 0, p.numel()).view(p.shape))
        fill_buffers(model, weights)
        ours, reference = model(tokens), logits(folder, tokens)
    assert (ours - reference).abs().max() <= 1e-5 * max(1.0, float(reference.abs().max()))
    files.write(tmp_path / "ours", spec, weights, None, 1e9, {})
    before, after = tensors(folder), tensors(tmp_path / "ours")
    assert before.keys() == after.keys()
    for name, t in before.items():
        torch.testing.assert_close(after[name], t, rtol=0, atol=1e-6)
