"""Files of public threads that fine-tune, shortened: of the Trainer and of the programs around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of, text_of

from phalanx.answers.question.read import origins
from phalanx.answers.question.read import read as reading_of
from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files
from phalanx.frameworks.registry import STACKS
from phalanx.planning import lookup
from phalanx.planning.search.stack_options import _sets


def _read(tmp_path: Path, text: str, name: str = "run.sh") -> Configuration:
    (tmp_path / name).write_text(text)
    return files.read([tmp_path / name])[0]


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


@pytest.mark.parametrize("program", ["swift", "megatron"])
@pytest.mark.parametrize(
    ("said", "precision"),
    [
        ("", "bf16"),
        ("--torch_dtype bfloat16", "bf16"),
        ("--torch_dtype float16", "fp16"),
        ("--torch_dtype float32", "fp16"),
        ("--torch_dtype float32 --bf16 true", "bf16"),
    ],
)
def test_mixed_precision_of_ms_swift_follows_the_loaded_weights(
    said: str, precision: str, program: str, tmp_path: Path
) -> None:
    """swift/arguments/base_args/model_args.py:130."""
    assert (
        _read(tmp_path, f"NPROC_PER_NODE=8 {program} sft --model Qwen/Qwen2-7B {said}").layout.precision == precision
    )


def test_recomputation_that_offloads_is_recomputation(tmp_path: Path) -> None:
    c = _read(tmp_path, "base_model: x\nmicro_batch_size: 1\ngradient_checkpointing: unsloth\n", "a.yaml")
    assert c.layout.recompute == "full"


_FULL = (
    "model_name_or_path: meta-llama/Meta-Llama-3-8B\nfinetuning_type: full\ncutoff_len: 1024\nfp16: true\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\n"
)


def test_an_update_takes_memory(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#5977: 8B at level 3 is out of memory on 8 x 24 GB. A rank's 1.0e9 elements take 16 bytes
    of state; their gradients in fp32 4 more, and the roots of torch's AdamW 4, unless a kernel fuses them: then the
    copy from which they are cast is the most, of 2."""
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
    assert fused["memory_terms"]["update"] == 6 * 1e9


def test_an_engine_in_the_settings_of_accelerate_offloads(tmp_path: Path) -> None:
    engine = "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu, offload_param_device: none}"
    c = _read(tmp_path, f"distributed_type: DEEPSPEED\nnum_processes: 2\n{engine}\n", "a.yaml")
    assert (c.options["optimizer_offload"], "parameter_offload" in c.options) == (1.0, False)


@pytest.mark.parametrize("away", [True, False])
def test_fsdp_offloads_whichever_of_its_files_says_so(away: bool, tmp_path: Path) -> None:
    """The words of --fsdp, its table, and accelerate's; with the gradients and the update on the host too."""
    line = "torchrun --nproc_per_node 8 t.py --bf16 --per_device_train_batch_size 2 --fsdp"
    words = _read(tmp_path, f"{line} 'full_shard auto_wrap{' offload' * away}'")
    table = {"fsdp": True, "fsdp_config": {"offload_params": away}, "bf16": True, "per_device_train_batch_size": 2}
    launched = f"distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {{fsdp_offload_params: {away}}}\n"
    others = (_read(tmp_path, json.dumps(table), "a.json"), _read(tmp_path, launched, "a.yaml"))
    held = ("optimizer_offload", "parameter_offload")
    for c in (words, *others):
        assert [c.options.get(name) for name in held] == ([1.0, True] if away else [None, None])
    if away:
        assert {origins(words)[name] for name in ("offload", *held)} == {"fsdp"}
        assert {origins(others[1])[name] for name in held} == {"fsdp_config.fsdp_offload_params"}


@pytest.mark.parametrize(("words", "offload"), [("auto_wrap", False), ("auto_wrap offload", True), ("offload", True)])
def test_fsdp_without_a_strategy_shards_all(words: str, offload: bool, tmp_path: Path) -> None:
    """princeton-nlp/ProLong issue 9: --fsdp "auto_wrap offload" is accelerate's FULL_SHARD, and no replicas."""
    line = "torchrun --nproc_per_node 8 t.py --bf16 --per_device_train_batch_size 2 --fsdp"
    c = _read(tmp_path, f"{line} '{words}'")
    assert (c.layout.zero, c.options.get("parameter_offload", False)) == (3, offload)


