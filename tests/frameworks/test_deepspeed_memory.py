"""Memory of DeepSpeed's engine: its buckets, the gradients of its shards, and its update, by ZeRO's level."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import json_of

from phalanx.cost.ledger.model_shape import shape
from phalanx.planning.lookup import model_named

MIB = 2**20
QWEN, _ = model_named("qwen2-7b")
PARAMS = shape(QWEN).params
Peak = Callable[..., dict[str, Any]]


@pytest.fixture
def answer(tmp_path: Path) -> Peak:
    """The price of a Trainer's run without recomputation, with these values of DeepSpeed's table."""

    def of(level: int, ranks: int = 8, more: str = "", **table: Any) -> dict[str, Any]:
        (tmp_path / "z.json").write_text(
            json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": level, **table}})
        )
        args = f"--bf16 --per_device_train_batch_size 1 --deepspeed z.json {more}"
        (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node {ranks} train.py --max_seq_length 4096 {args}")
        return json_of(tmp_path, f"predict run.sh --model qwen2-7b --cluster dgx-h200 --gpus {ranks} --json")

    return of


@pytest.mark.parametrize("level", [1, 2])
def test_buckets_are_buffers_of_the_backward_pass(answer: Peak, level: int) -> None:
    """What settings change of a published run at level 2 (deepspeedai/DeepSpeed#1302): 954, 1,527 and 1,905 MiB."""

    def peak(**table: Any) -> float:
        terms = answer(level, more="--use_liger_kernel True", **table)["memory_terms"]
        return float(sum(terms.values()) - terms["logits"])  # which are freed first

    two, one = peak(overlap_comm=True), peak()  # the engine's default
    small = peak(overlap_comm=True, reduce_bucket_size=1e8)
    none = peak(overlap_comm=True, contiguous_gradients=False)
    assert [round((two - n) / MIB) for n in (one, small, none)] == [954, 1526, 1907]


def test_level_3_keeps_one_buffer_for_good(answer: Peak) -> None:
    for overlap in (True, False):
        with_, without = (answer(3, overlap_comm=overlap, contiguous_gradients=c) for c in (True, False))
        assert with_["memory_terms"]["buffers"] - without["memory_terms"]["buffers"] == 1e9
        assert sum(with_["memory_terms"].values()) - sum(without["memory_terms"].values()) == 1e9


def test_a_bucket_left_to_the_trainer_is_the_square_of_the_hidden_size(answer: Peak) -> None:
    auto, stated = answer(3, reduce_bucket_size="auto"), answer(3, reduce_bucket_size=QWEN.hidden**2)
    assert auto["memory_terms"] == stated["memory_terms"]
    assert answer(3)["memory_terms"]["buffers"] > auto["memory_terms"]["buffers"]


def test_a_plan_from_a_file_keeps_its_bucket(answer: Peak, tmp_path: Path) -> None:
    line = "--model qwen2-7b --cluster dgx-h200 --gpus 8 --json"
    for size in (5 * 10**7, "auto"):
        priced = answer(3, reduce_bucket_size=size)
        assert json_of(tmp_path, f"plan --from run.sh {line}")["now"]["memory_bytes"] == priced["memory_bytes"]
        json_of(tmp_path, f"export plan.json --to deepspeed --out out-{size} --json")
        table = json.loads((tmp_path / f"out-{size}" / "ds_config.json").read_text())["zero_optimization"]
        assert table["reduce_bucket_size"] == (QWEN.hidden**2 if size == "auto" else size)


@pytest.mark.parametrize(("level", "ranks"), [(1, 1), (2, 1), (2, 8), (3, 1), (3, 8)])
def test_an_update_casts_what_a_rank_has(answer: Peak, level: int, ranks: int) -> None:
    """Weights and gradients of 2 bytes, masters and moments of 12: whole on one rank. The update copies gradients and
    casts them, 2 + 4 bytes, at level 3 of 1e9 elements at a time."""
    terms = answer(level, ranks, "--optim adamw_torch_fused --gradient_checkpointing True --max_seq_length 256")[
        "memory_terms"
    ]
    whole = 2.0 if level < 3 else 2.0 / ranks
    assert terms["state"] == pytest.approx(PARAMS * (whole + 14 / ranks), rel=1e-3)
    if ranks == 1:
        assert terms["update"] == pytest.approx(6 * (PARAMS if level < 3 else 1e9), rel=1e-3)
