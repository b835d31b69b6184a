"""TRL's command line with its files, and what scores a sequence besides the model that learns from preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import json_of

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

_FILE = "model_name_or_path: Qwen/Qwen2.5-1.5B\ndataset_name: a/b\naccelerate_config: zero3\nnum_processes: 4\n"


def _read(tmp_path: Path, text: str, name: str = "run.sh") -> Configuration:
    (tmp_path / name).write_text(text)
    return files.read([tmp_path / name])[0]


def test_options_of_the_launcher_stand_in_trl_s_file(tmp_path: Path) -> None:
    alone = _read(tmp_path, f"{_FILE}env: {{NCCL_DEBUG: INFO}}\n", "sft.yaml")
    assert (alone.layout.world, alone.layout.zero, alone.stack, alone.unknown) == (4, 3, "deepspeed", {})
    assert (alone.layout.micro_batch, alone.layout.recompute) == (None, None)
    c = _read(tmp_path, "trl sft --config sft.yaml --per_device_train_batch_size 2 --num_processes 16 --fp16")
    layout = c.layout
    assert (layout.world, layout.zero, layout.micro_batch, layout.seq) == (16, 3, 2, 1024)
    assert (layout.recompute, layout.precision, c.unknown, c.not_modelled) == ("full", "fp16", {}, {})
    assert any("gradient_checkpointing=true" in note and "bf16" not in note for note in c.notes)
    c = _read(tmp_path, "trl sft --config sft.yaml --gradient_checkpointing false --accelerate_config fsdp2")
    assert (c.stack, c.layout.zero, c.layout.recompute) == ("accelerate", 3, None)
    (tmp_path / "mine.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")
    c = _read(tmp_path, "trl sft --config sft.yaml --accelerate_config mine.yaml")
    assert (c.layout.world, c.layout.zero) == (4, 2)
    c = _read(tmp_path, "trl sft --config gone.yaml --accelerate_config other.yaml")
    assert [note.partition(",")[0] for note in c.missing] == ["gone.yaml", "other.yaml"]
    assert (c.layout.micro_batch, c.layout.zero) == (None, None)


def test_a_file_comes_before_what_a_program_has_by_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: Qwen/Qwen3-8B\ntuner_type: full\nper_device_train_batch_size: 4\n")
    c = _read(tmp_path, "NPROC_PER_NODE=2 swift sft --config a.yaml")
    assert (c.layout.micro_batch, c.layout.precision, c.layout.recompute) == (4, "bf16", "full")
    assert "lora" not in c.options


@pytest.mark.parametrize(
    ("line", "reference"),
    [
        ("trl kto", "copy-kl"),
        ("trl kto --use_peft", "base-kl"),
        ("trl kto --loss_type apo_zero_unpaired", "copy"),
        ("trl kto --precompute_ref_log_probs true", "base"),
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type kto --tuner_type full", "copy-kl"),
        ("trl dpo --config gone.yaml", "copy"),
        ("trl sft", None),
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type kto --tuner_type full --calculate_KL false", "copy"),
    ],
)
def test_what_scores_a_sequence(tmp_path: Path, line: str, reference: str | None) -> None:
    c = _read(tmp_path, f"{line} --model_name_or_path x --per_device_train_batch_size 2")
    assert c.options.get("reference") == reference
    assert c.layout.micro_batch == (4 if "dpo" in line else 2)


def test_three_forward_passes_score_an_example_of_kto(tmp_path: Path) -> None:
    line = "trl {} --model_name_or_path Qwen/Qwen2.5-1.5B --num_processes 8 --per_device_train_batch_size {}"

    def terms(method: str, micro: int) -> dict[str, float]:
        (tmp_path / "a.sh").write_text(line.format(method, micro))
        result: dict[str, float] = json_of(tmp_path, "predict a.sh --cluster dgx-h100 --json")["terms_s"]
        return result

    kto, dpo, sft = terms("kto", 4), terms("dpo", 2), terms("sft", 4)  # of as many sequences
    assert kto["reference"] == pytest.approx(3 * dpo["reference"])
    assert sft.get("reference", 0.0) == 0


@pytest.mark.parametrize(
    ("words", "stack", "reference", "micro", "whole"),
    [
        ("--rlhf_type dpo", "megatron-core", "copy", 4, 32),
        ("--rlhf_type dpo --tuner_type lora", "megatron-bridge", "base", 4, 32),
        ("--rlhf_type dpo --reference_free true", "megatron-core", "copy", 4, 32),  # which its passes do not heed
        ("--rlhf_type kto", "megatron-core", "copy-kl", 2, 16),
        ("--rlhf_type kto --calculate_KL false", "megatron-core", "copy", 2, 16),
        ("--rlhf_type rm", "megatron-core", None, 2, 16),
    ],
)
def test_ms_swift_scores_under_megatron(
    tmp_path: Path, words: str, stack: str, reference: str | None, micro: int, whole: int
) -> None:
    line = f"NPROC_PER_NODE=8 megatron rlhf {words} --micro_batch_size 2 --model Qwen/Qwen3-8B --max_length 1024"
    c = _read(tmp_path, line)
    assert (c.stack, c.options.get("reference")) == (stack, reference)
    assert (c.layout.micro_batch, c.layout.global_batch) == (micro, whole)
    assert ("args.rlhf_type" in c.not_modelled) == (reference is None)


def test_a_copy_is_kept_in_each_stage_and_fills_the_pipeline(tmp_path: Path) -> None:
    line = "NPROC_PER_NODE=8 megatron {} --model Qwen/Qwen3-8B --max_length 1024 --pipeline_model_parallel_size 4"

    def price(words: str, micro: int) -> dict[str, Any]:
        (tmp_path / "a.sh").write_text(
            f"{line.format(words)} --micro_batch_size {micro} --global_batch_size {8 * micro}"
        )
        result: dict[str, Any] = json_of(tmp_path, "predict a.sh --cluster dgx-h100 --json")
        return result

    plain, scored = price("sft", 2), price("rlhf --rlhf_type dpo", 1)  # of as many sequences
    more = scored["memory_terms"]["state"] - plain["memory_terms"]["state"]
    end = 151936 * 4096
    assert more == pytest.approx(2 * ((8_190_735_360 - 2 * end) / 4 + end))  # 16-bit weights of a rank with an end
    by = scored["factors"]["reference"]
    assert by["fill_s"] == pytest.approx(3 * by["blocks_s"])  # of 4 stages, on top of each micro-batch's turn
    turn = by["blocks_s"] + by["head_s"]
    assert scored["terms_s"]["reference"] == pytest.approx(by["micro_batches"] * turn + by["fill_s"])


@pytest.mark.parametrize("trainer", ["megatron_cfg", "dtensor_cfg"])
def test_nemo_rl_scores_with_weights_from_the_host(tmp_path: Path, trainer: str) -> None:
    text = (
        "policy: {model_name: Qwen/Qwen3-8B, max_total_sequence_length: 1024, train_micro_batch_size: 1,"
        f" train_global_batch_size: 16, {trainer}: {{enabled: true, tensor_parallel_size: 2,"
        " tensor_model_parallel_size: 2}}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )

    def price(key: str) -> dict[str, Any]:
        (tmp_path / "a.yaml").write_text(f"{text}{key}: {{max_num_steps: 1}}\n")
        result: dict[str, Any] = json_of(tmp_path, "predict a.yaml --cluster dgx-h100 --json")
        return result

    dpo, rm = price("dpo"), price("rm")
    assert dpo["terms_s"]["reference"] > 0
    assert "reference" not in rm["terms_s"]
    assert dpo["memory_bytes"] == rm["memory_bytes"]
    c = _read(tmp_path, f"{text}dpo: {{max_num_steps: 1}}\n", "b.yaml")
    assert any("host" in note for note in c.notes)