@pytest.mark.parametrize(("nodes", "each"), [(1, 8), (4, 8), (2, 4)])
@pytest.mark.parametrize("hybrid", [True, False])
def test_hybrid_sharding_is_over_the_ranks_of_a_node(nodes: int, each: int, hybrid: bool, tmp_path: Path) -> None:
    """Of FSDP1, without a mesh of its own (torch/distributed/fsdp/_init_utils.py)."""
    word, batch = "hybrid_shard" if hybrid else "full_shard", "--per_device_train_batch_size 1"
    line = f"torchrun --nnodes {nodes} --nproc_per_node {each} t.py --bf16 --fsdp '{word} auto_wrap' {batch}"
    words = _read(tmp_path, line).layout
    counts = f"num_machines: {nodes}\nnum_processes: {nodes * each}\n"
    table = f"fsdp_config: {{fsdp_sharding_strategy: {word.upper()}}}\n"
    launched = _read(tmp_path, f"distributed_type: FSDP\n{counts}{table}", "a.yaml").layout
    for layout in (words, launched):
        assert (layout.zero, layout.shard) == (3, each if hybrid and nodes > 1 else None)


def test_hybrid_sharding_over_nodes_of_an_unknown_size_is_said(tmp_path: Path) -> None:
    c = _read(tmp_path, "srun -n 32 python t.py --bf16 --per_device_train_batch_size 1 --fsdp hybrid_shard")
    assert c.layout.shard is None
    assert any("ranks of a node are not said" in note for note in c.notes)


def test_an_engine_that_a_program_spells_out_is_read(tmp_path: Path) -> None:
    """As a dictionary of its TrainingArguments, in a program that a launcher starts."""
    engine = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    made = f"args = TrainingArguments('out', bf16=True, per_device_train_batch_size=2, deepspeed={engine})"
    (tmp_path / "t.py").write_text(f"{made}\nTrainer(args=args)")
    alone = files.read([tmp_path / "t.py"])[0]
    launched = _read(tmp_path, "accelerate launch --num_processes 8 t.py")
    for c in (alone, launched):
        assert (c.layout.zero, c.options["optimizer_offload"], c.stack) == (2, 1.0, "deepspeed")
        assert not c.not_modelled


def test_a_models_file_beside_anothers_is_no_key_of_it(tmp_path: Path) -> None:
    model = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model | {"intermediate_size": 128, "vocab_size": 512}))
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {}\n")
    c = files.read([tmp_path / "a.yaml", tmp_path / "config.json"])[0]
    assert c.unknown == {}
    assert c.spec is not None


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


def test_another_objective_of_ms_swift_is_said(tmp_path: Path) -> None:
    c = _read(tmp_path, "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --tensor_model_parallel_size 2 --model a/b")
    assert c.not_modelled["args.rlhf_type"].changes == ("model",)
    lora = "NPROC_PER_NODE=8 megatron sft --tuner_type lora --model Qwen/Qwen3-8B --max_length 64"
    (tmp_path / "b.sh").write_text(lora)
    assert "does not run it" not in text_of(tmp_path, "predict b.sh --cluster dgx-h100")


def test_recomputation_of_a_program_that_is_not_llama_factory_is_its_own(tmp_path: Path) -> None:
    c = _read(tmp_path, "torchrun train.py --per_device_train_batch_size 8 --dataset_dir x --max_seq_length 64")
    assert c.layout.recompute is None
    c = _read(tmp_path, "swift sft --model Qwen/Qwen3-8B --gradient_checkpointing false --max_length 64")
    assert c.layout.recompute is None
    c = _read(tmp_path, "swift sft --model Qwen/Qwen3-8B --max_length 64")
    assert (c.layout.recompute, c.understood["args.gradient_checkpointing"]) == ("full", "strategy.recompute")


def test_sequences_of_ms_swift_are_divided_among_ranks(tmp_path: Path) -> None:
    """modelscope/ms-swift issue 4360: a quarter of the tokens on a rank, whose heads are exchanged."""
    line = "NPROC_PER_NODE=8 swift sft --train_type full --model Qwen/Qwen3-14B --deepspeed zero3 --max_length 32768"
    spread = " --sequence_parallel_size 4"
    whole, parts = (_read(tmp_path, f"{line} --attn_impl flash_attn{more}") for more in ("", spread))
    assert (whole.layout.dp, whole.layout.cp) == (8, None)
    assert (parts.layout.dp, parts.layout.cp, parts.layout.ulysses) == (2, 4, 4)
    assert parts.layout.global_batch == 2
    assert parts.options["attention"] == whole.options["attention"] == "flash2"
    (tmp_path / "run.sh").write_text(f"{line}{spread}")
    said = text_of(tmp_path, "predict run.sh --cluster dgx-h100")
    assert "sequence_parallel_size is all of Ulysses" in said


