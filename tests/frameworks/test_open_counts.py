"""What files leave open, twice say or name in a plan's place: one line with what it becomes or what to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import error_of, json_of, phalanx

_TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = {batch}
seq_len = 4096
[parallelism]
data_parallel_shard_degree = {shard}
tensor_parallel_degree = 2
"""
_MAXTEXT = "base_config: base.yml\nmodel_name: llama3-8b\nmax_target_length: 4096\nici_fsdp_parallelism: -1\n"
_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
_ON = ("--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("name", "text", "key", "left"),
    [
        ("t.toml", _TITAN.format(batch=1, shard=-1), "parallelism.data_parallel_shard_degree", 4),
        ("m.yml", _MAXTEXT, "ici_fsdp_parallelism", 8),
    ],
)
def test_a_degree_that_takes_the_rest_says_what_it_becomes(
    tmp_path: Path, name: str, text: str, key: str, left: int
) -> None:
    (tmp_path / name).write_text(text)
    said = f"{key} = -1 takes the ranks that are left: {left} with --gpus 8"
    assert said in error_of(tmp_path, "predict", name, *_ON)
    assert said in " ".join(phalanx(tmp_path, "read", name)[1].split())
    assert json_of(tmp_path, "predict", name, *_ON, "--gpus", "8", "--json")["strategy"].startswith(f"dp={left}")


def test_a_batch_of_minus_one_is_said(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(_TITAN.format(batch=-1, shard=4))
    said = phalanx(tmp_path, "predict", "t.toml", *_ON)[1]
    assert "training.local_batch_size = -1 is no number: micro_batch=1 is taken" in said


def test_an_export_of_a_configuration_says_what_makes_a_plan_of_it(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(_TITAN.format(batch=1, shard=4))
    (tmp_path / "d.json").write_text(json.dumps(_DEEPSPEED))
    for name, kind in (("t.toml", "torchtitan"), ("d.json", "deepspeed")):
        said = error_of(tmp_path, "export", name, "--to", "megatron", "--out", "x")
        assert f"is a configuration of {kind}" in said
        assert f"phalanx read {name} --cluster C --out plan.json" in said


def test_lint_of_a_file_names_the_keys_of_its_framework(tmp_path: Path) -> None:
    """MiCS is DeepSpeed's key for fewer shards than replicas; `shard=8` alone is a word of our own."""
    (tmp_path / "d.json").write_text(json.dumps(_DEEPSPEED))
    asked = ("d.json", "--cluster", "ethernet-h100", "--gpus", "16", "--model", "llama3-8b", "--seq", "2048")
    remedies = [f["remedy"] for f in json.loads(phalanx(tmp_path, "lint", *asked, "--json")[1])["findings"]]
    assert any("shard=8" in r and "(shard: zero_optimization.mics_shard_size)" in r for r in remedies)
    assert all("zero_optimization.stage" in r for r in remedies if r.startswith("zero="))


def test_numbers_that_two_files_say_change_in_both_once(tmp_path: Path) -> None:
    """Trainer stops where DeepSpeed's file says another accumulation than its arguments."""
    (tmp_path / "d.json").write_text(json.dumps(_DEEPSPEED))
    (tmp_path / "run.sh").write_text(
        "deepspeed --num_gpus 8 run_clm.py --model_name_or_path meta-llama/Meta-Llama-3-8B --bf16 True "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --block_size 2048 --deepspeed d.json "
        "--gradient_checkpointing True"
    )
    better = json_of(tmp_path, "plan", "--from", "run.sh", *_ON, "--json")
    settings = [(s["key"], s["old"], s["new"]) for c in better["changes"] for s in c["settings"]]
    assert len(settings) == len(set(settings))
    steps = {key: (old, new) for key, old, new in settings if key.endswith("gradient_accumulation_steps")}
    assert set(steps) == {"gradient_accumulation_steps", "deepspeed_json.gradient_accumulation_steps"}
    assert len(set(steps.values())) == 1


def test_serve_plan_calls_what_starts_it_by_its_own_option(tmp_path: Path) -> None:
    words = "serve plan --model llama3-8b --cluster dgx-h100 --gpus 1 --input 100 --output 100 --engine trtllm"
    assert "error: --launch = 'kubernetes': is not for" in phalanx(tmp_path, f"{words} --launch kubernetes")[2]


_AXOLOTL = """base_model: NousResearch/Meta-Llama-3-8B
micro_batch_size: MICRO
gradient_accumulation_steps: 16
sequence_len: 2048
bf16: true
deepspeed: d.json
gradient_checkpointing: true
"""


def test_axolotls_engine_file_may_say_the_batch_too(tmp_path: Path) -> None:
    """It was refused as layout that is not read; numbers that differ stop the Trainer."""
    (tmp_path / "d.json").write_text(json.dumps({**_DEEPSPEED, "train_batch_size": 128}))
    (tmp_path / "a.yml").write_text(_AXOLOTL.replace("MICRO", "1"))
    better = json_of(tmp_path, "plan", "--from", "a.yml", *_ON, "--gpus", "8", "--json")
    changed = {s["key"]: s["new"] for c in better["changes"] for s in c["settings"]}
    assert changed["micro_batch_size"] == changed["deepspeed_json.train_micro_batch_size_per_gpu"]
    assert changed["gradient_accumulation_steps"] == changed["deepspeed_json.gradient_accumulation_steps"]
    (tmp_path / "a.yml").write_text(_AXOLOTL.replace("MICRO", "2"))
    assert "is 1, and micro_batch_size 2" in error_of(tmp_path, "predict", "a.yml", *_ON, "--gpus", "8")


def test_ranks_of_accelerates_file_hold_where_it_names_an_engines(tmp_path: Path) -> None:
    """The number of ranks was asked for, although accelerate's file says it."""
    (tmp_path / "d.json").write_text(json.dumps(_DEEPSPEED))
    file = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: d.json}\nnum_processes: 8\n"
    (tmp_path / "acc.yaml").write_text(file)
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file acc.yaml sft.py --model_name_or_path Qwen/Qwen2.5-7B --max_length 2048 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --bf16"
    )
    assert json_of(tmp_path, "predict", "run.sh", *_ON, "--json")["question"]["gpus"] == 8
