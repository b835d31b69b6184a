"""Forms of public threads that were read wrongly, shortened: what each starts, and what is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of, text_of

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.lints import lint
from phalanx.frameworks.reading import files

_MEGATRON = (
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --num-layers 4 --hidden-size 64 --num-attention-heads 4"
)


def _read(tmp_path: Path, text: str, name: str = "run.sh") -> Configuration:
    (tmp_path / name).write_text(text)
    return files.read([tmp_path / name])[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # Engines that ms-swift names without a file, before 3.0 too, and its first name of the micro-batch.
        (
            "NPROC_PER_NODE=4 swift sft --deepspeed default-zero3 --batch_size 2 --model_type x",
            {"world": 4, "zero": 3, "micro_batch": 2},
        ),
        (
            "swift sft --deepspeed zero2-offload --model x",
            {"zero": 2, "offload": {"optimizer": "cpu", "param": "none"}},
        ),
        # The model that OpenRLHF's PPO updates, with its program, and cut off it.
        (
            "python -m openrlhf.cli.train_ppo_ray --actor_num_nodes 2 --actor_num_gpus_per_node 4 --zero_stage 3 "
            "--micro_train_batch_size 1 --train_batch_size 16 --prompt_max_len 100 --generate_max_len 28",
            {"world": 8, "zero": 3, "micro_batch": 1, "accumulation": 2, "seq": 128},
        ),
        (
            "--actor_num_nodes 1 \\\n--actor_num_gpus_per_node 4 \\\n--micro_train_batch_size 2",
            {"world": 4, "zero": 2, "micro_batch": 2, "global_batch": 128},
        ),
        # A session that was pasted: what was printed between is nothing that was typed.
        (
            "root@ab12:/work# export A=1\n1 warning: --nproc_per_node\n(env) me@host:~/x$ torchrun --standalone "
            f"--nproc_per_node=4 \\\n  pretrain_gpt.py {_MEGATRON}\nlogs --bf16",
            {"world": 4, "tp": 2, "dp": 2, "precision": "fp32"},
        ),
        # A text that Python runs is no program.
        (
            f"python -c 'print(1)' --x 2\ntorchrun --nproc_per_node 2 pretrain_gpt.py {_MEGATRON}",
            {"world": 2, "tp": 2},
        ),
        # A server beside the training, which is a program of its own.
        (
            "#SBATCH --nodes=3\n#SBATCH --gres=gpu:8\nNODES=($(scontrol show hostnames $SLURM_JOB_NODELIST))\n"
            'srun --nodes=2 --nodelist="${NODES[@]:0:2}" accelerate launch --num_processes 16 --use_deepspeed '
            "--zero_stage 3 mine.py --server $H &\ntrl vllm-serve --model a/b --tensor_parallel_size 8",
            {"world": 16, "zero": 3},
        ),
        # What `set -x` prints is what ran: the line that was typed is not a training of its own.
        (
            f"NGPU=8 ./run.sh --x\n+ NGPU=8\n+ '[' -n '' ']'\n"
            f"+ torchrun --nproc_per_node=8 pretrain_gpt.py {_MEGATRON}\n[rank0] torchrun failed",
            {"world": 8, "tp": 2},
        ),
        # A shell of a container, whose options end before the text.
        (f"bash -c -- 'torchrun --nproc_per_node 4 pretrain_gpt.py {_MEGATRON}'", {"world": 4, "tp": 2}),
    ],
)
def test_a_form_is_read(tmp_path: Path, text: str, wanted: dict[str, Any]) -> None:
    c = _read(tmp_path, text)
    assert {name: getattr(c.layout, name) for name in wanted} == wanted
    assert not lint({"launched": None}, c)


def test_settings_tell_the_framework_of_a_program_that_is_given_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("finetuning_type: full\nper_device_train_batch_size: 2\ndeepspeed: z3.json\n")
    c = _read(tmp_path, "torchrun --nproc_per_node 8 src/train.py s.yaml")
    assert (c.kind, c.layout.world, c.layout.micro_batch, c.layout.recompute) == ("hf", 8, 2, "full")


def test_what_a_missing_file_would_say_is_no_mistake(tmp_path: Path) -> None:
    """Neither ZeRO's level nor the type: the files of accelerate and of TRL's arguments are not here."""
    (tmp_path / "run.sh").write_text("accelerate launch --config_file a.yaml grpo.py --config r.yaml --bf16")
    c, config = files.read([tmp_path / "run.sh"])
    assert [name.partition(",")[0] for name in c.missing] == ["r.yaml", "a.yaml"]
    assert (c.unknown, lint(config, c), c.job["compute"]) == ({}, [], "bf16")
    assert "zero=0" not in text_of(tmp_path, "read", "run.sh")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "vllm serve a/b -tp 2", "phalanx serve plan --from"),
        ("a.sh", "python -m sglang.launch_server --model a/b", "phalanx serve plan --from"),
        ("a.yaml", "servingEngineSpec:\n  modelSpec: []\n", "phalanx serve plan --from"),
        ("a.sh", "torchrun convert_hf.py --tensor-model-parallel-size 2 --bf16", "trains nothing"),
        ("a.sh", "colossalai run --nproc_per_node 8 b.py --tp 4", "Colossal-AI"),
        ("a.sh", "torchrun train_sft.py --strategy colossalai_zero2", "Colossal-AI"),
        ("a.sh", "python deepy.py train.py configs/13B.yml configs/local.yml\n", "GPT-NeoX"),
        ("a.toml", "max_steps = 1\nseq_len = 2\n[ckpt]\n[model]\n", "prime-rl"),
        ("a.yaml", "loader: {}\nsharding: {}\nbase_config: {}\nmixture: {}\nactions: []\n", "EasyDeL"),
        ("a.yaml", "model: {}\ntrainer: {mp: p}\ninitialize_from_hf: true\n", "Levanter"),
        ("a.yaml", "model: x\ndist_config: {name: fsdp2}\ntrain_dataset: y\n", "v1"),
        ("a.yaml", "model_name_or_path: x\nexport_dir: y\n", "trains nothing"),
        ("a.sh", "torchrun src/scripts/train/OLMo3-7B.py --num_gpus 8\n", "OLMo-core"),
        ("a.sh", "python mason.py --cluster x -- torchrun open_instruct/olmo_core_finetune.py\n", "OLMo-core"),
        ("a.sh", "torchrun --no_python fast-llm train gpt --config c.yaml", "Fast-LLM"),
        ("a.sh", "python -m dapo.main_dapo trainer.strategy=megatron trainer.policy.model.path=a/b", "SkyRL"),
        ("a.sh", "python training/main_async_ppo.py allocation_mode=sglang.d4p1m1+d2p2m1", "AReaL"),
        ("a.sh", "torchrun --nproc_per_node=8 -m RL2.trainer.ppo actor.sp_size=2", "RL2"),
        ("a.yaml", "model: {model_name: x}\ndata: {}\ntraining: {trainer_type: TRL_SFT}\n", "Oumi"),
        ("a.yaml", "train: {data_parallel_mode: fsdp1, global_batch_size: 512, micro_batch_size: 1}\n", "VeOmni"),
        ("a.sh", "NPROC_PER_NODE=8 xtuner train internlm2_5_chat_7b_full --deepspeed deepspeed_zero3", "XTuner"),
        ("a.sh", "litgpt pretrain pythia-14m --config tinyllama.yaml --devices 8 --num_nodes 4", "LitGPT"),
        ("a.sh", 'python -m paddle.distributed.launch --gpus "0,1" run_pretrain.py ./argument.json', "Paddle"),
        ("a.yaml", "exp_name: x\nmodules: {pre_trainer: {framework: torchtitan}}\n", "Primus"),
        ("a.sh", "torchrun own.py --tensor-model-parallel-size 2 --a 1 --b 2 --c 3", "a program of its own"),
        ("a.sh", 'python -c "import x" --tensor-model-parallel-size 2', "starts no training"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert said in error_of(tmp_path, "read", name)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        # A framework's own program, most of whose flags are not known.
        ("run.sh", "torchrun pretrain_gpt.py --tensor-model-parallel-size 1 --a 1 --b 2 --c 3", {"tp": 1}),
        # torchtitan's script before it was a module.
        ("run.sh", "torchrun --nproc_per_node 8 ./train.py --job.config_file a.toml", {"world": 8, "tp": 2, "pp": 2}),
        # The program that `swift` runs, by its file, and MaxText's search for a batch.
        ("run.sh", "torchrun --nproc_per_node 2 /x/swift/cli/sft.py --model y --deepspeed zero3", {"zero": 3}),
        ("run.sh", "python -m MaxText.estimator base.yml per_device_batch_size=4", {"micro_batch": 4}),
        # Cells of a notebook, and what NeMo 1 prints.
        ("a.yaml", "%%writefile /kaggle/a.yaml\nper_device_train_batch_size: 2\nstage: sft\n", {"micro_batch": 2}),
        ("cell.txt", f"!pip install x\n!torchrun --nproc_per_node 2 pretrain_gpt.py {_MEGATRON}\n", {"world": 2}),
        (
            "nemo.log",
            "[NeMo I 2024-05-23 11:06:21 megatron_gpt_sft:176] \n    trainer:\n      devices: 8\n"
            "      num_nodes: 2\n    model:\n      tensor_model_parallel_size: 4\n",
            {"world": 16, "tp": 4},
        ),
    ],
)
def test_more_forms_are_read(tmp_path: Path, name: str, text: str, wanted: dict[str, Any]) -> None:
    (tmp_path / "a.toml").write_text(
        "[training]\ntensor_parallel_degree = 2\npipeline_parallel_degree = 2\nseq_len = 64\nbatch_size = 1\n"
        "[job]\ndescription = 'x'\n[activation_checkpoint]\nmode = 'full'\n"
    )
    c = _read(tmp_path, text, name)
    assert {field: getattr(c.layout, field) for field in wanted} == wanted
    assert "swift" not in text or c.options["lora"] == 8


def test_a_missing_file_of_any_name_is_asked_for(tmp_path: Path) -> None:
    line = f"torchrun --nproc_per_node 2 pretrain_gpt.py {_MEGATRON} --deepspeed --deepspeed_config z3.config"
    assert "z3.config" in _read(tmp_path, line).missing[0]
    (tmp_path / "run.sh").write_text(
        f"torchrun --nproc_per_node 2 pretrain_gpt.py {_MEGATRON} --global-batch-size $B"
    )
    assert "global-batch-size is $B" in text_of(tmp_path, "read run.sh")


def test_workers_of_ray_are_ranks(tmp_path: Path) -> None:
    text = "finetuning_type: lora\nper_device_train_batch_size: 1\nray_num_workers: 4\ncutoff_len: 64\n"
    assert _read(tmp_path, text, "a.yaml").layout.world == 4


@pytest.mark.parametrize(
    ("text", "wanted", "absent"),
    [
        (
            "base_model: Qwen/Qwen2.5-1.5B\nmicro_batch_size: 1\ngradient_accumulation_steps: 8\nsequence_len: 1024\n"
            "bf16: true\ngradient_checkpointing: true\nfsdp: [full_shard]\nfsdp_config: {fsdp_version: 2}\n",
            {"micro_batch_size", "gradient_checkpointing"},
            {"per_device_train_batch_size", "fsdp_config.fsdp_activation_checkpointing"},
        ),
        (
            "model_name_or_path: Qwen/Qwen2.5-1.5B\nfinetuning_type: full\nper_device_train_batch_size: 1\n"
            "gradient_accumulation_steps: 8\ncutoff_len: 1024\nbf16: true\n",
            {"disable_gradient_checkpointing", "per_device_train_batch_size"},
            {"gradient_checkpointing"},
        ),
    ],
)
def test_a_change_is_named_by_the_key_that_the_file_has(
    text: str, wanted: set[str], absent: set[str], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    changes = json_of(tmp_path, "plan --from a.yaml --cluster dgx-h100 --gpus 8 --json")["changes"]
    keys = {edit["key"] for change in changes for edit in change["settings"]}
    assert wanted <= keys
    assert not absent & keys


def test_a_file_that_stands_in_a_folder_only_a_run_knows_is_no_bag_of_flags(tmp_path: Path) -> None:
    (tmp_path / "config_small.yaml").write_text(
        "parallelism: {dp: 4, tp: 2, pp: 1}\ntokens: {micro_batch_size: 3, sequence_length: 32}\n"
    )
    text = 'HERE=$(cd "$(dirname "$0")"; pwd -P)\ntorchrun --nproc_per_node 8 run_train.py '
    text += "--config-file $HERE/config_small.yaml"
    assert _read(tmp_path, text).layout.tp == 2


def test_a_job_of_hyperpod_lists_its_pods(tmp_path: Path) -> None:
    text = (
        "apiVersion: sagemaker.amazonaws.com/v1\nkind: HyperPodPyTorchJob\nspec:\n  nprocPerNode: '8'\n"
        "  replicaSpecs:\n"
        "  - name: pods\n    replicas: 4\n    template: {spec: {containers: [{name: a, command: [torchrun,"
        f" --nproc_per_node=8, --nnodes=4, pretrain_gpt.py, {', '.join(_MEGATRON.split())}]}}]}}}}\n"
    )
    c = _read(tmp_path, text, "job.yaml")
    assert (c.layout.world, c.layout.tp) == (32, 2)


def test_a_level_that_a_flag_says_is_priced_without_its_file(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"torchrun --nproc_per_node 4 pretrain_gpt.py {_MEGATRON} --seq-length 64 --max-position-embeddings 64 "
        "--vocab-size 512 --deepspeed --deepspeed_config z1.config --zero-stage 1"
    )
    said = text_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-a100")
    assert "z1.config, its deepspeed_config, is not here: give it too" in said
    assert "zero=1" in said
