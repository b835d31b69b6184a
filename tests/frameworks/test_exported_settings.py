"""Settings of exports that a layout or an option alone decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import phalanx

JOB = "--model llama3-8b --cluster {} --gpus 16 --batch 64 --seq 4096"


def _exported(folder: Path, stack: str, to: str, words: str, cluster: str = "dgx-h100") -> str:
    assert phalanx(folder, f"plan {JOB.format(cluster)} --stack {stack} {words} --out plan.json")[0] == 0
    return _written(folder, to)


def _written(folder: Path, to: str) -> str:
    assert phalanx(folder, f"export plan.json --to {to} --out x")[0] == 0
    return "\n".join(file.read_text() for file in sorted((folder / "x").rglob("*")) if file.is_file())


@pytest.mark.parametrize(
    ("line", "cluster", "queues"),
    [("tp=2,zero=1", "dgx-h100", True), ("zero=1,tp=1,cp=1", "dgx-h100", False), ("tp=2,zero=1", "dgx-b200", False)],
)
def test_one_hardware_queue_is_for_collectives_inside_layers(
    tmp_path: Path, line: str, cluster: str, queues: bool
) -> None:
    """Before Blackwell: Megatron-LM stops without it."""
    written = _exported(tmp_path, "megatron-core", "megatron", f"--strategy {line}", cluster)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in written) == queues


@pytest.mark.parametrize(("options", "wide"), [("", "true"), (" --options gradients=bfloat16", "false")])
def test_nanotron_accumulates_in_the_type_that_was_priced(tmp_path: Path, options: str, wide: str) -> None:
    written = _exported(tmp_path, "nanotron", "nanotron", f"--strategy tp=2,zero=1{options}")
    assert f"accumulate_grad_in_fp32: {wide}" in written


@pytest.mark.parametrize(("options", "bytes_each"), [("", 4), (" --options reduce=bfloat16", 2)])
def test_a_bucket_has_the_elements_that_fill_it_in_the_type_of_gradients(
    tmp_path: Path, options: str, bytes_each: int
) -> None:
    _exported(tmp_path, "megatron-core", "megatron", f"--strategy tp=2,zero=1{options}")
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["strategy"]["bucket"] = 50.0
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert f"--ddp-bucket-size {50 * 2**20 // bytes_each}\n" in _written(tmp_path, "megatron")


@pytest.mark.parametrize(
    ("stack", "to", "settings"),
    [
        ("megatron-core", "megatron", ("--vocab-size 128256", "--make-vocab-size-divisible-by 64")),
        (
            "megatron-core",
            "bridge",
            ("vocab_size: 128256", "should_pad_vocab: true", "make_vocab_size_divisible_by: 64"),
        ),
        ("torchtitan", "torchtitan", ()),
    ],
)
def test_a_vocabulary_is_padded_where_the_stack_pads_it(
    tmp_path: Path, stack: str, to: str, settings: tuple[str, ...]
) -> None:
    assert phalanx(tmp_path, f"plan {JOB.format('dgx-h100')} --stack {stack} --out plan.json")[0] == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["options"] = {**plan.get("options", {}), "vocab_multiple": 64}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    written = _written(tmp_path, to)
    assert all(setting in written for setting in settings)