def test_deepspeed_chat_offloads_what_its_level_shards(tmp_path: Path) -> None:
    line = "deepspeed main.py --per_device_train_batch_size 8 --zero_stage {} --offload --deepspeed"
    for stage, param in ((2, "none"), (3, "cpu")):
        assert _read(tmp_path, line.format(stage)).layout.offload == {"optimizer": "cpu", "param": param}


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


def test_deepspeed_keeps_weights_in_fp32_beside_those_that_train_in_bf16_alone(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: full\nper_device_train_batch_size: 1\ncutoff_len: 512\n"
    )
    text += "deepspeed: examples/deepspeed/ds_z3_config.json\n"
    state = {}
    for kept in ("bf16", "pure_bf16"):
        (tmp_path / "a.yaml").write_text(f"{text}{kept}: true\n")
        answer = json_of(tmp_path, "predict a.yaml --cluster dgx-h100 --gpus 8 --json")
        state[kept] = answer["memory_terms"]["state"]
    assert state["pure_bf16"] == state["bf16"]


def test_an_empty_list_of_a_layout_is_none(tmp_path: Path) -> None:
    """The dump of a Trainer's arguments has `fsdp=[]` where DeepSpeed shards."""
    engine = '{"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}'
    (tmp_path / "z3.json").write_text(engine)
    lines = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "bf16": True,
        "fsdp": [],
        "tf32": None,
    }
    dump = "".join(f"{name}={value},\n" for name, value in (lines | {"deepspeed": "z3.json"}).items())
    c = _read(tmp_path, f"12:00 - INFO - parameters TrainingArguments(\n{dump})\n", "log.txt")
    assert (c.layout.zero, c.layout.micro_batch, c.not_modelled) == (3, 2, {})


def test_the_log_of_deepspeed_prints_its_file(tmp_path: Path) -> None:
    mark = "[2025-11-03 10:00:00,000] [INFO] [config.py:1007:print]   "
    text = "".join(f"{mark}{name} ............. 1\n" for name in ("zero_enabled", "world_size", "bfloat16_enabled"))
    text += f'{mark}json = {{\n    "train_batch_size": 128, \n    "train_micro_batch_size_per_gpu": 2, \n'
    text += '    "zero_optimization": {\n        "stage": 2\n    }, \n    "bf16": {\n        "enabled": true\n    }\n'
    text += "}\n[x] step\n"
    c = _read(tmp_path, text, "log.txt")
    assert (c.kind, c.layout.zero, c.layout.micro_batch, c.layout.precision) == ("deepspeed", 2, 2, "bf16")


def test_settings_that_wandb_kept_are_read_where_they_are_pasted(tmp_path: Path) -> None:
    values = {"per_device_train_batch_size": 2, "bf16": "true", "fsdp": "[full_shard, auto_wrap]", "output_dir": "o"}
    text = "wandb_version: 1\n" + "".join(f"{n}:\n  desc: null\n  value: {v}\n" for n, v in values.items())
    for name in ("config.yaml", "pasted.txt"):
        c = _read(tmp_path, text, name)
        assert (c.kind, c.layout.zero, c.layout.micro_batch) == ("hf", 3, 2)


@pytest.mark.parametrize(
    ("name", "zero", "world"),
    [
        ("examples/accelerate_configs/deepspeed_zero3.yaml", 3, 8),
        ("../trl/accelerate_configs/fsdp2.yaml", 3, 8),
        ("recipes/accelerate_configs/zero2.yaml", 2, 8),
        ("examples/accelerate_configs/single_gpu.yaml", 0, 1),
    ],
)
def test_files_of_accelerate_that_trl_ships_are_known_by_their_paths(
    name: str, zero: int, world: int, tmp_path: Path
) -> None:
    flags = "sft.py --per_device_train_batch_size 2 --max_length 64 --model_name_or_path Qwen/Qwen3-8B"
    c = _read(tmp_path, f"accelerate launch --config_file {name} {flags}")
    assert (c.layout.zero, c.layout.world, c.layout.precision, c.missing) == (zero, world, "bf16", ())
    assert any("is not here: it is taken as that of huggingface/trl" in note for note in c.notes)
    (tmp_path / Path(name).name).write_text("distributed_type: MULTI_GPU\nnum_processes: 3\nmixed_precision: fp16\n")
    own = _read(tmp_path, f"accelerate launch --config_file {name} {flags}")
    assert (own.layout.zero, own.layout.world, own.layout.precision) == (0, 3, "fp16")


