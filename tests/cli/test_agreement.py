"""All commands about one file agree: what overlaps, what each setting brings, what is compared and exported."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of, phalanx, text_of

from phalanx.planning.lookup import model_named

ON = "--cluster dgx-h100 --gpus 128"
T3 = """torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py --num-layers 80 --hidden-size 8192
 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192
 --max-position-embeddings 8192 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
 --vocab-size 128256 --untie-embeddings-and-output-weights --tensor-model-parallel-size 8
 --pipeline-model-parallel-size 4 --sequence-parallel --micro-batch-size 1 --global-batch-size 512 --bf16
 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1""".replace("\n", " ")
TRAINING = """ --train-iters 100000 --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2000
 --tokenizer-type Llama3Tokenizer --data-path /data/text_document --split 990,8,2 --save /ckpt/$USER/l70b
 --save-interval 500 --eval-interval 1000 --eval-iters 10 --seed 4321""".replace("\n", " ")


def asked(folder: Path, words: str, command: str) -> dict[str, Any]:
    """Return what a command prints about a script of these words."""
    (folder / "t3.sh").write_text(words)
    return json_of(folder, f"{command} {ON} --json")


def test_what_is_hidden_is_what_the_flags_hide(tmp_path: Path) -> None:
    """By hand: of a block's 14 collectives under full recomputation, Megatron without userbuffers hides the two
    reduce-scatters of inputs' gradients and the two gathers that only weight gradients read."""
    assert _hidden(tmp_path, T3) == {"tp": pytest.approx(4 / 14, abs=0.005), "dp": 0, "pp": 0}
    assert _hidden(tmp_path, f"{T3} --overlap-grad-reduce")["dp"] > 0.3
    assert _hidden(tmp_path, f"{T3} --tp-comm-overlap")["tp"] > 0.5


def _hidden(folder: Path, words: str) -> dict[str, float]:
    rows = asked(folder, words, "tables comm t3.sh")["tables"][0]["rows"]
    return {row["axis"]: row["hidden"] for row in rows if row["hidden"] is not None}


_EXPERTS = " --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(("more", "parts"), [("", {"tp", "dp", "pp"}), (_EXPERTS, {"tp", "dp", "ep, etp", "pp"})])
def test_what_is_exposed_is_one_figure(tmp_path: Path, more: str, parts: set[str]) -> None:
    """`explain` and `tables comm` say the same of each axis; experts' own tensor parallelism waits as their tokens
    do; and what other work covers is not said to be covered by nothing."""
    rows = {r["axis"]: r for r in asked(tmp_path, T3 + more, "tables comm t3.sh")["tables"][1]["rows"]}
    explained = asked(tmp_path, T3 + more, "explain t3.sh")
    exposed = {a["axis"]: a["exposed_s"] for a in explained["communication"]}
    assert rows.keys() == parts
    for axes, row in rows.items():
        assert sum(exposed[a] for a in axes.split(", ")) == pytest.approx(row["exposed_s"]), axes
        assert not (row["covered_s"] and row["what_can_cover_it"].startswith("nothing")), axes
    share = sum(exposed.values()) / explained["prediction"]["step_time_s"]
    figures = {f["name"]: f["value"] for f in explained["targets"]}
    assert figures["exposed communication"] == pytest.approx(share)


_FLAGS = ("--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather")


@pytest.mark.parametrize("first", [T3, f"{T3} --use-distributed-optimizer"])
def test_more_overlap_is_never_slower(tmp_path: Path, first: str) -> None:
    for more in _FLAGS:
        if "gather" in more and "optimizer" not in first:
            continue
        plain = asked(tmp_path, first, "predict t3.sh")
        overlapped = asked(tmp_path, f"{first} {more}", "predict t3.sh")
        assert overlapped["step_time_s"] < plain["step_time_s"], more


