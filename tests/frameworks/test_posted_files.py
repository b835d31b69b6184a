"""What people paste: commands that lost their backslashes, files that lie elsewhere or nowhere, and heads that a
framework cannot divide."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.frameworks.registry import DOCUMENTED
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions
from tests.support.in_process_cli import json_of, phalanx, text_of

PASTED = """\
CUDA_VISIBLE_DEVICES=0,1 accelerate launch
--config_file fsdp_config.yaml
../src/train_bash.py
--stage sft
--model_name_or_path qwen/Qwen1.5-72B-Chat
--finetuning_type lora
--lora_target q_proj,v_proj
--cutoff_len 1024
--per_device_train_batch_size 1
--gradient_accumulation_steps 4
--quantization_bit 4
--fp16
"""
OFFLOADED = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: fp16
num_processes: 2
"""
S1 = """\
torchrun --nnodes 2 --nproc-per-node 8 train/sft.py --per_device_train_batch_size=1 --block_size=32768 \\
  --model_name=Qwen/Qwen2.5-32B-Instruct --fsdp="full_shard auto_wrap" --fsdp_config="train/fsdp_config_qwen.json" \\
  --bf16=True --gradient_checkpointing=True
"""


def test_flags_below_a_command_without_backslashes_are_its_own(tmp_path: Path) -> None:
    """hiyouga/LLaMA-Factory issue 2937: two RTX 3090 took 100-odd seconds a step; no training was seen in it."""
    (tmp_path / "fsdp_config.yaml").write_text(OFFLOADED)
    (tmp_path / "run.sh").write_text(PASTED)
    p = json_of(tmp_path, "predict", "run.sh", "--cluster", "pcie-rtx3090", "--json")
    assert p["fits"]
    assert 30 < p["step_time_high_s"] < 150
    (said,) = (c["reason"] for c in p["question"]["caveats"] if "backslash" in c["reason"] or "pasted" in c["reason"])
    assert said.startswith("line 2 and what follows it have no \\ before them")


@pytest.mark.parametrize("between", ["\n", "# --seq-length 8192 \\\n", "export X=1\n"])
def test_flags_apart_from_a_command_are_lost_as_in_a_shell(tmp_path: Path, between: str) -> None:
    above = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 \\\n"
    (tmp_path / "run.sh").write_text(f"{above}{between}--bf16\n")
    assert "--bf16: the command above it has ended" in text_of(tmp_path, "read", "run.sh")


