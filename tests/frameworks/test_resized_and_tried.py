"""A configuration on other ranks than its own, its changes one at a time, and settings in its own release's words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import error_of, json_of, phalanx, text_of

from phalanx.answers.question.read import read as configuration

_EXPERTS = """torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py --bf16 --num-layers 8 --hidden-size 2048
 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128
 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --vocab-size 151936
 --untie-embeddings-and-output-weights --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-router-force-load-balancing --seq-length 4096
 --max-position-embeddings 40960 --micro-batch-size 1 --global-batch-size 256 --expert-model-parallel-size 16
 --use-distributed-optimizer"""
_TITAN = """[job]
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 1
seq_len = 8192
data_parallel_degree = -1
tensor_parallel_degree = {tp}
compile = false
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text(_EXPERTS.replace("\n", " \\\n"))
    return tmp_path


@pytest.fixture
def titan(tmp_path: Path) -> Path:
    (tmp_path / "train.toml").write_text(_TITAN.format(tp=1))
    return tmp_path


def test_fewer_ranks_than_ep_divides_are_planned_with_what_they_have_of_it(experts: Path) -> None:
    """The search starts from ep = 8 and says so; the settings and the export say it too."""
    out = text_of(experts, "plan --from run.sh --cluster dgx-h200 --gpus 8 --out p.json")
    assert out.startswith(
        "assumed: ep=8 in place of ep=16 of the file, which does not divide 8 ranks of dp x cp x tp"
    )
    assert "now: dp=8,zero=1,ep=8" in out
    row = next(line for line in out.splitlines() if "--expert-model-parallel-size" in line)
    assert row.split()[2:4] == ["16", "8"]
    text_of(experts, "export p.json --to megatron --out out")
    assert "--expert-model-parallel-size 8" in (experts / "out" / "train.sh").read_text()


def test_a_file_that_no_gpus_were_named_for_is_refused_as_it_stands(experts: Path) -> None:
    text = (experts / "run.sh").read_text().replace("--nnodes 2", "--nnodes 1")
    (experts / "run.sh").write_text(text)
    assert "ep x etp = 16 x 1 does not divide" in error_of(experts, "predict run.sh --cluster dgx-h200")


_OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}


def test_an_option_of_the_file_is_tried_at_its_default(tmp_path: Path) -> None:
    """optimizer_offload=0 of a file that offloads, as --try, --options and --where."""
    (tmp_path / "ds.json").write_text(json.dumps(_OFFLOADED | {"train_micro_batch_size_per_gpu": 1}))
    question = "ds.json --model llama3-8b --cluster dgx-a100 --gpus 8 --seq 2048"
    tried = json_of(tmp_path, f"plan --from {question} --json --try", "optimizer_offload=0, parameter_offload")
    memory = [x["memory_bytes"] / 2**30 for x in (tried["now"], *tried["changes"])]
    of_state, of_gradients = 12, 2
    assert memory[1] - memory[0] == pytest.approx((of_state + of_gradients) * 8.03e9 / 8 / 2**30, rel=0.01)
    assert memory[2] < memory[0], "a truth value needs no =1"
    given = json_of(tmp_path, f"predict {question} --options optimizer_offload=0 --json")
    assert given["memory_bytes"] / 2**30 == pytest.approx(memory[1])
    assert given["question"]["host_bytes"] == 0
    where = json_of(tmp_path, f"plan --from {question} --where optimizer_offload=0 --json")
    assert where["question"]["host_bytes"] == 0


def test_a_change_without_a_value_is_refused_with_what_it_needs(experts: Path) -> None:
    said = error_of(experts, "plan --from run.sh --cluster dgx-h200 --try", "optimizer_offload")
    assert "has no value; write optimizer_offload=VALUE, such as optimizer_offload=1" in said


def test_tp_is_tried_with_the_sequence_parallelism_that_the_file_asks_for(experts: Path) -> None:
    for flag, refused in (("", True), (" --sequence-parallel", False)):
        (experts / "again.sh").write_text((experts / "run.sh").read_text() + flag)
        tried = json_of(experts, "plan --from again.sh --cluster dgx-h200 --json --try", "tp=2+ep=8")
        assert ("sequence parallelism" in tried["changes"][0]["reason"]) is refused
        assert ("sp=1" in tried["changes"][0]["strategy"].split(",")) is not refused


