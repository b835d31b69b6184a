"""Losses that make no whole logits, as a Trainer's configuration turns them on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import json_of

from phalanx.frameworks.reading import files

_HF = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "bf16": True, "max_length": 4096}
_AXOLOTL = {"base_model": "x", "micro_batch_size": 2, "gradient_accumulation_steps": 1, "sequence_len": 4096}
_CUT = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        (_HF, None),
        (_HF | {"use_liger_kernel": True}, "linear"),
        (_HF | {"use_liger_kernel": False}, None),
        (_HF | {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}, None),
        (_HF | {"enable_liger_kernel": True, "stage": "sft"}, "linear"),
        (_HF | {"enable_liger_kernel": True, "stage": "rm"}, None),
        (_HF | {"use_liger_kernel": True, "num_generations": 8}, None),
        (_HF | {"use_liger_kernel": True, "rl": "dpo"}, None),
        (_AXOLOTL | {"liger_fused_linear_cross_entropy": True}, "linear"),
        (_AXOLOTL | {"liger_cross_entropy": True}, "fused"),
        (_AXOLOTL | {"liger_rms_norm": True}, None),
        (_AXOLOTL | _CUT, "linear"),
        (_AXOLOTL | _CUT | {"cut_cross_entropy": False}, None),
    ],
)
def test_a_loss_that_has_the_heads_product_in_it_is_read(config: dict[str, Any], loss: str | None) -> None:
    kind = "hf" if "bf16" in config else "accelerate"
    assert files.READERS[kind](config, 8).options.get("cross_entropy") == loss


@pytest.mark.parametrize(("more", "said"), [({}, False), ({"liger_glu_activation": True}, True)])
def test_what_ligers_other_kernels_keep_is_said_to_be_less(more: dict[str, Any], said: bool) -> None:
    """axolotl-ai-cloud/axolotl issue 3154 names them one by one."""
    c = files.READERS["accelerate"](_AXOLOTL | {"liger_fused_linear_cross_entropy": True} | more, 8)
    assert any("keep less memory than is said" in note for note in c.notes) is said


def test_logits_that_are_never_whole_take_no_memory(tmp_path: Path) -> None:
    """A micro-batch of 2 x 4,096 tokens has logits of 128,256 in at least 16 bits, and their gradient."""
    asked = ("--gpus", "8", "--cluster", "dgx-h100", "--model", "llama3-8b", "--strategy", "dp=8,zero=3", "--json")
    terms = []
    for more in ({}, {"use_liger_kernel": True}):
        (tmp_path / "c.json").write_text(json.dumps(_HF | more))
        terms.append(json_of(tmp_path, "predict", "c.json", *asked)["memory_terms"]["logits"])
    assert terms[0] - terms[1] > 2 * 4096 * 128256 * 4


@pytest.mark.parametrize("stack", ["accelerate", "deepspeed"])
@pytest.mark.parametrize("loss", ["linear", "fused"])
def test_the_written_arguments_turn_it_on(tmp_path: Path, stack: str, loss: str) -> None:
    asked = ("--model", "llama3-8b", "--gpus", "8", "--cluster", "dgx-h100", "--batch", "16", "--seq", "2048")
    chosen = ("--stack", stack, "--strategy", "dp=8,zero=3", "--options", f"cross_entropy={loss}", "--out", "p.json")
    json_of(tmp_path, "plan", *asked, *chosen, "--json")
    json_of(tmp_path, "export", "p.json", "--to", stack, "--out", "out", "--json")
    arguments = json.loads((tmp_path / "out" / "training_arguments.json").read_text())
    assert files.READERS["hf"](arguments, 8).options["cross_entropy"] == loss


@pytest.mark.parametrize("stack", ["megatron-core", "megatron-bridge"])
@pytest.mark.parametrize(("loss", "impl", "kept"), [("native", "native", 6), ("fused", "te", 4)])
def test_a_fusion_of_megatron_keeps_its_own_softmax_or_nothing(
    tmp_path: Path, stack: str, loss: str, impl: str, kept: int
) -> None:
    asked = ("--model", "llama3-8b", "--gpus", "8", "--cluster", "dgx-h100", "--batch", "16", "--seq", "4096")
    chosen = ("--stack", stack, "--strategy", "dp=8,zero=1", "--options", f"cross_entropy={loss}", "--out", "p.json")
    json_of(tmp_path, "plan", *asked, *chosen, "--json")
    written = json_of(tmp_path, "export", "p.json", "--to", stack, "--out", "out", "--json")["files"]
    text = "".join((tmp_path / "out" / Path(file).name).read_text() for file in written)
    assert re.search(rf"cross.entropy.fusion.impl\W+{impl}\b", text)
    priced = json_of(tmp_path, "predict", "p.json", "--json")["memory_terms"]["logits"]
    assert priced == pytest.approx(4096 * 128256 * kept, rel=0.01)


@pytest.mark.parametrize(("impl", "loss"), [(None, "native"), ("native", "native"), ("te", "fused")])
def test_a_fusion_of_megatron_is_its_own_unless_it_is_named(impl: str | None, loss: str) -> None:
    words = {"cross_entropy_loss_fusion": True} | ({"cross_entropy_fusion_impl": impl} if impl else {})
    script = {"args": {word.replace("_", "-"): value for word, value in words.items()}}
    assert files.READERS["megatron"](script, 8).options["cross_entropy"] == loss
    container = {"model": {"tensor_model_parallel_size": 1} | words, "ddp": {}, "mixed_precision": {}}
    assert files.READERS["nemo"](container, 8).options["cross_entropy"] == loss


@pytest.mark.parametrize(
    ("name", "kernel"), [("kernels-community/vllm-flash-attn3", "flash3"), ("kernels-community/flash-attn", "flash2")]
)
def test_kernels_of_the_hub_are_attentions(name: str, kernel: str) -> None:
    assert files.READERS["hf"](_HF | {"attn_implementation": name}, 8).options["attention"] == kernel


def test_the_length_of_grpo_is_that_of_its_two_sides() -> None:
    sides = {"num_generations": 8, "max_prompt_length": 512, "max_completion_length": 1024}
    config = {name: value for name, value in _HF.items() if name != "max_length"}
    assert files.READERS["hf"](config | sides, 8).layout.seq == 1536


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, False),
        ({"dataset_text_field": "text"}, True),
        ({"dataset_text_field": "text", "loss_type": "nll"}, False),
        ({"dataset_text_field": "text", "loss_type": "chunked_nll"}, False),
        ({"dataset_text_field": "text", "use_liger_kernel": True}, False),
        ({"dataset_text_field": "text", "num_generations": 8}, False),
    ],
)
def test_logits_that_a_release_would_not_make_are_said_with_their_memory(
    tmp_path: Path, more: dict[str, Any], said: bool
) -> None:
    """huggingface/trl#6846: Qwen3-8B at a million tokens takes 56.2 GB, and its logits alone more, were they made."""
    (tmp_path / "c.json").write_text(json.dumps(_HF | more))
    asked = ("--gpus", "8", "--cluster", "dgx-h100", "--model", "llama3-8b", "--strategy", "dp=8,zero=3", "--json")
    answer = json_of(tmp_path, "predict", "c.json", *asked)
    bounds = [c["bound"] for c in answer["question"]["caveats"] if "chunked_nll" in c["reason"]]
    logits = answer["memory_terms"]["logits"] / 2**30
    assert bounds == ([f"memory by at most {logits:.1f} GiB less"] if said else [])


def test_slices_of_unsloth_are_said_with_what_an_older_release_keeps(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#3638: 65,536 tokens in 4 bits filled 80 GB in May 2024, and 102,400 did not fit."""
    (tmp_path / "c.json").write_text(json.dumps(_HF | {"use_unsloth": True, "max_length": 65536}))
    asked = ("--gpus", "1", "--cluster", "dgx-a100", "--model", "llama3-8b", "--strategy", "micro_batch=1", "--json")
    caveats = json_of(tmp_path, "predict", "c.json", *asked)["question"]["caveats"]
    whole = 65536 * 128256 * 2 / 2**30
    assert [c["bound"] for c in caveats if "slices" in c["reason"]] == [f"memory by at least {whole:.1f} GiB more"]
