"""A file that leaves its model open, and a user who states it; files that are no training."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.in_process_cli import error_of, json_of, phalanx

from phalanx.answers.question.read import read as configuration

_MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt_synthetic.py --num-layers 4 --hidden-size 512 --fp16 "
    "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 8 "
    "--global-batch-size 8 --tensor-model-parallel-size 8"
)
_NEOX = """{
  "pipe_parallel_size": 1, "model_parallel_size": 1, "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
  "seq_length": 512, "max_position_embeddings": 512, "pos_emb": "rotary", "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}, "fp16": {"enabled": true}%s
}"""
_TRAINER = (
    "torchrun --nproc_per_node=8 train.py --model_name_or_path models/7B --bf16 True --output_dir o "
    "--per_device_train_batch_size 1"
)
_MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPXB\t0-27\nGPU1\tPXB\t X \t0-27\n"
_SWITCHES = "SwitchName=s1 Nodes=tux[0-3]\nSwitchName=s2 Nodes=tux[4-7]\n"


def _priced(here: Path, text: str, name: str, *more: str) -> dict[str, float]:
    (here / name).write_text(text)
    found = json_of(here, "predict", name, "--cluster", "v100", "--json", *more)
    return {field: found[field] for field in ("memory_bytes", "step_time_s", "model_flops")}


@pytest.mark.parametrize(
    ("name", "text", "more", "written"),
    [
        ("run.sh", _MEGATRON, (), f"{_MEGATRON} --padded-vocab-size 50304"),
        ("neox.yml", _NEOX % "", ("--gpus", "2"), _NEOX % ', "padded_vocab_size": 50304'),
    ],
)
def test_a_size_that_the_user_states_is_as_if_the_file_had_it(
    name: str, text: str, more: tuple[str, ...], written: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert "--set model.vocab=N" in error_of(tmp_path, "predict", name, "--cluster", "v100", *more)
    stated = _priced(tmp_path, text, name, *more, "--set", "model.vocab=50304")
    assert stated == _priced(tmp_path, written, name, *more)
    assert stated != _priced(tmp_path, text, name, *more, "--set", "model.vocab=25152")


def test_a_model_that_cannot_be_read_beside_a_file_gives_way_to_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(_TRAINER)
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    asked = ("predict", "run.sh", "--cluster", "a100-80gb", "--seq", "512")
    assert "attention to an encoder" in error_of(tmp_path, *asked)
    assert phalanx(tmp_path, *asked, "--model", "llama-7b")[0] == 0
    assert configuration([tmp_path / "run.sh"]).configuration.open_model.endswith("which is not described")


@pytest.mark.parametrize("text", [_MATRIX, _SWITCHES])
def test_a_topology_is_no_training_and_its_command_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text(text)
    for command in (
        ("read", "hosts.txt"),
        ("lint", "hosts.txt"),
        ("plan", "--from", "hosts.txt", "--cluster", "h100"),
    ):
        assert "phalanx cluster read" in error_of(tmp_path, *command)
    assert phalanx(tmp_path, "cluster", "read", "hosts.txt")[0] == 0


@pytest.mark.parametrize(("engine", "stack"), [("megatron", "megatron-core"), ("torchtitan", "torchtitan")])
def test_a_file_over_one_of_several_engines_names_its_stack(engine: str, stack: str, tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(f"modules:\n  pre_trainer:\n    framework: {engine}\n    model: llama3.yaml\n")
    assert f"--stack {stack} " in error_of(tmp_path, "read", "exp.yaml")


def test_axolotl_computes_in_tf32_where_neither_half_type_does(tmp_path: Path) -> None:
    lines = "base_model: HuggingFaceTB/SmolLM2-1.7B\nmicro_batch_size: 1\nsequence_len: 512\ntf32: true\n"
    lines += (
        "gradient_checkpointing: true\ngradient_checkpointing_kwargs:\n  use_reentrant: true\nrandom_init: true\n"
    )
    (tmp_path / "halves.yaml").write_text(lines + "bf16: auto\n")
    (tmp_path / "whole.yaml").write_text(lines + "bf16: false\n")
    halves, whole = (configuration([tmp_path / f"{name}.yaml"]) for name in ("halves", "whole"))
    assert (halves.layout.precision, whole.layout.precision) == ("bf16", "tf32")
    assert not halves.configuration.not_modelled
    assert not halves.configuration.unknown


def test_a_program_of_llama_cookbook_is_answered_with_its_layout(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 4 finetuning.py --enable_fsdp --batch_size_training 2 --context_length 4096"
    (tmp_path / "run.sh").write_text(line)
    said = error_of(tmp_path, "read", "run.sh")
    assert "llama-cookbook" in said
    words = said.partition("phalanx predict ")[2].split()
    values = {"M": "llama-2-7b", "C": "a100-80gb", "N": "8", "B": "32", "S": "512"}
    assert phalanx(tmp_path, "predict", *(values.get(word, word) for word in words))[0] == 0
