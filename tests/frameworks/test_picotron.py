"""picotron's JSON: every degree is stated, and the model is a published one with sizes of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

BASE: dict[str, Any] = {
    "distributed": {"tp_size": 2, "cp_size": 1, "pp_size": 2, "dp_size": 2, "pp_engine": "1f1b", "use_cpu": False},
    "model": {"name": "meta-llama/Llama-2-7b-hf", "dtype": "bfloat16", "use_fused_adam": True},
    "training": {"seq_length": 1024, "micro_batch_size": 4, "gradient_accumulation_steps": 32, "max_tokens": None},
    "dataset": {"name": "roneneldan/TinyStories"},
    "environment": {"FLASH_ATTEN": "1", "OMP_NUM_THREADS": "1"},
}


def _write(folder: Path, **tables: dict[str, Any]) -> None:
    config = {name: {**BASE[name], **tables.get(name, {})} for name in BASE}
    (folder / "c.json").write_text(json.dumps(config))


def _read(folder: Path, **tables: dict[str, Any]) -> Configuration:
    _write(folder, **tables)
    return files.read([folder / "c.json"])[0]


def test_a_file_says_layout_model_and_types(tmp_path: Path) -> None:
    c = _read(tmp_path)
    s = c.layout
    assert (c.kind, c.unknown, dict(c.not_modelled)) == ("picotron", {}, {})
    assert (s.world, s.dp, s.tp, s.pp, s.cp, s.zero, s.schedule) == (8, 2, 2, 2, 1, 0, "1f1b")
    assert (s.micro_batch, s.accumulation, s.global_batch, s.seq) == (4, 32, 256, 1024)
    assert c.options == {"attention": "flash2", "update": "fused"}
    assert c.job["types"] == {"reduce": "float32", "accumulate": "float32", "master": "bfloat16"}
    assert c.spec is not None
    assert (c.spec.layers, c.spec.tied, c.spec.max_seq) == (32, False, 1024)
    assert "every tp rank gathers all logits" in " ".join(c.notes)


def test_sizes_engine_and_kernel_are_those_of_the_file(tmp_path: Path) -> None:
    c = _read(
        tmp_path,
        model={"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "use_fused_adam": False},
        distributed={"cp_size": 2, "pp_engine": "afab"},
    )
    assert c.spec is not None
    assert (c.spec.layers, c.spec.heads, c.spec.kv_heads, c.spec.head_dim) == (16, 16, 4, 256)
    assert (c.layout.schedule, c.layout.world) == ("gpipe", 16)
    assert c.options == {"attention": "unfused", "update": "foreach"}
    alone = _read(tmp_path, distributed={"dp_size": 1})
    assert alone.job["types"]["accumulate"] == "bfloat16"


def test_its_launch_line_names_it_and_its_price_is_near_its_readmes(tmp_path: Path) -> None:
    """README.md: 38 % MFU of Llama 2 7B on 64 H100."""
    _write(tmp_path, distributed={"dp_size": 16})
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 8 --nnodes 8 train.py --config c.json")
    assert 0.36 < json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100", "--json")["mfu"] < 0.42


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"model": {"name": "mine/unheard-of"}}, "mine/unheard-of"),
        ({"model": {"num_attention_heads": 5}}, "does not divide the hidden size"),
        ({"distributed": {"tp_size": "two"}}, "distributed.tp_size: is missing, or no count"),
        ({"distributed": {"pp_engine": "1f2b"}}, "is not an engine of picotron"),
    ],
)
def test_what_cannot_be_priced_gets_one_line(tmp_path: Path, table: dict[str, Any], said: str) -> None:
    _write(tmp_path, **table)
    assert said in error_of(tmp_path, "predict", "c.json", "--cluster", "dgx-h100")


@pytest.mark.parametrize("name", ["micro_batch_size", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [0, -4, 2.5, "four", [4], 10**30])
def test_a_batch_that_is_no_count_is_one_line(tmp_path: Path, name: str, value: object) -> None:
    _write(tmp_path, training={name: value})
    for command in ("read c.json", "predict c.json --cluster dgx-h100", "lint c.json --cluster dgx-h100"):
        assert f"training.{name} = {value!r}: is no count" in error_of(tmp_path, command)