def test_a_field_that_the_file_leaves_to_follow_another_follows_it(experts: Path) -> None:
    """Megatron's expert tensor parallelism is that of tp, where no flag says it: in tries, and in what to change."""
    text = (experts / "run.sh").read_text().replace("--expert-model-parallel-size 16", "--sequence-parallel")
    text += " --expert-model-parallel-size 2 --tensor-model-parallel-size 4"
    for flag, refused in (("", False), (" --expert-tensor-parallel-size 4", True)):
        (experts / "again.sh").write_text(text + flag)
        tried = json_of(experts, "plan --from again.sh --cluster dgx-h200 --json --try", "tp=2+ep=8")["changes"][0]
        assert ("ep x etp = 8 x 4 does not divide" in tried["reason"]) is refused, tried
        assert refused or "etp=2" in tried["strategy"]
    (experts / "again.sh").write_text(text)
    better = json_of(experts, "plan --from again.sh --cluster dgx-h200 --where ep=2,tp=2,etp=2,pp=1 --json")
    settings = [edit["key"] for change in better["changes"] for edit in change["settings"]]
    assert "--tensor-model-parallel-size" in settings
    assert "--expert-tensor-parallel-size" not in settings


def test_words_of_the_launcher_and_of_the_framework_are_taken(experts: Path) -> None:
    """Short switches that are joined (srun -lu), and Megatron's word for a dispatcher."""
    (experts / "again.sh").write_text("srun -lu -N 2 " + (experts / "run.sh").read_text())
    tried = json_of(experts, "plan --from again.sh --cluster dgx-h200 --json --try", "dispatch=allgather")
    assert not any("lu" in caveat["keys"] for caveat in tried["question"]["caveats"])
    assert tried["changes"][0]["step_time_s"] != tried["now"]["step_time_s"]
    (experts / "again.sh").write_text((experts / "run.sh").read_text().replace("--bf16", ""))
    assert "peak of 16 bits, not of fp32" in text_of(experts, "predict again.sh --cluster dgx-h200")


def test_fp32_that_no_key_asks_for_is_said_with_its_remedy(experts: Path) -> None:
    for word, said in (("", True), ("--bf16", False)):
        (experts / "again.sh").write_text((experts / "run.sh").read_text().replace("--bf16", word))
        err = phalanx(experts, "predict again.sh --cluster dgx-h200")[2]
        assert ("4 bytes an activation; phalanx plan --from FILE --try bf16 prices bf16" in err) is said


def test_the_fewest_gpus_that_would_do_may_be_a_part_of_a_node(tmp_path: Path) -> None:
    ask = "plan --model llama3-8b --cluster pcie-a6000 --gpus {} --batch 4 --seq 8192 --stack torchtitan"
    assert "; 4 of them would do" in error_of(tmp_path, ask.format(2))
    text_of(tmp_path, ask.format(4))


def test_a_file_whose_state_fits_only_on_the_host_is_offered_that(titan: Path) -> None:
    """pytorch/torchtitan#620: 2 x 48 GB, where neither the batch nor recomputation helps."""
    code, out, err = phalanx(titan, "plan --from train.toml --cluster pcie-a6000 --gpus 2")
    assert code == 0, err
    assert "nothing fits without" in err
    row = next(line for line in out.splitlines() if "training.enable_cpu_offload" in line)
    assert row.split()[1:5] == ["training.enable_cpu_offload", "not", "set", "on"]
    assert "; dp=2 fills 2 GPUs" in out


def test_the_optimizer_moves_to_the_host_alone_where_that_suffices(tmp_path: Path) -> None:
    """OpenRLHF/OpenRLHF#698: 8 B on one GPU of 80 GB under ZeRO-2; --adam_offload was the answer."""
    line = (
        "deepspeed --num_gpus 1 --module openrlhf.cli.train_sft --pretrain meta-llama/Meta-Llama-3-8B --zero_stage 2"
    )
    line += " --train_batch_size 1 --micro_train_batch_size 1 --max_len 128 --bf16 --gradient_checkpointing"
    (tmp_path / "run.sh").write_text(line)
    better = json_of(tmp_path, "plan --from run.sh --cluster dgx-a100 --json")["better"]["options"]
    assert better == {"optimizer_offload": 1}


