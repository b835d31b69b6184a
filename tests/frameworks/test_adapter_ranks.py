"""Ranks of adapters in NeMo's, verl's and torchtune's words: read and priced as PEFT's, or one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.in_process_cli import error_of, json_of

_NEMO = """trainer: {devices: 8, num_nodes: 1, precision: bf16}
model:
  tensor_model_parallel_size: 2
  micro_batch_size: 1
  global_batch_size: 128
  peft:
    peft_scheme: lora
    lora_tuning: {target_modules: [RANKED], adapter_dim: RANK}
  data: {train_ds: {max_seq_length: 2048, micro_batch_size: 1, global_batch_size: 128}}
"""
_VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64
data.max_prompt_length=512 data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct
actor_rollout_ref.model.lora_rank=RANK actor_rollout_ref.model.lora_alpha=32
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
trainer.n_gpus_per_node=8 trainer.nnodes=1
"""
_TUNE = """model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj]
  apply_lora_to_mlp: True
  lora_rank: RANK
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
batch_size: 2
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
dtype: bf16
"""
_FILES = {
    "nemo.yaml": (_NEMO, "model.peft.lora_tuning.adapter_dim"),
    "verl.sh": (_VERL.replace("\n", " "), "actor_rollout_ref.model.lora_rank"),
    "tune.yaml": (_TUNE, "model.lora_rank"),
}


def _written(folder: Path, name: str, rank: object) -> str:
    (folder / name).write_text(_FILES[name][0].replace("RANKED", "all").replace("RANK", str(rank)))
    return name


@pytest.mark.parametrize("name", _FILES)
def test_a_rank_is_read_and_priced(tmp_path: Path, name: str) -> None:
    asked = ("--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3-8b", "--json")
    state = []
    for rank in (64, 128):
        _written(tmp_path, name, rank)
        assert json_of(tmp_path, "read", name, "--json")["options"]["lora"] == rank
        p = json_of(tmp_path, "predict", name, *asked)
        state.append(p["memory_terms"]["state"])
        parts = [part for part in p["state"]["parts"] if part["of"] == "adapters"]
        held = {part["what"]: part["bytes_per_parameter"] for part in parts}
        assert held == {"weights": 2, "gradients": 4, "master weights and moments": 12}
    adapters = 32 * 64 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))  # llama3-8b's, of rank 64
    assert 0 < state[1] - state[0] <= 18 * adapters
    whole = json_of(tmp_path, "predict", *asked, "--strategy", "dp=8,zero=1", "--batch", "64", "--seq", "2048")
    assert state[1] < whole["memory_terms"]["state"]


@pytest.mark.parametrize("rank", ["abc", -4, 1.5])
@pytest.mark.parametrize("name", _FILES)
def test_what_is_no_rank_is_one_line(tmp_path: Path, name: str, rank: object) -> None:
    """They were priced at each framework's own rank, or as whole training."""
    said = error_of(tmp_path, "read", _written(tmp_path, name, rank))
    assert _FILES[name][1] in said
    assert "is no count" in said


def test_verl_without_a_rank_trains_the_whole_model(tmp_path: Path) -> None:
    assert "lora" not in json_of(tmp_path, "read", _written(tmp_path, "verl.sh", 0), "--json")["options"]


@pytest.mark.parametrize(("modules", "targets"), [("attention_qkv", "qkv"), ("all", "linear"), ("mlp_fc1", "linear")])
def test_nemos_modules_are_attentions_or_all(tmp_path: Path, modules: str, targets: str) -> None:
    (tmp_path / "nemo.yaml").write_text(_NEMO.replace("RANKED", modules).replace("RANK", "32"))
    assert json_of(tmp_path, "read", "nemo.yaml", "--json")["options"]["lora_targets"] == targets


def test_a_frozen_base_in_8_bits_is_written_and_read_back(tmp_path: Path) -> None:
    asked = ("--model", "llama3-8b", "--cluster", "dgx-b200", "--gpus", "8", "--batch", "64", "--seq", "4096")
    plan = ("--stack", "megatron-bridge", "--precision", "fp8", "--where", "tp=1, pp=1, cp=1", "--out", "plan.json")
    base = "lora=16,base=float8"
    json_of(tmp_path, "plan", *asked, *plan, "--options", f"{base},narrow_parameters=on", "--json")
    json_of(tmp_path, "export", "plan.json", "--to", "megatron-bridge", "--out", "run", "--json")
    assert json_of(tmp_path, "read", "run/config.yaml", "--json")["options"]["base"] == "float8"
    json_of(tmp_path, "plan", *asked, *plan, "--options", base, "--json")
    words = error_of(tmp_path, "export", "plan.json", "--to", "megatron-bridge", "--out", "other")
    assert "add narrow_parameters=on" in words
