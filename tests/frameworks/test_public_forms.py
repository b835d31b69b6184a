"""Forms of public threads that were read wrongly, shortened: what each starts, and what is refused by its name."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(("fsdp", "zero"), [({}, None), ({"fsdp": ""}, None), ({"fsdp": "shard_grad_op"}, 2)])
def test_arguments_of_a_trainer_that_name_no_sharding_leave_it_open(
    fsdp: dict[str, str], zero: int | None, tmp_path: Path
) -> None:
    """The launcher's file may say it."""
    arguments = {"per_device_train_batch_size": 2, "bf16": True, "output_dir": "x", **fsdp}
    assert _read(tmp_path, json.dumps(arguments), "a.json").layout.zero == zero


def test_adapters_of_ms_swift_under_megatron_are_read(tmp_path: Path) -> None:
    line = "NPROC_PER_NODE=8 megatron sft --train_type lora --lora_rank 16 --tensor_model_parallel_size 2"
    c = _read(tmp_path, line)
    assert (c.stack, c.options["lora"], c.layout.tp) == ("megatron-bridge", 16, 2)
    assert "lora" not in _read(tmp_path, line.replace("--train_type lora --lora_rank 16", "")).options


def test_the_ranks_of_a_log_are_read(tmp_path: Path) -> None:
    dump = {"world_size": 16, "tensor_model_parallel_size": 2, "num_layers": 4, "hidden_size": 64, "bf16": True}
    dump |= {"micro_batch_size": 1, "seq_length": 64, "num_attention_heads": 4, "lr": 0.1, "swiglu": True}
    c = _read(tmp_path, "".join(f"  {name} ............ {value}\n" for name, value in dump.items()), "log.txt")
    assert (c.layout.world, c.layout.dp) == (16, 8)


def test_settings_tell_the_framework_of_a_program_that_is_given_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("finetuning_type: full\nper_device_train_batch_size: 2\ndeepspeed: z3.json\n")
    c = _read(tmp_path, "torchrun --nproc_per_node 8 src/train.py s.yaml")
    assert (c.kind, c.layout.world, c.layout.micro_batch, c.layout.recompute) == ("hf", 8, 2, "full")


def test_the_log_of_an_early_megatron_is_read_by_its_own_names(tmp_path: Path) -> None:
    dump = {"world_size": 16, "model_parallel_size": 2, "num_layers": 4, "hidden_size": 64, "fp16": True}
    dump |= {"batch_size": 8, "seq_length": 64, "num_attention_heads": 4, "lr": 0.1, "max_position_embeddings": 64}
    text = "".join(f"  {name} ............ {value}\n" for name, value in dump.items())
    c = _read(tmp_path, f"{text} > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)\n", "log.txt")
    assert (c.layout.tp, c.layout.dp, c.layout.micro_batch, c.not_modelled) == (2, 8, 8, {})
    assert c.spec is not None
    assert c.spec.vocab == 50432


@pytest.mark.parametrize(
    ("flags", "vocab"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50257),
        ("--vocab-file v.json --merge-file m.txt", 50257),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B-Instruct", 128256),
        ("--tokenizer-type GPT2BPETokenizer --vocab-size 100", 100),
    ],
)
def test_a_tokenizer_of_one_vocabulary_says_it(tmp_path: Path, flags: str, vocab: int) -> None:
    c = _read(tmp_path, f"torchrun --nproc_per_node 4 pretrain_gpt.py {_MEGATRON} --seq-length 64 {flags}")
    assert c.spec is not None
    assert c.spec.vocab == vocab
    assert any("as that of its tokenizer" in note for note in c.notes) == (vocab != 100)


def test_recomputation_that_offloads_is_recomputation(tmp_path: Path) -> None:
    c = _read(tmp_path, "base_model: x\nmicro_batch_size: 1\ngradient_checkpointing: unsloth\n", "a.yaml")
    assert c.layout.recompute == "full"