def test_a_trainers_file_of_fsdp_is_read_and_not_needed(tmp_path: Path) -> None:
    """simplescaling/s1 issue 111: with the file it was refused as another layout, without it for want of it. At
    the block's length 16 H100 do not hold it (issue 13); samples of 4,700 tokens in the mean took the paper 5 s."""
    (tmp_path / "run.sh").write_text(S1)
    asked = ("predict", "run.sh", "--cluster", "dgx-h100", "--json")
    without = json_of(tmp_path, *asked)
    table = {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"], "min_num_params": 0, "xla": False}
    (tmp_path / "train").mkdir()
    (tmp_path / "train/fsdp_config_qwen.json").write_text(json.dumps(table))
    whole = json_of(tmp_path, *asked)
    assert whole["strategy"] == without["strategy"] == "dp=16,zero=3,recompute=full"
    assert whole["step_time_s"] == without["step_time_s"]
    assert not whole["fits"]
    assert any("block_size 32,768" in c["keys"] for c in whole["question"]["caveats"])
    of_samples = json_of(tmp_path, *asked, "--seq", "4700")
    assert of_samples["fits"]
    assert of_samples["step_time_s"] < 5 < whole["step_time_s"]
    table |= {"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"}
    (tmp_path / "train/fsdp_config_qwen.json").write_text(json.dumps(table))
    assert json_of(tmp_path, *asked)["memory_bytes"] > whole["memory_bytes"]  # one unit: all parameters at once


def test_llama_factorys_deepspeed_files_are_known_in_any_folder(tmp_path: Path) -> None:
    """hiyouga/LLaMA-Factory issue 3259 has `deepseed` in the path, and was refused for want of the file."""
    (tmp_path / "run.sh").write_text(
        "deepspeed --num_gpus 8 src/train_bash.py --deepspeed examples/deepseed/ds_z3_offload_config.json "
        "--stage sft --cutoff_len 32768 --model_name_or_path Qwen/Qwen1.5-32B-Chat --finetuning_type full --bf16 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 1\n"
    )
    p = json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-a100", "--json")
    assert p["question"]["options"]["optimizer_offload"] == 1
    said = [c["reason"] for c in p["question"]["caveats"]]
    assert any("ds_z3_offload_config.json is not here: it shards and offloads as" in reason for reason in said)


@pytest.mark.parametrize(
    ("stack", "strategy", "runs"),
    [
        ("torchtitan", "tp=4,ep=8,zero=3", False),  # pytorch/torchtitan pull 4016
        ("torchtitan", "tp=2,ep=8,zero=3", True),
        ("megatron-bridge", "tp=4,sp=1,ep=8,zero=1", True),  # which copies them
        ("megatron-bridge", "cp=8,ulysses=8,ep=8,zero=1", False),
        ("megatron-bridge", "cp=8,ulysses=2,ep=8,zero=1", True),
        ("megatron-bridge", "tp=2,sp=1,cp=8,ulysses=2,ep=8,zero=1", False),
        ("nanotron", "tp=4", False),
    ],
)
def test_two_key_value_heads_part_over_no_more_ranks_than_a_stack_gives_them(
    tmp_path: Path, stack: str, strategy: str, runs: bool
) -> None:
    """Qwen3.5-122B-A10B has two; four-way tensor parallelism of torchtitan and eight-way all-to-alls were priced."""
    model = "Qwen2.5-3B" if stack == "nanotron" else "Qwen3.5-122B-A10B"
    asked = ("--model", model, "--cluster", "gb200-nvl72", "--gpus", "64", "--batch", "64", "--seq", "4096")
    code, out, err = phalanx(tmp_path, "predict", "--stack", stack, *asked, "--strategy", strategy)
    assert code == 0, err
    assert ("key-value heads of its own" in out + err) != runs


def test_deepspeed_offloads_nothing_from_a_group_of_shards() -> None:
    """A plan for three L40S offloaded everything with mics_shard_size 1, which raises in its reduction."""
    stack, parts = DOCUMENTED["deepspeed"], Strategy(dp=4, zero=3, shard=2)
    refused = stack.refusal(parts, StackOptions(optimizer_offload=1.0))
    assert refused is not None
    assert refused.reason == "MiCS reduces gradients on the device alone"
    assert stack.refusal(parts) is None
    assert stack.refusal(Strategy(dp=4, zero=3), StackOptions(optimizer_offload=1.0)) is None


SWIFT = """\
NPROC_PER_NODE=8 megatron sft --load /model/Qwen3-Next-80B-A3B-Instruct-mcore --train_type lora --lora_rank 8 \\
    --target_modules all-linear --expert_model_parallel_size 2 --moe_grouped_gemm true --micro_batch_size 1 \\
    --global_batch_size 8 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
    --max_length 512
"""


def test_megatrons_adapters_of_ms_swift_are_on_each_expert(tmp_path: Path) -> None:
    """modelscope/ms-swift issue 6387 ran out of memory on 8 H20. Of rank 8 on 512 experts of 48 blocks, three
    matrices of 2048 x 512, halved by ep=2: 6 bytes a parameter, and 12 over the 4 ranks that hold the same ones."""
    (tmp_path / "run.sh").write_text(SWIFT)
    asked = ("predict", "run.sh", "--cluster", "dgx-h20", "--json")
    each = json_of(tmp_path, *asked)
    assert each["question"]["options"]["lora_targets"] == "experts"
    tries = json_of(
        tmp_path, "plan", "--from", "run.sh", "--cluster", "dgx-h20", "--try", "lora_targets=linear, ep=8", "--json"
    )
    none, wide = (row["memory_bytes"] for row in tries["changes"])
    adapters = 512 * 48 * 3 * 8 * (2048 + 512) / 2
    assert each["memory_bytes"] - none == pytest.approx(adapters * (6 + 12 / 4), rel=0.01)
    assert wide < 0.4 * none


def test_the_program_that_megatron_sft_starts_has_its_defaults(tmp_path: Path) -> None:
    """modelscope/ms-swift issue 9191 starts it by its file."""
    flags = (
        "--model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 2 --expert_model_parallel_size 4 --max_length 4096"
    )
    found = []
    for start in ("NPROC_PER_NODE=8 megatron sft", "torchrun --nproc_per_node 8 /x/swift/cli/_megatron/sft.py"):
        (tmp_path / "run.sh").write_text(f"{start} --train_type full {flags}\n")
        asked = json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100", "--json")
        found.append((asked["question"]["strategy"], asked["question"]["precision"], asked["memory_bytes"]))
    assert found[0] == found[1]
    assert found[0][1] == "bf16"


HEADER = """\
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
"""
TRAIN = "train.py --deepspeed_config $DS_CONFIG"
ENGINE = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'


def test_a_program_of_its_own_under_deepspeed_has_the_file_that_is_given(tmp_path: Path) -> None:
    """huggingface/trl issue 2605: two hosts of 8 under one node of Slurm's."""
    (tmp_path / "hosts").write_text("10.0.0.1 slots=8\n10.0.0.2 slots=8\n")
    (tmp_path / "ds.json").write_text(ENGINE)
    (tmp_path / "run.slurm").write_text(f"{HEADER.format(nodes=1)}srun deepspeed --hostfile=hosts {TRAIN}\n")
    assert "hands $DS_CONFIG to DeepSpeed, a file; give it too" in phalanx(tmp_path, "read", "run.slurm")[2]
    said = text_of(tmp_path, "read", "run.slurm", "ds.json")
    assert "ranks start on 2 nodes, and #SBATCH asks for 1" in said
    assert re.search(r"world +16 ", said)


@pytest.mark.parametrize(
    ("nodes", "start", "waits"),
    [
        (8, "accelerate launch --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * 8))", True),
        (8, "torchrun --nnodes 8 --nproc_per_node 8", True),
        (8, "srun torchrun --nnodes 8 --nproc_per_node 8", False),
        (8, 'srun bash -c "torchrun --nnodes 8 --nproc_per_node 8', False),
        (1, "torchrun --nproc_per_node 8", False),
    ],
)
def test_a_batch_script_starts_ranks_on_its_first_node_alone(
    tmp_path: Path, nodes: int, start: str, waits: bool
) -> None:
    """huggingface/accelerate issues 3522, 2816 and 1837: seven of eight nodes idle, and a time-out."""
    flags = "run_clm.py --model_name_or_path gpt2-xl --block_size 1024 --bf16 --per_device_train_batch_size 4"
    closes = '"' if '"' in start else ""
    (tmp_path / "run.sbatch").write_text(f"{HEADER.format(nodes=nodes)}{start} {flags}{closes}\n")
    said = text_of(tmp_path, "read", "run.sbatch")
    assert ("starts 8 of 64 ranks, which wait for the others" in " ".join(said.split())) == waits


MASON = """\
uv run python mason.py --cluster ai2/jupiter ai2/saturn --priority normal --num_nodes 8 --gpus 8 -- \
    {before}accelerate launch --mixed_precision bf16 --num_processes 8 --use_deepspeed \
    --deepspeed_config_file stage3.conf open_instruct/finetune.py --model_name_or_path allenai/OLMo-2-1124-13B-SFT \
    --max_seq_length 4096 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --gradient_checkpointing
"""


@pytest.mark.parametrize("before", ["", "source env.sh \\&\\& "])
def test_what_mason_submits_stands_behind_its_dashes(tmp_path: Path, before: str) -> None:
    """AI2's open-instruct, which was refused. accelerate fills in `auto`: in fp32 a step took twelve times that."""
    (tmp_path / "stage3.conf").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}')
    (tmp_path / "run.sh").write_text(MASON.format(before=before))
    p = json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100", "--json")
    assert p["strategy"] == "dp=64,zero=3,recompute=full"
    assert (p["question"]["global_batch"], p["question"]["precision"]) == (128, "bf16")
    grpo = "python mason.py --num_nodes 2 --gpus 8 -- python open_instruct/grpo_fast.py --beta 0.01\n"
    (tmp_path / "run.sh").write_text(grpo)
    assert "is of open-instruct on OLMo-core, or its GRPO" in phalanx(tmp_path, "read", "run.sh")[2]


