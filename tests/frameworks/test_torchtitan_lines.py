"""torchtitan's own script and configurations, which people name and do not paste."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import error_of, json_of, text_of

from phalanx.cost.analytic.profile import profile
from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

_8B = "./torchtitan/models/llama3/train_configs/llama3_8b.toml"


def _read(tmp_path: Path, text: str, world: int | None = None) -> Configuration:
    (tmp_path / "run.sh").write_text(text)
    return files.read([tmp_path / "run.sh"], world=world)[0]


@pytest.mark.parametrize(
    ("text", "world", "wanted"),
    [
        (f'CONFIG_FILE="{_8B}" ./run_train.sh --training.local_batch_size=2', None, (8, 8, 1, 2)),
        (f"NGPU=4 CONFIG_FILE={_8B} uv run --no-sync ./run_train.sh", None, (4, 4, 1, 1)),
        (f"CONFIG_FILE={_8B} ./run_train.sh --parallelism.tensor_parallel_degree 4", 64, (64, 16, 4, 1)),
        (f"srun --nodes 2 --ntasks-per-node 1 bash run_train.sh --job.config_file {_8B}", None, (16, 16, 1, 1)),
        (f"torchrun --nproc_per_node 2 -m torchtitan.train --job.config_file {_8B}", None, (2, 2, 1, 1)),
    ],
)
def test_a_line_that_names_what_torchtitan_ships_is_read(
    text: str, world: int | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    c = _read(tmp_path, text, world)
    x = c.layout
    assert (x.world, x.dp, x.tp, x.micro_batch) == wanted
    assert (x.seq, x.recompute, c.stack, c.missing) == (8192, "selective", "torchtitan-eager", ())
    assert c.spec is not None
    assert c.spec.layers == 32
    assert any("is not here: it is taken as that of pytorch/torchtitan" in note for note in c.notes)


def test_a_file_that_is_here_comes_first(tmp_path: Path) -> None:
    (tmp_path / "llama3_8b.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 3\nseq_len = 64\n'
        "[parallelism]\ntensor_parallel_degree = 2\n"
    )
    c = _read(tmp_path, f"CONFIG_FILE={_8B} ./run_train.sh")
    assert (c.layout.micro_batch, c.layout.seq, c.layout.tp) == (3, 64, 2)


def test_another_script_of_that_name_is_asked_for(tmp_path: Path) -> None:
    for start in ("", "bash ", "bash -x "):
        (tmp_path / "run.sh").write_text(f"{start}./run_train.sh --tensor-model-parallel-size 2 --num-layers 4\n")
        said = error_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8")
        assert "./run_train.sh: which it runs, is not here: the layout may be in it; give it too" in said


def test_the_script_names_a_function_of_the_registry(tmp_path: Path) -> None:
    """pytorch/torchtitan 9810191b, run_train.sh: MODULE and CONFIG."""
    (tmp_path / "run.sh").write_text("NGPU=4 MODULE=qwen3 CONFIG=qwen3_14b ./run_train.sh\n")
    said = error_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100")
    assert "torchtitan/models/qwen3/config_registry.py::qwen3_14b" in said
    assert "give it too" in said
    c = _read(tmp_path, "NGPU=4 MODULE=qwen3 CONFIG=qwen3_14b ./run_train.sh")
    assert c.layout.world == 4


_16B = """
[job]
[model]
name = "deepseek_v3"
flavor = "16B"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
expert_parallel_degree = 8
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
components = ["loss"]
"""
_16B_MODEL = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    "max_position_embeddings": 163840, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
}  # fmt: skip


def test_its_16b_model_of_experts_takes_as_long_as_published(tmp_path: Path) -> None:
    """8 H100, pytorch/torchtitan#1789: steps 10 to 40 have 11,254 to 11,758 tokens/s a GPU. Attention is
    FlexAttention, and nothing balances the router."""
    (tmp_path / "16b.toml").write_text(_16B)
    (tmp_path / "config.json").write_text(json.dumps(_16B_MODEL))
    question = ("predict", "16b.toml", "--gpus", "8", "--cluster", "dgx-h100", "--model", "config.json", "--json")
    answer = json_of(tmp_path, *question)
    assert (answer["question"]["options"]["attention"], answer["question"]["options"]["routing"]) == (
        "flex",
        "learned",
    )
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(11_580, rel=0.1)


@pytest.mark.parametrize(
    ("backend", "kernel"), [("", None), ('attn_backend="flex"', "flex"), ('attn_backend="varlen"', "flash3")]
)
def test_the_registry_names_attentions_kernel(backend: str, kernel: str | None, tmp_path: Path) -> None:
    (tmp_path / "registry.py").write_text(
        "from torchtitan.models.llama3 import model_registry\n"
        "def small() -> Trainer.Config:\n"
        f'    return Trainer.Config(model_spec=model_registry("8B", {backend}))\n'
    )
    c = files.read([tmp_path / "registry.py::small"], world=8)[0]
    assert c.options.get("attention") == kernel
    assert profile("torchtitan").portable == 3


@pytest.mark.parametrize(("kernel", "kept"), [("flex", True), ("flash3", False)])
def test_an_export_loses_no_kernel_of_attention(kernel: str, kept: bool, tmp_path: Path) -> None:
    """FlexAttention is what the registry of its release makes; varlen would be a change of the model's code."""
    asked = "plan --model llama3-8b --cluster dgx-h100 --gpus 8 --batch 8 --seq 2048 --stack torchtitan"
    json_of(tmp_path, f"{asked} --options attention={kernel} --out p.json --json")
    export = "export p.json --to torchtitan --out out"
    if kept:
        text_of(tmp_path, export)
    else:
        assert "options.attention = 'flash3'" in error_of(tmp_path, export)