_THREE = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}


def test_three_numbers_of_sequences_are_the_ranks_of_deepspeed(tmp_path: Path) -> None:
    """deepspeed/runtime/config.py, _batch_assertion: one is the product of the others and the data-parallel ranks."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(_THREE | {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    asked = ("predict", "ds.json", "--model", "llama3-8b", "--cluster", "dgx-h100", "--seq", "4096")
    question = json_of(tmp_path, *asked, "--json")["question"]
    assert (question["gpus"], question["global_batch"]) == (8, 64)
    error = error_of(tmp_path, *asked, "--gpus", "16")
    assert "64 is not micro-batch 2 x accumulation 4 x 16 ranks" in error
    assert json_of(tmp_path, *asked, "--gpus", "16", "--batch", "128", "--json")["question"]["gpus"] == 16
    file.write_text(json.dumps(_THREE | {"train_batch_size": 63, "zero_optimization": {"stage": 2}}))
    assert "63 is not a multiple of micro-batch 2 x accumulation 4" in error_of(tmp_path, *asked)


def test_deepspeed_runs_moments_in_8_bits_that_no_search_proposes(tmp_path: Path) -> None:
    """bitsandbytes' optimizer is a program's, which gives it to deepspeed.initialize: the file has no word of it."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    (tmp_path / "a.yaml").write_text(
        "stage: sft\nfinetuning_type: full\ndeepspeed: ds.json\nmodel_name_or_path: a/b\ncutoff_len: 4096\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nbf16: true\noptim: paged_adamw_8bit\n"
    )
    asked = ("predict", "a.yaml", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8")
    question = json_of(tmp_path, *asked, "--json")["question"]
    assert (question["refused"], question["options"]["first_moment"]) == ("", "float8")
    for stack, has in (("deepspeed", False), ("megatron-core", True)):
        row = STACKS[stack].options["first_moment"]
        assert (row.allows("float8"), row.offers("float8"), row.offers("bfloat16")) == (True, has, True)
        sets = _sets(
            lookup.pricing_by_gpus(
                lookup.model_named("llama3-8b")[0], lookup.cluster_on("dgx-h100", None), 64, 4096, stack
            )(8)
        )
        assert ({"first_moment": "float8", "second_moment": "float8"} in sets) == has


def test_deepspeed_chat_trains_in_half_types(tmp_path: Path) -> None:
    """Its main.py has no bf16 and no fp16: --dtype says it, fp16 by itself (main.py:148)."""
    line = (
        "deepspeed --num_gpus 8 main.py --data_split 2,4,4 --model_name_or_path meta-llama/Llama-2-7b-hf "
        "--per_device_train_batch_size 4 --max_seq_len 512 --gradient_accumulation_steps 1 --zero_stage 3 --deepspeed"
    )
    for more, precision in (("", "fp16"), (" --dtype bf16", "bf16")):
        (tmp_path / "run.sh").write_text(line + more)
        r = reading_of([tmp_path / "run.sh"])
        assert (r.configuration.layout.precision, r.configuration.unknown, r.mistakes) == (precision, {}, ())
        assert any("DeepSpeed-Chat" in note for note in r.configuration.notes) is not bool(more)


@pytest.mark.parametrize(
    ("more", "world"),
    [
        ("", 80),
        ("    colocated: {enabled: true, resources: {num_nodes: 2, gpus_per_node: 8}}\n", 80),
        ("    colocated: {enabled: false, resources: {num_nodes: 2, gpus_per_node: 8}}\n", 64),
    ],
)
def test_gpus_that_generate_alone_do_not_train(tmp_path: Path, more: str, world: int) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "policy:\n  model_name: Qwen/Qwen3-30B-A3B\n  train_micro_batch_size: 1\n  train_global_batch_size: 128\n"
        "  max_total_sequence_length: 4096\n  precision: bfloat16\n  megatron_cfg: {enabled: true, "
        f"tensor_model_parallel_size: 4}}\n  generation:\n    backend: vllm\n{more}"
        "cluster: {gpus_per_node: 8, num_nodes: 10}\n"
    )
    assert reading_of([tmp_path / "grpo.yaml"]).configuration.layout.world == world


def test_a_key_is_not_said_to_mean_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\nmax_seq_length: 4096\n"
        "gradient_accumulation_steps: 2\nlearning_rate: 5.0e-06\nbf16: true\ndropout: 0.1\n"
    )
    assert reading_of([tmp_path / "a.yaml"]).configuration.unknown == {"dropout": ""}
