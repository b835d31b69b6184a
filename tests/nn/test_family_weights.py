"""Weights of families without a writer: equal logits with transformers, the same files written back, and with
recurrences the same logits in steps of generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.saved_models import FURTHER, HYBRID, logits, spec_of, tensors

from phalanx.infer.generate import BatchedGeneration
from phalanx.infer.sampling import Sampling
from phalanx.nn.hugging_face import files
from phalanx.nn.init import create, fill_buffers
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.generation import BatchingPolicy, Request
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

CONFIGS = HYBRID | FURTHER


def saved(family: str, folder: Path) -> tuple[ModelSpec, Path]:
    """Save a small random model by transformers; biases and norms are random too, so that a lost tensor shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(family, vocab_size=97, bos_token_id=1, eos_token_id=2, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    for name, b in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(b, std=0.2)
    model.save_pretrained(folder)
    return spec_of(folder), folder


@pytest.mark.parametrize("family", CONFIGS)
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


@pytest.mark.parametrize("family", [*HYBRID, "granitemoehybrid", "deepseek_v32", "lfm2_moe", "kimi_linear"])
def test_steps_of_generation_have_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of two lengths, in chunks."""
    spec, folder = saved(family, tmp_path)
    weights, most = files.read(folder, spec), 8
    tokens = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(0))
    requests = [Request(i, tuple(tokens[i, : 32 - 5 * i].tolist()), most) for i in range(2)]
    comm, policy = Comm(ALONE, mesh(Strategy())), BatchingPolicy(slots=2, chunk=7, page=4)
    generation = BatchedGeneration(
        spec, Strategy(), comm, weights, "float32", requests, Sampling(temperature=0), policy
    )
    texts, chosen = [list(r.prompt) for r in requests], 0
    while not generation.done:
        lengths = [len(text) for text in texts]
        step = generation.step(lambda request, token, last: texts[request].append(token))
        slots = [slot.request for slot in step.batches[0].slots if slot.samples]
        for request, found in zip(slots, step.logits if step.logits is not None else (), strict=True):
            theirs = logits(folder, torch.tensor([texts[request][: lengths[request]]]))[0, -1]
            assert (found - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))
            chosen += 1
    assert chosen == 2 * most
