"""axolotl's YAML: accelerate's tables under names of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import json_of

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

_HEAD = "base_model: x\nmicro_batch_size: 1\nsequence_len: 16384\n"
_FSDP = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true, auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"


def _read(tmp_path: Path, text: str, world: int | None = None) -> Configuration:
    (tmp_path / "a.yaml").write_text(_HEAD + text)
    return files.read([tmp_path / "a.yaml"], world=world)[0]


def test_an_empty_engine_of_axolotl_is_none(tmp_path: Path) -> None:
    c = _read(tmp_path, "deepspeed:\nfsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}\n")
    assert (c.stack, c.layout.zero, c.options["parameter_offload"]) == ("accelerate", 3, True)
    c = _read(tmp_path, "deepspeed:\nfsdp:\nfsdp_config:\n")
    assert (c.stack, c.layout.zero) == ("accelerate", None)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ("dp_shard_size: 4\ncontext_parallel_size: 2\n", (1, 2, 4)),
        ("dp_replicate_size: 2\ndp_shard_size: 2\ntensor_parallel_size: 2\n", (2, 1, 2)),
        ("sequence_parallel_degree: 8\n", (1, 8, None)),  # before 0.12
    ],
)
def test_the_mesh_of_axolotl_is_read(sizes: str, wanted: tuple[int, int, int | None], tmp_path: Path) -> None:
    c = _read(tmp_path, sizes + _FSDP, 8)
    assert (c.layout.tp, c.layout.cp, c.layout.shard) == wanted
    assert (c.layout.zero, c.not_modelled, c.unknown) == (3, {}, {})


@pytest.mark.parametrize(
    ("more", "gathers"),
    [("sample_packing: true\n", True), ("", False), ("sample_packing: true\nring_attn_func: batch_ring\n", False)],
)
def test_packed_sequences_gather_keys(more: str, gathers: bool, tmp_path: Path) -> None:
    c = _read(tmp_path, f"context_parallel_size: 2\n{more}{_FSDP}", 8)
    assert (c.options.get("context") == "all_gather") is gathers


def test_the_type_is_that_of_gpus_unless_one_is_named(tmp_path: Path) -> None:
    for line, wanted in (("bf16: auto\n", "bf16"), ("", "bf16"), ("fp16: true\n", "fp16"), ("bf16: false\n", None)):
        assert _read(tmp_path, line + _FSDP).layout.precision == wanted


@pytest.mark.parametrize(
    ("name", "given", "layers", "said"),
    [
        ("NousResearch/Llama-2-70b-chat-hf", False, 80, "69B parameters: the former is left aside"),
        ("NousResearch/Llama-2-70b-chat-hf", True, 3, "69B parameters: the former is taken"),
        ("./out/Llama-2-70b-hf", False, 3, "the former is taken"),  # the folder that it is in
        ("somebody/none-such", False, 3, ""),
    ],
)
def test_a_model_that_is_named_and_known_comes_before_another_next_to_the_file(
    name: str, given: bool, layers: int, said: str, tmp_path: Path
) -> None:
    sizes = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = json.dumps(sizes | {"vocab_size": 1000, "intermediate_size": 512})
    where = tmp_path / name if name.startswith(".") else tmp_path
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(text)
    (tmp_path / "a.yml").write_text(f"base_model: {name}\nmicro_batch_size: 1\nsequence_len: 64\nbf16: true\n")
    c = files.read([tmp_path / "a.yml", *([tmp_path / "config.json"] if given else [])])[0]
    assert c.spec is not None
    assert c.spec.layers == layers
    of_two = [note for note in c.notes if "which the file names" in note]
    assert (len(of_two), said in "".join(of_two)) == (bool(said), True)


@pytest.mark.parametrize(
    ("more", "each"),
    [
        ("optimizer: adamw_torch_fused\n", 2 + 2 + 4),
        ("optimizer: adamw_bnb_8bit\n", 2 + 2 + 2),
        ("optimizer: adamw_bnb_8bit\nrandom_init: true\n", 2 + 4 + 4 + 2),
    ],
)
def test_a_model_that_is_trained_whole_is_of_the_type_that_it_is_loaded_in(
    tmp_path: Path, more: str, each: int
) -> None:
    """axolotl-ai-cloud/axolotl#602: OpenLLaMA of 3.43 B took 21 GB in a half type with moments in 8 bits: 6 bytes a
    parameter. #2412: SmolLM2 of 1.7 B, made at random, did not fit 80 GB at 16,384 tokens."""
    lines = "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 2048\nbf16: true\n"
    (tmp_path / "a.yml").write_text(lines + "gradient_checkpointing: true\nflash_attention: true\n" + more)
    answer = json_of(tmp_path, "predict a.yml --gpus 1 --cluster dgx-a100 --json")
    parts = answer["state"]["parts"]
    assert sum(part["bytes_per_parameter"] for part in parts) == pytest.approx(each, rel=0.02)