def test_lint_knows_what_explain_and_plan_save(tmp_path: Path) -> None:
    found = {f["name"]: f["remedy"] for f in _findings(tmp_path, T3)}
    assert "recompute=none saves 27%" in found["needless-recompute"]
    assert "--tp-comm-overlap" in found["faster-setting"]
    assert "zero=1" in found["less-memory"]
    every = " ".join(found.values())
    explained = asked(tmp_path, T3, "explain t3.sh")
    now = explained["prediction"]["step_time_s"]
    for n in explained["neighbours"]:
        if n["fits"] and n["step_time_s"] < 0.95 * now:
            assert f"{n['change'].split(' ')[0]}=" in every, n
    for change in asked(tmp_path, T3, "plan --from t3.sh")["changes"]:
        if change["alone"] and change["alone"]["fits"] and change["alone"]["step_time_s"] < 0.95 * now:
            assert any(f"{name}=" in every for name in change["fields"]), change


def _findings(folder: Path, words: str) -> list[dict[str, Any]]:
    (folder / "t3.sh").write_text(words)
    code, out, err = phalanx(folder, f"lint t3.sh {ON} --json")
    assert (code, err) == (1, "")
    return json.loads(out)["findings"]  # type: ignore[no-any-return]


def _arguments(script: str) -> dict[str, str]:
    """Return the arguments of a train.sh by name, their values as one text."""
    body = re.search(r"ARGUMENTS=\(\n(.*?)\n\)", script, re.DOTALL)
    assert body is not None
    words = [w for line in body[1].splitlines() if not line.strip().startswith("#") for w in shlex.split(line)]
    result: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            result[word] = []
        else:
            result[list(result)[-1]].append(word)
    return {name: " ".join(values) for name, values in result.items()}


def test_an_export_keeps_what_trains_the_model(tmp_path: Path) -> None:
    """The changes that `plan --from` lists are the only differences between the file and the export."""
    found = asked(tmp_path, T3 + TRAINING, "plan --from t3.sh")
    text = text_of(tmp_path, "export plan.json --to megatron --out x")
    assert "--recompute-granularity: full -> " in text
    now = _arguments("ARGUMENTS=(\n" + (T3 + TRAINING).partition("pretrain_gpt.py ")[2] + "\n)")
    script = (tmp_path / "x/train.sh").read_text()
    better = _arguments(script)
    changed = {e["key"] for change in found["changes"] for e in change["settings"]}
    differ = {name for name in now | better if _number(now.get(name)) != _number(better.get(name))}
    assert differ <= changed
    assert {"--lr", "--lr-warmup-iters", "--seed", "--data-path"} <= better.keys() & now.keys()
    assert '--save "/ckpt/$USER/l70b"' in script
    assert "FILL-IN" not in script.replace("MEGATRON:-FILL-IN", "").replace("FILL-IN*", "")
    needs = {"--overlap-param-gather": ("--overlap-grad-reduce", "--use-distributed-optimizer")}
    needs |= {"--tp-comm-overlap": ("--sequence-parallel",)}
    for name, others in needs.items():
        assert name not in better or better.keys() >= set(others)


def _number(text: str | None) -> float | str | None:
    try:
        return text if text is None else float(text)
    except ValueError:
        return text


def test_the_export_of_a_better_plan_has_its_price(tmp_path: Path) -> None:
    better = asked(tmp_path, T3 + TRAINING, "plan --from t3.sh")["better"]
    _ = text_of(tmp_path, "export plan.json --to megatron --out x")
    again = json_of(tmp_path, f"predict x {ON} --json")
    assert again["step_time_s"] == pytest.approx(better["step_time_s"], rel=1e-6)
    assert again["memory_bytes"] == pytest.approx(better["memory_bytes"], rel=1e-6)


