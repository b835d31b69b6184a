"""Templates of manifests, services beside a training, words over files elsewhere, programs of OpenRLHF."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.in_process_cli import error_of

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

_SERVICE = """apiVersion: apps/v1
kind: Deployment
metadata: {name: rendezvous}
spec: {template: {spec: {containers: [{name: etcd, image: etcd, command: [etcd, --data-dir, /d]}]}}}
---
"""
_JOB = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: REPLICAS
      template: {spec: {containers: [{name: t, command: [torchrun, --nproc_per_node=8, --nnodes=2, pretrain_gpt.py,
        --tensor-model-parallel-size=2, --num-layers=4, --micro-batch-size=1],
        resources: {limits: {nvidia.com/gpu: 8}}}]}}
"""


def _read(tmp_path: Path, text: str, name: str) -> Configuration:
    (tmp_path / name).write_text(text)
    return files.read([tmp_path / name])[0]


@pytest.mark.parametrize("name", ["job.yaml", "job.yaml-template", "job.yaml.j2"])
def test_a_manifest_of_any_name_with_a_service_is_read(tmp_path: Path, name: str) -> None:
    c = _read(tmp_path, f"# rendered\n{_SERVICE}{_JOB.replace('REPLICAS', '2')}", name)
    assert (c.layout.world, c.layout.tp, c.layout.micro_batch) == (16, 2, 1)


@pytest.mark.parametrize("count", ["$NUM_NODES", "${NUM_NODES}"])
def test_a_count_that_is_not_filled_in_is_not_one(tmp_path: Path, count: str) -> None:
    (tmp_path / "job.yaml-template").write_text(_JOB.replace("REPLICAS", count))
    said = error_of(tmp_path, "read", "job.yaml-template")
    assert f"whose count is {count}" in said
    assert "envsubst" in said


def test_an_export_of_ms_swift_under_megatron_trains_nothing(tmp_path: Path) -> None:
    line = "NPROC_PER_NODE=4 megatron export --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --to_hf"
    (tmp_path / "run.sh").write_text(f"{line} true\n{line} false\n")
    assert "trains nothing" in error_of(tmp_path, "read", "run.sh")


def test_open_options_of_a_launcher_leave_known_ranks(tmp_path: Path) -> None:
    program = "pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 4"
    for before, said in (
        ("srun $AUTO_RESUME torchrun --nnodes 1 --nproc_per_node 4", "they are open"),
        ("torchrun $AUTO_RESUME --nproc_per_node 4", "they are open, and so are its ranks"),
    ):
        c = _read(tmp_path, f"{before} {program}", "run.sh")
        assert any(note.endswith(f"its launcher: {said}") for note in c.notes)


def test_words_of_nemo_s_launcher_are_not_torchtitan_s(tmp_path: Path) -> None:
    line = (
        "python3 main.py stages=[training] training=gpt3/5b training.trainer.num_nodes=2 training.model.seq_len=8\n"
    )
    (tmp_path / "run.sh").write_text(line)
    assert "is of NeMo's launcher" in error_of(tmp_path, "read", "run.sh")


@pytest.mark.parametrize(
    ("program", "micro", "reference"), [("sft", 2, None), ("dpo", 4, "copy"), ("kto", 2, "copy-kl"), ("rm", 2, None)]
)
def test_programs_of_openrlhf_are_read_by_their_own_flags(
    tmp_path: Path, program: str, micro: int, reference: str | None
) -> None:
    line = f"deepspeed --num_gpus 8 --module openrlhf.cli.train_{program} --pretrain a/b --train.micro_batch_size 2"
    c = _read(tmp_path, f"{line} --ds.zero_stage 3 --data.max_len 128", "run.sh")
    assert (c.layout.world, c.layout.zero, c.layout.seq, c.layout.micro_batch) == (8, 3, 128, micro)
    assert c.options.get("reference") == reference
    assert ("args.stage" in c.not_modelled) is (program == "rm")


def test_fields_of_megatron_under_verl_have_its_verdicts(tmp_path: Path) -> None:
    at = "actor_rollout_ref.actor.megatron"
    line = (
        "python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml"
        f" {at}.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.nnodes=1"
        f" +{at}.override_transformer_config.recompute_granularity=full"
        f" +{at}.override_transformer_config.moe_enable_deepep=True +{at}.override_transformer_config.moe_typo=1"
    )
    c = _read(tmp_path, line, "run.sh")
    assert [key.rpartition(".")[2] for key in c.unknown] == ["moe_typo"]
    assert any(key.endswith("moe_enable_deepep") for key in c.not_modelled)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.sh",
            "python3 -m paxml.main --exp=paxml.tasks.lm.params.lm_cloud.LmCloudSpmd2B --job_log_dir=gs://x",
            "Paxml",
        ),
        ("a.sh", "train_esm2 --num-gpus 8 --micro-batch-size 32 --num-layers 33 --hidden-size 1280", "BioNeMo"),
    ],
)
def test_programs_that_are_not_read_are_named_with_what_to_write(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    error = error_of(tmp_path, f"read {name}")
    assert f"is of {said}" in error
    assert "--strategy dp=" in error
    assert error.count("\n") <= 1


@pytest.mark.parametrize(
    "line",
    ["--module openrlhf.cli.train_sft --pretrain a/b", "main.py --lora_dim 0 --model_name_or_path a/b --deepspeed"],
)
def test_programs_that_make_deepspeeds_own_optimizer_update_in_one_kernel(tmp_path: Path, line: str) -> None:
    """openrlhf/utils/deepspeed/deepspeed.py:118: FusedAdam; transformers' Trainer makes torch's AdamW."""
    c = _read(tmp_path, f"deepspeed --num_gpus 8 {line} --zero_stage 2", "run.sh")
    assert "update" not in c.options
    assert not any("no optimizer is named" in note for note in c.notes)


def test_deepspeed_chat_has_its_own_length_and_batch(tmp_path: Path) -> None:
    """deepspeedai/DeepSpeedExamples#387: a V100 of 32 GB runs 8 sequences of 512, and not the default of 16."""
    line = "deepspeed --num_gpus 1 main.py --model_name_or_path facebook/opt-1.3b --zero_stage 2 --lora_dim 128"
    c = _read(tmp_path, f"{line} --only_optimize_lora --deepspeed", "run.sh")
    assert (c.layout.seq, c.layout.micro_batch, c.layout.zero) == (512, 16, 2)
    assert not c.unknown


@pytest.mark.parametrize(
    ("before", "degrees", "world"),
    [
        ("", "--tensor_model_parallel_size 4 --pipeline_model_parallel_size 2", None),
        ("", "", 1),
        ("NPROC_PER_NODE=8 NNODES=4", "--tensor_model_parallel_size 4 --pipeline_model_parallel_size 2", 32),
    ],
)
def test_ranks_that_the_environment_sets_are_open_where_one_is_too_few(
    tmp_path: Path, before: str, degrees: str, world: int | None
) -> None:
    """modelscope/ms-swift#9403: 32 NPUs, which the platform's environment says, and the posted line does not."""
    c = _read(tmp_path, f"{before} megatron sft --model Qwen/Qwen3-235B-A22B {degrees}", "run.sh")
    assert c.layout.world == world