_FULL = (
    "model_name_or_path: meta-llama/Meta-Llama-3-8B\nfinetuning_type: full\ncutoff_len: 1024\nfp16: true\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\n"
)


def test_an_update_takes_memory(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#5977: 8B at level 3 is out of memory on 8 x 24 GB. A rank's 1.0e9 elements take 16 bytes
    of state; their gradients in fp32 4 more, and the roots of torch's AdamW 4, unless a kernel fuses them."""
    (tmp_path / "z3.json").write_text('{"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}')
    n = 8_030_261_248 / 8

    def answer(settings: str) -> dict[str, Any]:
        (tmp_path / "a.yaml").write_text(settings)
        return json_of(tmp_path, "predict a.yaml --cluster pcie-rtx3090 --gpus 8 --json")

    plain = answer(f"{_FULL}deepspeed: z3.json\n")
    fused = answer(f"{_FULL}deepspeed: z3.json\noptim: adamw_torch_fused\n")
    assert (plain["fits"], fused["fits"]) == (False, True)
    assert plain["memory_terms"]["update"] == 8 * 1e9  # a sub-group at a time
    assert plain["memory_terms"]["state"] == pytest.approx(16 * n, rel=1e-3)
    assert fused["memory_terms"]["update"] == 0


def test_an_engine_in_the_settings_of_accelerate_offloads(tmp_path: Path) -> None:
    engine = "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu, offload_param_device: none}"
    c = _read(tmp_path, f"distributed_type: DEEPSPEED\nnum_processes: 2\n{engine}\n", "a.yaml")
    assert (c.options["optimizer_offload"], "parameter_offload" in c.options) == (1.0, False)


def test_what_is_learned_from_preferences_alone_is_another_objective(tmp_path: Path) -> None:
    c = _read(tmp_path, "torchrun nash.py --model_name_or_path x --beta 0.1 --per_device_train_batch_size 1")
    assert "another objective" in c.not_modelled["args.beta"].what
    c = _read(tmp_path, "NPROC_PER_NODE=2 swift rlhf --rlhf_type gkd --model x")
    assert "another objective" in c.not_modelled["args.rlhf_type"].what


@pytest.mark.parametrize(
    ("name", "text", "reference"),
    [
        ("a.yaml", "stage: dpo\nfinetuning_type: full\nper_device_train_batch_size: 2\n", "copy"),
        ("a.yaml", "stage: dpo\nfinetuning_type: lora\nper_device_train_batch_size: 2\n", "base"),
        ("a.yaml", "stage: dpo\npref_loss: simpo\nfinetuning_type: full\nper_device_train_batch_size: 2\n", None),
        ("a.yaml", "base_model: x\nrl: dpo\nmicro_batch_size: 2\n", "copy"),
        ("a.yaml", "base_model: x\nrl: orpo\nmicro_batch_size: 2\n", None),
        ("run.sh", "torchrun scripts/run_dpo.py --beta 0.1 --per_device_train_batch_size 2 --bf16", "copy"),
        ("run.sh", "trl dpo --model_name_or_path x --per_device_train_batch_size 2 --use_peft", "base"),
        ("run.sh", "trl dpo --model_name_or_path x --per_device_train_batch_size 2 --reference_free true", None),
        ("run.sh", "swift rlhf --rlhf_type dpo --train_type full --per_device_train_batch_size 2 --model x", "copy"),
        (
            "train.py",
            "from trl import DPOConfig, DPOTrainer\n"
            "a = DPOConfig(output_dir='o', per_device_train_batch_size=2)\nDPOTrainer(m, r, args=a).train()\n",
            "copy",
        ),
    ],
)
def test_examples_of_preferences_are_pairs(tmp_path: Path, name: str, text: str, reference: str | None) -> None:
    c = _read(tmp_path, text, name)
    assert (c.layout.micro_batch, c.options.get("reference")) == (4, reference)
    assert any("pair of sequences" in note for note in c.notes)
    assert not c.not_modelled


def test_an_optimizer_of_8_bits_has_small_moments_and_another_has_no_price(tmp_path: Path) -> None:
    assert _read(tmp_path, f"{_FULL}optim: paged_adamw_8bit\n", "a.yaml").options["second_moment"] == "float8"
    assert _read(tmp_path, f"{_FULL}optim: adafactor\n", "a.yaml").not_modelled.keys() == {"optim"}


def test_gradients_that_accumulate_under_no_sync_are_whole_and_in_16_bits(tmp_path: Path) -> None:
    """replicate/cog-llama#6: 13B trains on 4 x 80 GB: 16 bytes over 4 ranks and 2 whole, for each parameter."""
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node=4 t.py --model_name_or_path huggyllama/llama-13b --bf16 True "
        "--model_max_length 64 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 "
        "--gradient_checkpointing True --fsdp 'full_shard auto_wrap' "
        "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --output_dir o"
    )
    answer = json_of(tmp_path, "predict run.sh --cluster dgx-a100 --json")
    assert answer["fits"]
    assert answer["memory_terms"]["state"] == pytest.approx(13_015_864_320 * (16 / 4 + 2), rel=1e-3)


