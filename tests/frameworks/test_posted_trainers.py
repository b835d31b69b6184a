"""Trainers' files as people post them: long contexts over a ring, samples that nothing packs, losses in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process_cli import json_of

RING = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_activation_checkpointing_offload: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_shard_size: 1
  parallelism_config_cp_size: 8
"""
LONG = """\
accelerate launch --config_file ring.yaml sft_long_context.py --model_name_or_path Qwen/Qwen3-8B \\
    --max_length 1048576 --per_device_train_batch_size 1 --gradient_checkpointing False --bf16 --loss_type chunked_nll
"""
LORA = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: lora
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def test_a_ring_of_accelerate_is_one_under_a_trainer_too(tmp_path: Path) -> None:
    """huggingface/trl pull 6845: 364 s and 56.2 GB a GPU. It was refused as an exchange of heads, and its
    checkpoints, logits in chunks and attention by cuDNN had no place."""
    (tmp_path / "ring.yaml").write_text(RING)
    (tmp_path / "run.sh").write_text(LONG)
    asked = ("run.sh", "--cluster", "dgx-h100", "--json")
    p = json_of(tmp_path, "predict", *asked)
    assert "cp=8" in p["strategy"]
    assert "ulysses" not in p["strategy"]
    assert p["step_time_s"] == pytest.approx(364, rel=0.1)
    assert p["fits"]
    assert 0.75 * 56.2e9 < p["memory_bytes"] < 56.2e9  # what the host's copies need on their way is not in it


@pytest.mark.parametrize(
    ("more", "said"),
    [("", True), ("packing: true\n", False), ("neat_packing: true\n", False), ("packing: false\n", True)],
)
def test_a_bound_is_not_the_length_of_samples(tmp_path: Path, more: str, said: bool) -> None:
    """hiyouga/LLaMA-Factory issue 6958: samples of 154 tokens under cutoff_len 2,048 were priced as 2,048 without a
    word, nearly three times too slow; with their mean a step of 1.96 s is within 5 %."""
    (tmp_path / "lora.yaml").write_text(LORA + more)
    asked = ("lora.yaml", "--cluster", "pcie-rtx5090", "--gpus", "1", "--json")

    def lines(p: dict[str, Any]) -> list[str]:
        return [c["reason"] for c in p["question"]["caveats"] if "cutoff_len 2,048" in c["keys"]]

    p = json_of(tmp_path, "predict", *asked)
    assert bool(lines(p)) == said
    mean = json_of(tmp_path, "predict", *asked, "--seq", "154")
    assert not lines(mean)
    assert mean["step_time_s"] == pytest.approx(1.957, rel=0.05)


def test_texts_cut_one_after_another_fill_their_blocks(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path gpt2-xl --block_size 1024 --bf16 "
        "--per_device_train_batch_size 4\n"
    )
    p = json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-a100", "--json")
    assert not [c for c in p["question"]["caveats"] if "length of every sample" in c["reason"]]


_PREPARED = """\
model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B", load_in_4bit=True)
model = prepare_model_for_kbit_training(model{told})
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, bf16=True)
trainer = Trainer(model=model, args=args)
trainer.train()
"""


@pytest.mark.parametrize(("told", "recompute"), [("", "full"), (", use_gradient_checkpointing=False", None)])
def test_a_model_prepared_for_few_bits_recomputes(tmp_path: Path, told: str, recompute: str | None) -> None:
    (tmp_path / "train.py").write_text(_PREPARED.replace("{told}", told))
    found = json_of(tmp_path, "read", "train.py", "--json")
    assert found["strategy"]["recompute"] == recompute
    assert found["options"] == {"lora": 16, "lora_targets": "qkv", "base": "nf4"}


def test_alpaca_lora_s_own_flags(tmp_path: Path) -> None:
    """tloen/alpaca-lora issue 432, which was refused as keys of Megatron."""
    (tmp_path / "run.sh").write_text(
        "python finetune.py --base_model='decapoda-research/llama-7b-hf' --num_epochs=10 --cutoff_len=512 "
        "--group_by_length --lora_target_modules='[q_proj,k_proj,v_proj,o_proj]' --lora_r=16 --micro_batch_size=8\n"
    )
    found = json_of(tmp_path, "read", "run.sh", "--gpus", "1", "--json")
    assert (found["strategy"]["micro_batch"], found["strategy"]["recompute"]) == (8, "full")
    job = {name: found["job"][name] for name in ("global_batch", "seq", "precision")}
    assert job == {"global_batch": 128, "seq": 512, "precision": "fp16"}
    assert found["options"] == {"lora": 16, "lora_targets": "attention", "base": "int8"}


def test_keys_of_run_clm_are_known(tmp_path: Path) -> None:
    """huggingface/transformers issue 48692: Qwen3.5-9B on eight B200 took 0.60 s; its sizes were unknown."""
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 run_clm.py "
        "--model_name_or_path Qwen/Qwen3.5-9B-Base --dataset_name Salesforce/wikitext "
        "--dataset_config_name wikitext-103-raw-v1 --validation_split_percentage 5 --max_train_samples 9999 "
        "--block_size 1024 --per_device_train_batch_size 8 --optim adamw_torch_fused --bf16 True --do_train\n"
    )
    p = json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-b200", "--gpus", "8", "--json")
    assert not [c for c in p["question"]["caveats"] if "no release" in c["reason"]]
    assert p["step_time_low_s"] < 0.60 < p["step_time_high_s"]


_DECLARED = """\
@dataclass
class ModelArguments:
    model_name_or_path: Optional[str] = field(default="facebook/opt-125m")


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: Optional[str] = field(default=None)
    model_max_length: int = field(default=512, metadata={"help": "Sequences will be right padded."})


def train():
    parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
"""


@pytest.mark.parametrize("files", [("run.sh",), ("run.sh", "train.py")])
def test_what_a_program_declares_is_its_default(tmp_path: Path, files: tuple[str, ...]) -> None:
    """tatsu-lab/stanford_alpaca issue 168: its length stands in train.py alone, and was asked for."""
    (tmp_path / "train.py").write_text(_DECLARED)
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node=4 train.py --model_name_or_path huggyllama/llama-7b --bf16 True "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --fsdp 'full_shard auto_wrap'\n"
    )
    found = json_of(tmp_path, "read", *files, "--json")
    assert found["job"]["seq"] == 512
    assert any("model_max_length=512 where nothing says otherwise" in c["reason"] for c in found["caveats"])


def test_what_a_command_states_is_not_what_its_program_declares(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_DECLARED)
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node=4 train.py --model_name_or_path huggyllama/llama-7b --bf16 True "
        "--per_device_train_batch_size 4 --model_max_length 1024\n"
    )
    found = json_of(tmp_path, "read", "run.sh", "--json")
    assert found["job"]["seq"] == 1024
    assert not any("as train.py declares" in c["reason"] for c in found["caveats"])


def test_weights_that_nemo_keeps_in_fp32_are_said(tmp_path: Path) -> None:
    """NVIDIA-NeMo/NeMo issue 8059: a sixth slower than predicted, and nothing said why."""
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node=8 examples/nlp/language_modeling/megatron_llama_pretraining.py "
        "trainer.precision=bf16 trainer.devices=8 trainer.num_nodes=1 model.megatron_amp_O2=False "
        "model.tensor_model_parallel_size=4 model.micro_batch_size=1 model.global_batch_size=32\n"
    )
    found = json_of(tmp_path, "read", "run.sh", "--json")
    assert any("keeps weights in fp32" in c["reason"] for c in found["caveats"])
