"""TRL's command line with its files, and what scores a sequence besides the model that learns from preferences."""

from __future__ import annotations

from pathlib import Path

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
