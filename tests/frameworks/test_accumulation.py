"""Gradients of several micro-batches under accelerate: whole on every rank, or in shards where a file says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import json_of, phalanx, text_of

_ASKED = "--model llama3-70b --cluster dgx-h100 --gpus 32 --batch 256 --seq 8192 --stack accelerate"


def test_what_does_not_fit_whole_is_planned_in_shards_and_exported(tmp_path: Path) -> None:
    """Whole gradients of 70 billion parameters are larger than a GPU, whatever shards the weights."""
    plan = json_of(tmp_path, f"plan {_ASKED} --out p.json --json")
    assert plan["question"]["options"] == {"accumulate": "sharded"}
    _ = text_of(tmp_path, "export p.json --to accelerate --out written")
    arguments = json.loads((tmp_path / "written/training_arguments.json").read_text())
    assert arguments["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    for source in ("written", "written/accelerate.yaml written/training_arguments.json"):
        read = json_of(tmp_path, f"read {source} --json")
        assert read["options"]["accumulate"] == "sharded", source
        assert not [c for c in read["caveats"] if "sync_each_batch" in str(c)], source


def test_shards_of_gradients_take_the_place_of_whole_ones(tmp_path: Path) -> None:
    words = f"predict {_ASKED} --strategy zero=3,recompute=full --json"
    whole, sharded = (json_of(tmp_path, f"{words} {o}") for o in ("", "--options accumulate=sharded"))
    parameters = 70_553_706_496
    saved = whole["memory_terms"]["state"] - sharded["memory_terms"]["state"]
    assert saved == pytest.approx(4 * parameters)  # fp32
    assert sharded["terms_s"]["dp"] > whole["terms_s"]["dp"]  # a reduction after each of 8 micro-batches


_TRAINER = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: bf16
num_machines: 4
num_processes: 32
"""


def test_the_change_of_a_file_is_named(tmp_path: Path) -> None:
    """A file without it does not fit, and is not priced as if it had it."""
    (tmp_path / "fsdp.yaml").write_text(_TRAINER)
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file fsdp.yaml train.py --model_name_or_path meta-llama/Llama-3.1-70B"
        " --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --max_seq_length 8192"
        " --gradient_checkpointing True\n"
    )
    found = json_of(tmp_path, "plan --from run.sh --cluster dgx-h100 --out p.json --json")
    assert (found["now"]["fits"], found["better"]["fits"]) == (False, True)
    (change,) = found["changes"]
    assert change["fields"] == {"accumulate": ["auto", "sharded"]}
    _, findings, _ = phalanx(tmp_path, "lint", "run.sh", "--cluster", "dgx-h100")
    assert "accumulate=sharded fits" in findings