def test_changes_are_tried_side_by_side(tmp_path: Path) -> None:
    """Each row is what `predict` says of the file with that change; what has no price says why."""
    line = "fp8, zero=1, zero=3, seq=32768, gpus=256, chip=b200, recompute=none+zero=1"
    found = asked(tmp_path, T3, f"plan --from t3.sh --try {line.replace(' ', '')}")
    rows = {row["change"]: row for row in found["changes"]}
    assert list(rows) == line.split(", ")
    assert not (tmp_path / "plan.json").exists()
    same = {
        "fp8": f"{ON} --precision fp8",
        "zero=1": f"{ON} --strategy tp=8,sp=1,pp=4,zero=1,recompute=full,layers=20/20/20/20",
        "seq=32768": f"{ON} --seq 32768 --set model.max_seq=32768",
        "gpus=256": "--cluster dgx-h100 --gpus 256",
        "chip=b200": "--cluster dgx-b200 --gpus 128",
    }
    for change, words in same.items():
        predicted = json_of(tmp_path, f"predict t3.sh {words} --json")
        assert rows[change]["step_time_s"] == pytest.approx(predicted["step_time_s"], rel=1e-9), change
        assert rows[change]["memory_bytes"] == pytest.approx(predicted["memory_bytes"], rel=1e-9), change
    assert "use zero=0 or zero=1" in rows["zero=3"]["reason"]
    assert (rows["zero=3"]["step_time_s"], rows["zero=3"]["memory_bytes"], rows["zero=3"]["fits"]) == (
        None,
        None,
        False,
    )
    for wrong, said in (
        ("fp9", "did you mean fp8"),
        ("gpus=many", "is not a whole number"),
        (",", "names no change"),
    ):
        assert said in error_of(tmp_path, "plan --from t3.sh --cluster dgx-h100 --try", wrong)


def test_a_field_of_the_model_is_set_wherever_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "t3.sh").write_text(T3)
    model = "--model llama3-70b --cluster dgx-h100 --gpus 64 --batch 64 --seq 32768 --set model.max_seq=32768"
    line = "--strategy tp=8,pp=4,zero=1,recompute=full"
    for command in ("predict", "explain", "tables comm", "tables memory", "compare tp=4,recompute=full"):
        _ = json_of(tmp_path, f"{command} {model} {'tp=8,pp=4' if 'compare' in command else line} --json")
    assert json_of(tmp_path, f"plan {model} {line} --json")
    half = json_of(tmp_path, f"predict t3.sh {ON} --set model.layers=40 --json")
    assert half["step_time_s"] < 0.6 * json_of(tmp_path, f"predict t3.sh {ON} --json")["step_time_s"]
    assert "set model.max_seq=32768" in error_of(tmp_path, f"predict {model.partition(' --set')[0]} {line}")
    assert "did you mean max_seq" in error_of(tmp_path, f"predict t3.sh {ON} --set model.max_sq=1")
    assert "is not a field of the model" in error_of(tmp_path, f"predict t3.sh {ON} --set job.seq=1")
    assert "has its model already" in error_of(tmp_path, "predict plan.json --set model.max_seq=1")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.3-70b", 70_553_706_496),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen2.5-72b", 72_706_203_648),
        ("mixtral-8x22b", 140_620_634_112),
        ("gemma3-27b", 27_009_346_304),
    ],
)
def test_models_that_people_train_have_short_names(name: str, parameters: int) -> None:
    model, _ = model_named(name)
    assert model.parameter_count == parameters
    assert model.max_seq > 8192


_TRAINER = """torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --data_path ./d.json --bf16
 --output_dir ./out --num_train_epochs 3 --per_device_train_batch_size 2 --gradient_accumulation_steps 8
 --learning_rate 2e-5 --weight_decay 0.05 --warmup_ratio 0.03 --lr_scheduler_type cosine --save_steps 2000 --seed 7
 --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap Qwen2DecoderLayer --model_max_length 2048
 --gradient_checkpointing True --optim adamw_torch_fused""".replace("\n", " ")