RECIPES = """\
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.trainer import Trainer


def deepseek_v3_671b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("671B"),
        training=TrainingConfig(local_batch_size=4, seq_len=4096),
        parallelism=ParallelismConfig(expert_parallel_degree=2),
    )
"""


def test_a_module_of_ones_own_is_looked_for_where_python_does(tmp_path: Path) -> None:
    """pytorch/torchtitan pull 3360: DeepSeek-V3 with 8 sequences a rank on 256 GB200 fits with whole blocks again."""
    (tmp_path / "run.sh").write_text(
        "torchrun --nnodes 64 --nproc-per-node 4 -m torchtitan.train --module own.deepseek_v3 "
        "--config deepseek_v3_671b --training.local_batch_size 8 "
        "--parallelism.expert_parallel_degree 64 --activation_checkpoint.mode=full\n"
    )
    assert (
        "own/deepseek_v3/config_registry.py" in phalanx(tmp_path, "predict", "run.sh", "--cluster", "gb200-nvl72")[2]
    )
    (tmp_path / "own/deepseek_v3").mkdir(parents=True)
    (tmp_path / "own/deepseek_v3/config_registry.py").write_text(RECIPES)
    p = json_of(tmp_path, "predict", "run.sh", "--cluster", "gb200-nvl72", "--json")
    assert p["strategy"] == "dp=256,zero=3,ep=64,micro_batch=8,recompute=full"
    assert p["fits"]


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize("again", [True, False])
def test_what_fsdp_wraps_may_be_recomputed(tmp_path: Path, prefix: str, again: bool) -> None:
    """Trainer takes activation_checkpointing of FSDP's table; its other keys are accelerate's."""
    table = {
        f"{prefix}activation_checkpointing": again,
        f"{prefix}limit_all_gathers": True,
        "sync_module_states": True,
    }
    (tmp_path / "train").mkdir()
    (tmp_path / "train/fsdp_config_qwen.json").write_text(json.dumps(table))
    (tmp_path / "run.sh").write_text(S1.replace(" --gradient_checkpointing=True", ""))
    p = json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100", "--json")
    assert ("recompute=full" in p["strategy"]) is again
    assert "fsdp_config" not in str([c["keys"] for c in p["question"]["caveats"]])