def test_settings_of_an_earlier_release_have_its_names(titan: Path) -> None:
    out = text_of(titan, "plan --from train.toml --cluster pcie-a6000 --gpus 4")
    rows = [line.split() for line in out.splitlines()]
    shards = next(row for row in rows if "training.data_parallel_degree" in row)
    mode = next(row for row in rows if "activation_checkpoint.mode" in row)
    assert shards[1:4] == ["training.data_parallel_degree", "-1", "2"]
    assert mode[1:4] == ["activation_checkpoint.mode", "selective", "full"]
    assert "selective_ac_option" not in out, "which a full mode does not read"


@pytest.mark.parametrize(("tp", "precision"), [(1, "bf16"), (2, "fp32")])
def test_a_release_before_0_3_has_half_types_only_under_fsdp(titan: Path, tp: int, precision: str) -> None:
    (titan / "train.toml").write_text(_TITAN.format(tp=tp))
    asked = "predict train.toml --cluster dgx-h100 --gpus 2 --json"
    assert json_of(titan, asked)["question"]["precision"] == precision
    assert configuration(titan / "train.toml", gpus=2).configuration.within == "dp*cp>1"


def test_what_is_next_names_the_plan_that_was_written(tmp_path: Path) -> None:
    ask = "plan --model llama3-8b --cluster dgx-h100 --gpus 8 --batch 64 --seq 4096 --out other.json"
    assert "next: phalanx explain other.json;" in text_of(tmp_path, ask)


def test_weights_that_ms_swift_converted_name_their_model(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "NPROC_PER_NODE=4 megatron sft --load /app/Qwen3-30B-A3B-Instruct-2507-mcore --train_type lora --lora_rank 8 "
        "--target_modules all-linear --expert_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 16 "
        "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --max_length 3000\n"
    )
    p = json_of(tmp_path, "predict run.sh --cluster pcie-rtx4090 --json")
    adapters = 8 * 3 * (2048 + 768) * 128 * 48 / 2  # of the experts of a rank, which ep halves
    of_experts = adapters * (2 + 4 + 12 / 2) / 2**30  # weight, gradient, and an optimizer over 2 replicas
    assert p["memory_terms"]["state"] / 2**30 == pytest.approx(29.9 + of_experts, abs=0.2)
    assert not p["fits"]
    out = text_of(tmp_path, "plan --from run.sh --cluster pcie-rtx4090")
    assert "pipeline_model_parallel_size" in out
    assert "model.pipeline" not in out


def test_a_stage_of_training_is_not_the_stage_of_zero(tmp_path: Path) -> None:
    """LLaMA-Factory's `stage: sft` has the last name of DeepSpeed's zero_optimization.stage."""
    (tmp_path / "lora.yaml").write_text(
        "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: lora\nlora_target: all\n"
        "deepspeed: ds_z3.json\ncutoff_len: 8000\nper_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 8\nbf16: true\n"
    )
    (tmp_path / "ds_z3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}))
    answer = json_of(tmp_path, "plan --from lora.yaml --cluster pcie-l40s --gpus 4 --json")
    keys = {setting["key"] for change in answer["changes"] for setting in change["settings"]}
    assert "deepspeed_json.zero_optimization.stage" in keys
    assert "stage" not in keys


def test_a_file_that_offloads_is_in_effect_on_one_gpu(tmp_path: Path) -> None:
    """DeepSpeed's stage 3 with parameters on the host: an 8B model trains on a card of 24 GB, slowly."""
    both = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": both, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1})
    )
    question = "ds.json --model llama3-8b --cluster pcie-rtx4090 --gpus 1 --batch 8 --seq 2048"
    answer = json_of(tmp_path, f"predict {question} --json")
    assert answer["fits"]
    assert answer["question"]["strategy"].startswith("zero=3")
    assert "shards nothing" not in text_of(tmp_path, f"predict {question}")
    improved = json_of(tmp_path, f"plan --from {question} --json")
    assert improved["now"]["fits"]
    assert not improved["refused"]


@pytest.mark.parametrize(("more", "offered"), [("", True), ("finetuning_type: lora\nlora_target: all\n", False)])
def test_an_export_is_offered_where_there_is_one(more: str, offered: bool, tmp_path: Path) -> None:
    """Adapters are in a program's code: no export has them."""
    (tmp_path / "ds_z3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    (tmp_path / "sft.yaml").write_text(
        f"model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\n{more}deepspeed: ds_z3.json\ncutoff_len: 2048\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n"
    )
    said = text_of(tmp_path, "plan --from sft.yaml --cluster dgx-h100 --gpus 8")
    assert ("phalanx export writes the whole" in said) == offered
    assert "together: with all changes above" in said