def test_an_export_of_a_trainer_keeps_what_trains_the_model(tmp_path: Path) -> None:
    found = asked(tmp_path, _TRAINER, "plan --from t3.sh --gpus 8")["better"]
    said = text_of(tmp_path, "export plan.json --to accelerate --out x")
    given = json.loads((tmp_path / "x/training_arguments.json").read_text())
    same = {"num_train_epochs": 3, "learning_rate": 2e-5, "weight_decay": 0.05, "warmup_ratio": 0.03, "seed": 7}
    same |= {"lr_scheduler_type": "cosine", "save_steps": 2000, "optim": "adamw_torch_fused"}
    assert {name: given[name] for name in same} == same
    assert not given["gradient_checkpointing"]  # which the better plan leaves out
    script = (tmp_path / "x/train.sh").read_text()
    for line in ("DATA_PATH:-./d.json}", "LR:-2e-05}", "CHECKPOINTS:-./out}", "TRAIN_ITERS:--1}"):
        assert line in script
    assert "As t3.sh has it: " in said
    again = json_of(tmp_path, "predict x --cluster dgx-h100 --json")
    assert again["step_time_s"] == pytest.approx(found["step_time_s"], rel=1e-6)


def test_what_a_program_does_in_its_own_code_is_not_exported_as_training_all_of_one_model(tmp_path: Path) -> None:
    for more, option in (("--use_peft --lora_r 8", "lora"), ("--rl dpo", "reference")):
        (tmp_path / "run.sh").write_text(f"{_TRAINER} {more}")
        _ = text_of(tmp_path, "read run.sh --cluster dgx-h100 --out plan.json")
        assert f"options.{option} = " in error_of(tmp_path, "export plan.json --to accelerate --out x")


def test_an_export_of_a_file_of_tables_keeps_what_trains_the_model(tmp_path: Path) -> None:
    tables = {
        "general": {"seed": 7},
        "optimizer": {"zero_stage": 1, "learning_rate_scheduler": {"learning_rate": 3e-4, "lr_warmup_steps": 20}},
        "parallelism": {"dp": 4, "tp": 2, "pp": 1},
        "tokens": {"micro_batch_size": 2, "batch_accumulation_per_replica": 4, "sequence_length": 2048},
        "tokenizer": {"tokenizer_name_or_path": "meta-llama/Llama-2-7b-hf"},
    }
    tables["optimizer"]["learning_rate_scheduler"]["min_decay_lr"] = 3e-5
    tables["tokens"]["train_steps"] = 500
    (tmp_path / "c.json").write_text(json.dumps(tables))
    _ = text_of(tmp_path, "read c.json --model llama2-7b --cluster dgx-h100 --out plan.json")
    _ = text_of(tmp_path, "export plan.json --to nanotron --out x")
    script, config = ((tmp_path / "x" / name).read_text() for name in ("train.sh", "config.yaml"))
    for line in ("LR:-0.0003}", "MIN_LR:-3e-05}", "TRAIN_ITERS:-500}", "TOKENIZER:-meta-llama/Llama-2-7b-hf}"):
        assert line in script
    assert "lr_warmup_steps: 20" in config
    assert "seed: 7" in config


@pytest.mark.parametrize("kernel", ["eager", "flash_attention_2"])
def test_an_export_keeps_the_kernel_of_attention(tmp_path: Path, kernel: str) -> None:
    line = "deepspeed --num_gpus 8 train.py --deepspeed d.json --model_name_or_path meta-llama/Llama-3.1-8B --bf16 "
    line += f"--per_device_train_batch_size 1 --max_seq_length 4096 --attn_implementation {kernel}"
    (tmp_path / "run.sh").write_text(line)
    (tmp_path / "d.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    text_of(tmp_path, "read run.sh --cluster dgx-h100 --out plan.json")
    text_of(tmp_path, "export plan.json --to deepspeed --out x")
    assert json.loads((tmp_path / "x/training_arguments.json").read_text())["attn_implementation"] == kernel
    assert "attn_implementation=attention)" in (tmp_path / "x/train.py").read_text()
    planned, exported = (json_of(tmp_path, f"predict {it} --json") for it in ("plan.json", "x --cluster dgx-h100"))
    assert planned["terms_s"]["attention"] == pytest.approx(exported["terms_s"]["attention"])
    assert planned["step_time_s"] == pytest.approx(exported["step_time_s"])
