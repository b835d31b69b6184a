"""Recipes of torchtune, NeMo 2, Megatron-Bridge and verl, and training scripts in Python, as people start them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of

from phalanx.answers.question.read import read
from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

_LORA = """
from peft import LoraConfig
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", quantization_config=bnb)
SIZE = 4
args = TrainingArguments("out", per_device_train_batch_size=SIZE, gradient_accumulation_steps=16 // SIZE, bf16=True,
                         gradient_checkpointing=True)
SFTTrainer(model=model, args=args, peft_config=LoraConfig(r=64, target_modules=["q_proj"]), max_seq_length=2048)
"""
_NEMO = """
def configure(nodes: int = 1, gpus: int = 8):
    recipe = llm.llama3_8b.pretrain_recipe(name="x", num_nodes=nodes, num_gpus_per_node=gpus)
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    recipe.data.global_batch_size = 128
    return recipe
if __name__ == "__main__":
    run.run(configure(nodes=2), executor=run.LocalExecutor())
"""
_LONG = "nemo llm pretrain --factory \"llama3_8b_64k(num_nodes={}, name='x')\""
_BRIDGE = """
def main():
    cfg = llama3_8b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.dataset.seq_length = 4096
    pretrain(config=cfg, forward_step_func=step)
"""
_BY_HAND = """
size = 2048
data = llm.PreTrainingDataModule(paths="x", seq_length=size, micro_batch_size=1, global_batch_size=16)
strategy = nl.MegatronStrategy(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
trainer = nl.Trainer(devices=8, num_nodes=2, strategy=strategy)
llm.train(model=llm.LlamaModel(llm.Llama3Config8B()), data=data, trainer=trainer)
"""
_VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_prompt_length=512 "
    "data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct "
    "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 "
    "actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8"
)
_TUNE = """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], lora_rank: 8}
tokenizer: {max_seq_len: 4096}
batch_size: 2
gradient_accumulation_steps: 8
dtype: bf16
enable_activation_checkpointing: true
"""


def _read(folder: Path, name: str, text: str) -> Configuration:
    (folder / name).write_text(text)
    return files.read([folder / name])[0]


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        (
            "train.py",
            _LORA,
            {"micro_batch": 4, "accumulation": 4, "recompute": "full", "seq": 2048, "precision": "bf16"},
        ),
        (
            "nemo.py",
            _NEMO,
            {"world": 16, "tp": 2, "cp": 2, "dp": 4, "global_batch": 128, "micro_batch": 1, "seq": 8192},
        ),
        ("bridge.py", _BRIDGE, {"tp": 4, "cp": 2, "zero": 1, "seq": 4096, "global_batch": 512, "precision": "bf16"}),
        ("hand.py", _BY_HAND, {"world": 16, "tp": 2, "pp": 2, "dp": 4, "global_batch": 16, "seq": 2048}),
        (
            "nemo.sh",
            "nemo llm pretrain --factory 'llama3_70b(num_nodes=4)' trainer.strategy.context_parallel_size=1",
            {"world": 32, "tp": 4, "pp": 4, "cp": 1, "dp": 2, "virtual": 5, "seq": 8192, "global_batch": 512},
        ),
        (
            "bridge.sh",
            "torchrun --nproc_per_node=8 run_recipe.py --model llama3_8b --mode pretrain -tp 2 -gb 64",
            {"world": 8, "tp": 2, "cp": 2, "dp": 2, "global_batch": 64, "seq": 8192},
        ),
        (
            "perf.sh",
            "python setup_experiment.py -mr llama3_70b -ng 64 -tp 4 -pp 8 -mb 1",
            {"world": 64, "tp": 4, "pp": 8, "cp": None, "dp": None, "precision": None, "micro_batch": 1},
        ),
        (
            "worker.sh",
            "W=$(cat <<- EOM\n  echo start ;\n  numactl --cpunodebind=\\$((LOCAL_RANK/2)) nsys profile -t cuda \\\\\n"
            "  nice -10 python scripts/performance/my_setup_experiment.py --model_family_name llama \\\\\n"
            "  --model_recipe_name llama31_405b --compute_dtype fp8_mx --tensor_model_parallel_size 4 \\\\\n"
            "  --pipeline_model_parallel_size 8 --context_parallel_size 1\nEOM\n)\n"
            'echo "$W" > worker.sh\nchmod 777 worker.sh\n'
            "torchrun --nproc-per-node=4 --nnodes=64 --no-python bash worker.sh\n",
            {"world": 256, "tp": 4, "pp": 8, "cp": 1, "dp": 8, "precision": "fp8", "recompute": None},
        ),
        (
            "verl.sh",
            _VERL,
            {
                "world": 8,
                "dp": 8,
                "zero": 3,
                "micro_batch": 16,
                "accumulation": 10,
                "global_batch": 1280,
                "seq": 1536,
            },
        ),
        (
            "verl_megatron.sh",
            _VERL + " actor_rollout_ref.actor.strategy=megatron trainer.nnodes=2"
            " actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
            {"world": 16, "tp": 4, "dp": 4, "zero": 1, "sp": True, "accumulation": 20},
        ),
        (
            "xpk.sh",
            "xpk workload create --workload w --tpu-type=v5p-512 --num-slices=4 --command 'python3 -m MaxText.train "
            "MaxText/configs/base.yml model_name=llama2-70b ici_fsdp_parallelism=256 dcn_data_parallelism=-1'",
            {"world": 1024, "shard": 256, "dp": 1024},
        ),
        (
            "factory.yaml",
            "model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: full\nper_device_train_batch_size: 1\n"
            "deepspeed: examples/deepspeed/ds_z3_offload_config.json\n"
            "max_source_length: 512\nmax_target_length: 128\n",
            {"zero": 3, "offload": {"optimizer": "cpu", "param": "cpu"}, "seq": 640, "recompute": "full"},
        ),
        (
            "swift.sh",
            "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type full --max_length 4096 "
            "--gradient_accumulation_steps $(expr 32 / 4) --deepspeed zero3",
            {"world": 4, "zero": 3, "micro_batch": 1, "accumulation": 8, "recompute": "full", "precision": "bf16"},
        ),
        (
            "rlhf.sh",
            "read -r -d '' words <<EOF\nopenrlhf.cli.train_sft --max_len 2048 --train_batch_size 256 \\\n"
            "  --micro_train_batch_size 2 --pretrain meta-llama/Meta-Llama-3-8B --zero_stage 3\nEOF\n"
            "deepspeed --num_gpus 8 --module $words\n",
            {"world": 8, "zero": 3, "micro_batch": 2, "accumulation": 16, "global_batch": 256, "seq": 2048},
        ),
        (
            "mswift.sh",
            "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 2 "
            "--expert_model_parallel_size 8 --micro_batch_size 1 --global_batch_size 16 --max_length 8192",
            {"world": 8, "tp": 2, "ep": 8, "etp": 1, "zero": 1, "precision": "bf16", "recompute": "selective"},
        ),
        (
            "tune.yaml",
            _TUNE,
            {"micro_batch": 2, "accumulation": 8, "zero": 3, "recompute": "full", "seq": 4096, "precision": "bf16"},
        ),
    ],
)
def test_what_is_started_by_a_recipe_has_its_layout(
    tmp_path: Path, name: str, text: str, want: dict[str, Any]
) -> None:
    c = _read(tmp_path, name, text)
    assert {field: getattr(c.layout, field) for field in want} == want
    assert c.spec is not None


_NAMED = "cfg = llama3_8b_pretrain_config()\ncfg.mixed_precision = {}\npretrain(config=cfg)\n"
_CONTAINER = "model: {{tensor_model_parallel_size: 1}}\ntrain: {{micro_batch_size: 1}}\nmixed_precision: {}\n"


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("bf16_mixed", None),
        ("bf16_with_fp8_delayed_scaling_mixed", "float8-delayed"),
        ("bf16-with-fp8-current-scaling-mixed", "float8"),
        ("nanov2_bf16_with_fp8_current_scaling_mixed", "float8-block"),
        ("bf16_with_mxfp8_mixed", "mxfp8"),
        ("bf16_with_nvfp4_mixed", "nvfp4"),
    ],
)
def test_a_named_mixed_precision_is_what_its_recipe_sets(tmp_path: Path, name: str, products: str | None) -> None:
    """However a program or a file names it (Megatron-Bridge, training/mixed_precision.py)."""
    ways = [f'"{name}"', f'get_mixed_precision_config("{name}")', *([f"{name}()"] if "-" not in name else [])]
    read = [_read(tmp_path, "recipe.py", _NAMED.format(way)) for way in ways]
    read.append(_read(tmp_path, "container.yaml", _CONTAINER.format(name)))
    assert {c.options.get("products") for c in read} == {products}
    assert {c.layout.precision for c in read} == {"fp8" if "fp8" in name else "bf16"}


def test_a_mixed_precision_that_no_release_has_leaves_the_type_open(tmp_path: Path) -> None:
    for way in ('"ours"', "$made"):
        read = _read(tmp_path, "container.yaml", _CONTAINER.format(way))
        assert read.layout.precision is None
        assert "mixed_precision" in read.not_modelled


_BY_BRIDGE = """
bridge = AutoBridge.from_hf_pretrained("{}")
provider = bridge.to_megatron_provider(load_weights=False)
provider.tensor_model_parallel_size = 2
cfg = ConfigContainer(
    model=provider,
    train=TrainingConfig(micro_batch_size=1, global_batch_size=128),
    optimizer=OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, overlap_param_gather=True),
    ddp=DistributedDataParallelConfig(overlap_grad_reduce=True),
    dataset=GPTDatasetConfig({}=8192),
    mixed_precision=bf16_mixed(),
)
pretrain(cfg, forward_step)
"""


@pytest.mark.parametrize("length", ["seq_length", "sequence_length"])
def test_a_container_by_hand_has_its_bridges_model_and_its_datas_length(tmp_path: Path, length: str) -> None:
    c = _read(tmp_path, "train.py", _BY_BRIDGE.format("meta-llama/Llama-3.1-8B", length))
    assert (c.layout.tp, c.layout.seq, c.layout.zero, c.not_modelled) == (2, 8192, 1, {})
    assert c.spec is not None
    assert (c.spec.layers, c.options.get("dp_overlap")) == (32, None)
    assert _read(tmp_path, "train.py", _BY_BRIDGE.format("/a/checkpoint", length)).spec is None


def test_a_recipe_says_how_tokens_reach_the_experts_of_a_model_that_it_names(tmp_path: Path) -> None:
    said = "cfg = qwen3_30b_a3b_pretrain_config()\n"
    flex = 'cfg.model.moe_token_dispatcher_type = "flex"\ncfg.model.moe_flex_dispatcher_backend = "{}"\n'
    balanced = "cfg.model.moe_router_force_load_balancing = True\n"
    silent = _read(tmp_path, "recipe.py", said).options
    assert not {"dispatch", "routing"} & silent.keys()
    for backend in ("deepep", "hybridep"):
        stated = _read(tmp_path, "recipe.py", said + flex.format(backend) + balanced).options
        assert (stated["dispatch"], stated["routing"]) == (backend, "balanced")


def test_adapters_of_scripts_and_recipes(tmp_path: Path) -> None:
    script = _read(tmp_path, "train.py", _LORA)
    assert script.options == {"lora": 64, "lora_targets": "qkv", "base": "nf4-double"}
    recipe = _read(tmp_path, "tune.yaml", _TUNE)
    assert recipe.options == {"lora": 8, "lora_targets": "attention"}
    whole = _read(
        tmp_path, "whole.yaml", _TUNE.replace("lora_llama", "llama").split(", lora_attn")[0] + "}\ndtype: bf16\n"
    )
    assert whole.job["types"] == {"reduce": "bfloat16", "accumulate": "bfloat16", "master": "bfloat16"}


def test_verl_keeps_what_it_fine_tunes_at_the_top_and_an_actor_below_its_role(tmp_path: Path) -> None:
    role = "actor_rollout_ref."
    for line, model, update in (
        (_VERL, f"{role}model", f"{role}actor.optim"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer", "model", "optim"),
    ):
        set_to = f"{model}.enable_gradient_checkpointing=false {model}.lora_rank=16 {update}.weight_decay=0.3"
        c = _read(tmp_path, "run.sh", f"{line} {set_to}")
        assert (c.layout.recompute, c.options, c.job["optimizer"]["weight_decay"]) == ("none", {"lora": 16}, 0.3)


@pytest.mark.parametrize(("said", "zero"), [("", 3), ("=true", 3), ("=false", 2)])
def test_verl_keeps_parameters_gathered_where_it_says_so(tmp_path: Path, said: str, zero: int) -> None:
    for line, table in (
        (_VERL, "actor_rollout_ref.actor.fsdp_config"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer", "engine"),
    ):
        c = _read(tmp_path, "run.sh", f"{line} {table}.reshard_after_forward{said}" if said else line)
        assert c.layout.zero == zero


def test_options_of_accelerate_alone_are_as_over_an_empty_file(tmp_path: Path) -> None:
    """A file that is named and not here leaves open what it may say."""
    (tmp_path / "empty.yaml").write_text("{}\n")
    line = "accelerate launch {}--num_processes 8 --use_fsdp train.py --per_device_train_batch_size 2"
    alone, empty, gone = (
        _read(tmp_path, "run.sh", line.format(named))
        for named in ("", "--config_file empty.yaml ", "--config_file no.yaml ")
    )
    assert (alone.layout, alone.job, alone.missing) == (empty.layout, empty.job, ())
    assert alone.job["compute"] == "fp32"
    assert "no.yaml, accelerate's file, is not here" in gone.missing[0]
    assert gone.job["compute"] is None


def test_what_a_script_asks_of_its_card_is_taken_as_true(tmp_path: Path) -> None:
    asked = "bf16=is_bfloat16_supported(), fp16=not is_bfloat16_supported()"
    plain, open_ = (_read(tmp_path, "train.py", text) for text in (_LORA, _LORA.replace("bf16=True", asked)))
    assert open_.layout == plain.layout
    assert any("is_bfloat16_supported() is taken as true" in note for note in open_.notes)


def test_a_function_returns_a_configuration_of_torchtitan_by_its_signature_or_its_body(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "net" / "inputs" / "titan.py").read_text()
    other = "\n\ndef other(config):\n    return Other.Config(config)\n"
    without = text.replace(" -> Trainer.Config", "")
    assert without != text
    found = [_read(tmp_path, "titan.py", t).layout for t in (text, without, without + other)]
    assert found[0] == found[1] == found[2]


def test_a_configuration_in_python_may_use_constants_and_functions_of_its_module(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "net" / "inputs" / "titan.py").read_text()
    (degree,) = re.findall(r"tensor_parallel_degree=(\d+)", text)
    named = "_TP = int(2)\n\n\ndef _degree(scale):\n    return {'tp': scale * _TP}['tp']\n\n\n" + text
    named = named.replace(f"tensor_parallel_degree={degree}", f"tensor_parallel_degree=_degree({int(degree) // 2})")
    assert _read(tmp_path, "titan.py", named).layout == _read(tmp_path, "titan.py", text).layout


def test_a_launched_script_is_opened_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_LORA)
    c = _read(tmp_path, "run.sh", "torchrun --nproc_per_node 4 train.py\n")
    assert (c.kind, c.layout.world, c.layout.global_batch) == ("hf", 4, 64)
    assert "train.py, its program, is read too" in c.companions


def test_an_unknown_recipe_is_asked_for_and_never_priced(tmp_path: Path) -> None:
    c = _read(tmp_path, "ft.py", "recipe = llm.llama3_8b.finetune_recipe(num_nodes=1, num_gpus_per_node=8)\n")
    assert (c.layout.world, c.layout.tp, c.layout.dp) == (8, None, None)
    assert "llama3_8b, its recipe, is not known here" in c.missing[0]
    (tmp_path / "ft.sh").write_text("nemo llm finetune --factory llama3_8b peft=lora trainer.devices=8\n")
    assert "llama3_8b" in error_of(tmp_path, "predict", "ft.sh", "--cluster", "dgx-h100", "--model", "llama3-8b")


def test_axolotl_hands_options_to_the_launcher_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "c.yml").write_text("base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 2\nsequence_len: 4096\n")
    for line, world in (
        ("axolotl train c.yml --launcher torchrun -- --nproc_per_node=4 --nnodes=2", 8),
        ("axolotl train c.yml --launcher accelerate -- --num_processes=16", 16),
        ("axolotl train c.yml", None),
    ):
        c = _read(tmp_path, "run.sh", line)
        assert (c.kind, c.layout.world, c.layout.micro_batch, c.unknown) == ("accelerate", world, 2, {}), line


def test_what_only_a_run_knows_is_said(tmp_path: Path) -> None:
    text = (
        "p = argparse.ArgumentParser()\np.add_argument('--bs', type=int)\np.add_argument('--acc', default=8)\n"
        "a = p.parse_args()\n"
        "t = TrainingArguments(per_device_train_batch_size=a.bs, gradient_accumulation_steps=a.acc, bf16=ok())\n"
    )
    c = _read(tmp_path, "train.py", text)
    assert (c.layout.micro_batch, c.layout.accumulation, c.layout.precision) == (None, 8, None)
    (tmp_path / "two.py").write_text(
        "a = llama3_8b_pretrain_config()\na.x = 1\nb = llama3_70b_sft_config()\nb.x = 1\n"
    )
    assert "makes 2 recipes, in lines 1, 3" in error_of(tmp_path, "read", "two.py")
    (tmp_path / "deep.py").write_text("def f(): return f()\nTrainingArguments(x=f())\n")
    assert "calls itself" in error_of(tmp_path, "read", "deep.py")
    often = "def f(): return 2\n" + "x = f()\n" * 50 + "TrainingArguments(per_device_train_batch_size=x, bf16=True)\n"
    assert _read(tmp_path, "often.py", often).layout.micro_batch == 2  # calls one after the other are not deep


@pytest.mark.parametrize(("line", "etp"), [("", 2), ("\n    expert_tensor_parallel_size: 1", 1)])
def test_experts_of_nemo_are_split_as_their_layers_unless_the_file_says_otherwise(
    tmp_path: Path, line: str, etp: int
) -> None:
    (tmp_path / "run.yaml").write_text(
        "trainer:\n  devices: 8\n  num_nodes: 4\n  strategy:\n    tensor_model_parallel_size: 2\n"
        f"    pipeline_model_parallel_size: 4\n    expert_model_parallel_size: 4{line}\n"
        "data:\n  global_batch_size: 256\n  micro_batch_size: 1\n  seq_length: 4096\n"
    )
    assert read([tmp_path / "run.yaml"]).configuration.layout.etp == etp


def test_a_long_recipe_of_nemo_needs_its_degrees_ranks(tmp_path: Path) -> None:
    """NVIDIA/NeMo issue 14919 starts it on 2 nodes, of which 4 x 2 x 4 ranks do not fit."""
    (tmp_path / "run.sh").write_text(_LONG.format(4))
    x = files.read([tmp_path / "run.sh"])[0].layout
    assert (x.world, x.tp, x.pp, x.cp, x.seq) == (32, 4, 2, 4, 65536)
    (tmp_path / "run.sh").write_text(_LONG.format(2))
    said = error_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h20")
    assert "does not divide 16 ranks; use a multiple of 32" in said
