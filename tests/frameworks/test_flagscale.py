"""FlagScale's files: Megatron's flags in groups, an experiment that names them, and its command."""

from __future__ import annotations

from pathlib import Path

from support.in_process_cli import json_of, phalanx

SETTINGS = """
system:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  sequence_parallel: true
  use_distributed_optimizer: true
  overlap_grad_reduce: false
  precision: {bf16: true}
  checkpoint:
    save_interval: ${experiment.save_steps}
model:
  transformer_impl: transformer_engine
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  group_query_attention: true
  num_query_groups: 8
  seq_length: 8192
  max_position_embeddings: 8192
  swiglu: true
  normalization: RMSNorm
  position_embedding_type: rope
  untie_embeddings_and_output_weights: true
  disable_bias_linear: true
  micro_batch_size: 1
  global_batch_size: 64
  optimizer: {lr_scheduler: {lr: 3.0e-4}}
data:
  tokenizer: {vocab_size: 128256}
"""
EXPERIMENT = """
defaults:
  - train: 8b
  - _self_
experiment:
  exp_name: mine
  task: {type: train, backend: megatron, entrypoint: ./flagscale/train/train_gpt.py}
  runner: {backend: torchrun, nnodes: 4, nproc_per_node: 8}
  envs: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
"""
COMMAND = "python run.py --config-path ./examples/mine/conf --config-name train action=run"


def test_settings_experiment_and_command_say_one_layout(tmp_path: Path) -> None:
    conf = tmp_path / "examples/mine/conf"
    (conf / "train").mkdir(parents=True)
    (conf / "train/8b.yaml").write_text(SETTINGS)
    (conf / "train.yaml").write_text(EXPERIMENT)
    (tmp_path / "run.sh").write_text(COMMAND)
    for words in ("examples/mine/conf/train/8b.yaml --gpus 32", "examples/mine/conf/train.yaml", "run.sh"):
        read = json_of(tmp_path, "read", *words.split(), "--json")
        s = read["strategy"]
        stated = (read["world"], s["dp"], s["tp"], s["pp"], s["zero"], s["sp"], read["job"]["global_batch"])
        assert stated == (32, 4, 4, 2, 1, True, 64), words
        assert read["model"]["num_hidden_layers"] == 32


def test_an_experiment_without_its_settings_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(EXPERIMENT)
    code, _, err = phalanx(tmp_path, "read train.yaml")
    assert (code, "settings are in train/8b.yaml; is not here: give it too" in err) == (2, True)
    (tmp_path / "train").mkdir()
    (tmp_path / "train/8b.yaml").write_text(SETTINGS)
    (tmp_path / "train.yaml").write_text(EXPERIMENT.replace("backend: megatron", "backend: robotics"))
    code, _, err = phalanx(tmp_path, "read train.yaml")
    assert (code, "is not a configuration of a known framework" in err) == (2, True)