def test_what_a_missing_file_would_say_is_no_mistake(tmp_path: Path) -> None:
    """Neither ZeRO's level nor the type: the files of accelerate and of TRL's arguments are not here."""
    (tmp_path / "run.sh").write_text("accelerate launch --config_file a.yaml grpo.py --config r.yaml --bf16")
    c, config = files.read([tmp_path / "run.sh"])
    assert [name.partition(",")[0] for name in c.missing] == ["r.yaml", "a.yaml"]
    assert (c.unknown, lint(config, c), c.job["compute"]) == ({}, [], "bf16")
    assert "zero=0" not in text_of(tmp_path, "read", "run.sh")


def test_maxtext_recomputes_unless_it_is_told_otherwise() -> None:
    stated = {"ici_fsdp_parallelism": 4, "per_device_batch_size": 1}
    assert files.READERS["maxtext"](stated, None).layout.recompute == "full"
    assert files.READERS["maxtext"](stated | {"remat_policy": "minimal"}, None).layout.recompute == "minimal"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "vllm serve a/b -tp 2", "phalanx serve plan --from"),
        ("a.sh", "python -m sglang.launch_server --model a/b", "phalanx serve plan --from"),
        ("a.yaml", "servingEngineSpec:\n  modelSpec: []\n", "phalanx serve plan --from"),
        ("a.sh", "torchrun convert_hf.py --tensor-model-parallel-size 2 --bf16", "trains nothing"),
        ("a.sh", "colossalai run --nproc_per_node 8 b.py --tp 4", "Colossal-AI"),
        ("a.sh", "torchrun train_sft.py --strategy colossalai_zero2", "Colossal-AI"),
        ("a.sh", "composer train.py a.yaml", "llm-foundry"),
        ("a.yaml", "device_train_microbatch_size: 8\nfsdp_config: {}\n", "llm-foundry"),
        ("a.sh", "python deepy.py train.py configs/13B.yml configs/local.yml\n", "GPT-NeoX"),
        ("a.toml", "max_steps = 1\nseq_len = 2\n[ckpt]\n[model]\n", "prime-rl"),
        ("a.yaml", "loader: {}\nsharding: {}\nbase_config: {}\nmixture: {}\nactions: []\n", "EasyDeL"),
        ("a.yaml", "model: {}\ntrainer: {mp: p}\ninitialize_from_hf: true\n", "Levanter"),
        ("a.yaml", "model: x\ndist_config: {name: fsdp2}\ntrain_dataset: y\n", "v1"),
        ("a.yaml", "model_name_or_path: x\nexport_dir: y\n", "trains nothing"),
        ("a.sh", "torchrun src/scripts/train/OLMo3-7B.py --num_gpus 8\n", "OLMo-core"),
        ("a.sh", "python mason.py --cluster x -- accelerate launch a.py\n", "Beaker"),
        ("a.sh", "torchrun --no_python fast-llm train gpt --config c.yaml", "Fast-LLM"),
        ("a.sh", 'python -c "import x" --tensor-model-parallel-size 2', "starts no training"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert said in error_of(tmp_path, "read", name)


def test_the_pipeline_engine_takes_no_zero_above_1(tmp_path: Path) -> None:
    """bigscience-workshop/Megatron-DeepSpeed#407."""
    line = f"torchrun --nproc_per_node 4 pretrain_gpt.py {_MEGATRON} --deepspeed --zero-stage"
    for more, named in (("3", True), ("1", False), ("3 --no-pipeline-parallel", False)):
        (tmp_path / "run.sh").write_text(f"{line} {more}")
        c, config = files.read([tmp_path / "run.sh"])
        assert ("pipelined-zero" in {mistake.name for mistake in lint(config, c)}) is named


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
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


def test_nemo_rl_reads_the_files_that_it_inherits_from_and_its_enabled_trainer(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "root.yaml").write_text(
        "policy:\n  model_name: Qwen/Qwen2.5-1.5B\n  train_micro_batch_size: 4\n  train_global_batch_size: 64\n"
        "  max_total_sequence_length: 512\n  precision: bfloat16\n"
        "  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, context_parallel_size: 1,"
        " activation_checkpointing: false, lora_cfg: {enabled: true, dim: 16}}\n"
        "  megatron_cfg: {enabled: false, tensor_model_parallel_size: 4, recompute_granularity: full,"
        " activation_checkpointing: false}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    (tmp_path / "deep" / "middle.yaml").write_text("defaults: ../root.yaml\ncluster: {num_nodes: 2}\n")
    c = _read(tmp_path, "defaults: deep/middle.yaml\npolicy: {train_micro_batch_size: 2}\n", "a.yaml")
    assert (c.layout.world, c.layout.tp, c.layout.zero, c.layout.micro_batch) == (16, 1, 3, 2)
    assert (c.stack, c.layout.recompute, c.options["lora"]) == ("accelerate", "none", 16)
    other = "defaults: [root.yaml]\npolicy: {dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true}}\n"
    c = _read(tmp_path, other, "b.yaml")
    assert (c.stack, c.layout.tp, c.layout.recompute) == ("megatron-bridge", 4, "none")
    missing = _read(tmp_path, "defaults: [gone.yaml]\npolicy: {train_micro_batch_size: 2}\n", "c.yaml").missing
    assert missing == ("gone.yaml, its base, is not here: give it too",)
    (tmp_path / "d.yaml").write_text("defaults: d.yaml\npolicy: {train_micro_batch_size: 2}\n")
    assert "include itself" in error_of(tmp_path, "read d.yaml")


def test_keys_of_bridge_without_size_or_precision_lie_over_a_recipe(tmp_path: Path) -> None:
    c = _read(
        tmp_path,
        "model: {tensor_model_parallel_size: 2}\ntrain: {micro_batch_size: 1}\noptimizer: {lr: 0.1}\n",
        "a.yaml",
    )
    assert (c.layout.tp, c.layout.precision, c.layout.zero) == (2, None, None)
    assert any("recipe" in note for note in c.notes)


def test_experts_of_nanotron_are_of_its_model(tmp_path: Path) -> None:
    sizes = "hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4, vocab_size: 256"
    text = (
        "parallelism: {dp: 2, tp: 1, pp: 1}\ntokens: {micro_batch_size: 1, sequence_length: 32,"
        " batch_accumulation_per_replica: 1}\nmodel:\n  model_config: {is_qwen2_config: true, "
    )
    experts = ", moe_config: {num_experts: 4, top_k: 1, moe_intermediate_size: 32, enable_shared_expert: true,"
    c = _read(tmp_path, f"{text}{sizes}{experts} layers: [1, 2]}}}}\n", "a.yaml")
    assert c.spec is not None
    assert c.spec.experts is not None
    x = c.spec.experts
    assert (x.count, x.top_k, x.ffn, x.shared_ffn, x.shared_gate, x.dense_layers) == (4, 1, 32, 5632, True, (0, 3))


def test_another_objective_of_ms_swift_is_said(tmp_path: Path) -> None:
    c = _read(tmp_path, "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --tensor_model_parallel_size 2 --model a/b")
    assert c.not_modelled["args.rlhf_type"].changes == ("model",)
    lora = "NPROC_PER_NODE=8 megatron sft --tuner_type lora --model Qwen/Qwen3-8B --max_length 64"
    (tmp_path / "b.sh").write_text(lora)
    assert "does not run it" not in text_of(tmp_path, "predict b.sh --cluster dgx-h100")


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


_NEOX = """{
  # sizes
  "pipe_parallel_size": 4,
  "model_parallel_size": 2,
  "num_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
  "seq_length": 2048, "max_position_embeddings": 2048,
  "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": true, "gpt_j_residual": true,
}
"""
_NEOX_REST = """{
  "vocab_file": "./20B_checkpoints/20B_tokenizer.json",
  "zero_optimization": {"stage": 1, "overlap_comm": True,}, # of Python
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint_activations": true, "fp16": {"enabled": true},
  "train_impl": "dpo",
}
"""


def test_files_of_gpt_neox_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text(_NEOX_REST)
    alone = _read(tmp_path, _NEOX, "a.yml")
    assert (alone.layout.tp, alone.layout.pp, alone.layout.zero, alone.layout.precision) == (2, 4, None, None)
    assert alone.spec is None
    c = files.read([tmp_path / "a.yml", tmp_path / "b.yml"], world=96)[0]
    assert (c.layout.dp, c.layout.zero, c.layout.micro_batch, c.layout.accumulation) == (12, 1, 4, 32)
    assert (c.stack, c.layout.recompute, c.options["attention"]) == ("megatron-deepspeed-2022", "full", "unfused")
    assert c.spec is not None
    assert c.spec.residual == "parallel"
    assert c.spec.parameter_count == 20_554_567_680  # Black et al. 2022, table 1
    assert c.not_modelled["train_impl"].changes == ("model",)


def test_a_gate_of_gpt_neox_divides_its_width_by_three(tmp_path: Path) -> None:
    text = _NEOX.replace("}\n", '  "norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 55296,\n}\n')
    text = text.replace(
        "}\n", '  "num_kv_heads": 8, "vocab_file": "gpt2-vocab.json", "use_bias_in_attn_linear": false,\n}\n'
    )
    c = _read(tmp_path, text.replace('"gpt_j_residual": true', '"gpt_j_residual": false'), "a.yml")
    assert c.spec is not None
    assert (c.spec.ffn, c.spec.kv_heads, c.spec.activation, c.spec.norm, c.spec.residual) == (
        18432, 8, "swiglu", "rms", "serial",
    )  # fmt: skip
    assert "experts" in _read(tmp_path, text.replace("{\n", '{\n  "moe_num_experts": 4,\n', 1), "b.yml").open_model


def test_a_file_that_stands_in_a_folder_only_a_run_knows_is_no_bag_of_flags(tmp_path: Path) -> None:
    (tmp_path / "config_small.yaml").write_text(
        "parallelism: {dp: 4, tp: 2, pp: 1}\ntokens: {micro_batch_size: 3, sequence_length: 32}\n"
    )
    text = 'HERE=$(cd "$(dirname "$0")"; pwd -P)\ntorchrun --nproc_per_node 8 run_train.py '
    text += "--config-file $HERE/config_small.yaml"
    assert _read(tmp_path, text).layout.tp == 2


def test_flags_as_keys_of_megatron_s_tests_are_read(tmp_path: Path) -> None:
    text = (
        "ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}\nTEST_TYPE: regular\nMODEL_ARGS:\n"
        "  --tensor-model-parallel-size: 2\n"
        "  --bf16: true\n  --sequence-parallel: false\n  --micro-batch-size: 2\n"
    )
    c = _read(tmp_path, text, "model_config.yaml")
    assert (c.kind, c.layout.tp, c.layout.sp, c.layout.precision, c.layout.micro_batch) == (
        "megatron",
        2,
        False,
        "bf16",
        2,
    )


def test_a_job_of_hyperpod_lists_its_pods(tmp_path: Path) -> None:
    text = (
        "apiVersion: sagemaker.amazonaws.com/v1\nkind: HyperPodPyTorchJob\nspec:\n  nprocPerNode: '8'\n"
        "  replicaSpecs:\n"
        "  - name: pods\n    replicas: 4\n    template: {spec: {containers: [{name: a, command: [torchrun,"
        f" --nproc_per_node=8, --nnodes=4, pretrain_gpt.py, {', '.join(_MEGATRON.split())}]}}]}}}}\n"
    )
    c = _read(tmp_path, text, "job.yaml")
    assert (c.layout.world, c.layout.tp) == (32, 2)


def test_recomputation_of_a_program_that_is_not_llama_factory_is_its_own(tmp_path: Path) -> None:
    c = _read(tmp_path, "torchrun train.py --per_device_train_batch_size 8 --dataset_dir x --max_seq_length 64")
    assert c.layout.recompute is None
    c = _read(tmp_path, "swift sft --model Qwen/Qwen3-8B --gradient_checkpointing false --max_length 64")
    assert c.layout.recompute is None
    c = _read(tmp_path, "swift sft --model Qwen/Qwen3-8B --max_length 64")
    assert (c.layout.recompute, c.understood["args.gradient_checkpointing"]) == ("full", "strategy.recompute")


def test_deepspeed_chat_offloads_what_its_level_shards(tmp_path: Path) -> None:
    line = "deepspeed main.py --per_device_train_batch_size 8 --zero_stage {} --offload --deepspeed"
    for stage, param in ((2, "none"), (3, "cpu")):
        assert _read(tmp_path, line.format(stage)).layout.offload == {"optimizer": "cpu", "param": param}


def test_pairs_of_nemo_rl_are_two_sequences(tmp_path: Path) -> None:
    text = (
        "policy: {train_micro_batch_size: 2, train_global_batch_size: 16, dtensor_cfg: {enabled: true,"
        " tensor_parallel_size: 1}}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    for key, micro, whole in (("dpo", 4, 32), ("rm", 4, 32), ("sft", 2, 16)):
        c = _read(tmp_path, f"{text}{key}: {{max_num_steps: 1}}\n", "a.yaml")
        assert (c.layout.micro_batch, c.layout.global_batch) == (micro, whole)


def test_the_text_part_of_a_model_of_images_is_said(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-VL-4B-Instruct\nfinetuning_type: lora\nper_device_train_batch_size: 1\n"
    (tmp_path / "a.yaml").write_text(text)
    assert "its images are not priced" in text_of(tmp_path, "read a.yaml")


def test_training_that_keeps_nothing_in_fp32_is_priced_so(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: full\nper_device_train_batch_size: 1\ncutoff_len: 512\n"
    )
    (tmp_path / "half.yaml").write_text(f"{text}bf16: true\n")
    (tmp_path / "pure.yaml").write_text(f"{text}pure_bf16: true\n")
    half, pure = (
        json_of(tmp_path, f"predict {name}.yaml --cluster dgx-h100 --gpus 1 --json")["memory_bytes"]
        for name in ("half", "pure")
    )
    assert pure < 0.7 * half
    assert _read(tmp_path, f"{text}pure_bf16: true\n", "b.yaml").layout.precision == "bf16"
