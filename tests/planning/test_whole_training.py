"""The whole training in every answer: as long as the file says in its own words, or as is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import json_of, phalanx

import phalanx as library
from phalanx.answers.search.whole_training import cheapest, require_in_time
from phalanx.planning.budget import Goal
from phalanx.planning.training_cost import TrainingLosses, training_cost
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

_MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --micro-batch-size 1 "
    "--global-batch-size 64 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--num-query-groups 8 --group-query-attention --swiglu --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 128256 --bf16 --sequence-parallel --use-distributed-optimizer "
)
_TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 4096
steps = 1000
[parallelism]
data_parallel_shard_degree = 8
"""
_COMPOSER = """max_seq_len: 4096
max_duration: 1000ba
global_train_batch_size: 64
device_train_microbatch_size: 1
precision: amp_bf16
model:
  name: mpt_causal_lm
  d_model: 2048
  n_heads: 16
  n_layers: 24
  vocab_size: 50368
fsdp_config:
  sharding_strategy: FULL_SHARD
"""
_FILES = {
    "run.sh": (_MEGATRON + "--train-iters 1000", "train-iters"),
    "samples.sh": (_MEGATRON + "--train-samples 64000", "train-samples"),
    "job.toml": (_TITAN, "training.steps"),
    "mpt.yaml": (_COMPOSER, "max_duration"),
}
_ON = ("--cluster", "dgx-h100", "--gpus", "8")


@pytest.mark.parametrize("name", _FILES)
def test_a_file_says_how_long_it_trains(tmp_path: Path, name: str) -> None:
    text, by = _FILES[name]
    (tmp_path / name).write_text(text)
    p = json_of(tmp_path, "predict", name, *_ON, "--json")
    training = p["training"]
    assert (p["training_from"], training["steps"], training["tokens"]) == (by, 1000, 1000 * 64 * 4096)
    assert training["days"] == pytest.approx(1000 * p["step_time_s"] / 86_400)
    assert training["gpu_hours"] == pytest.approx(8 * 24 * training["days"])
    assert p["expense"]["money"] == pytest.approx(training["gpu_hours"] * p["rates"]["price"])
    shown = phalanx(tmp_path, "predict", name, *_ON)[1]
    assert "whole training" in shown
    assert f"1,000 steps, 262.1M tokens (by {by})" in shown


def test_tokens_asked_for_are_the_same_training_everywhere(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(_MEGATRON + "--train-iters 1000")
    asked = ("run.sh", *_ON, "--tokens", "100B", "--rates", "price=2", "--json")
    p = json_of(tmp_path, "predict", *asked)
    better = json_of(tmp_path, "plan", "--from", *asked)
    tried = json_of(tmp_path, "plan", "--from", *asked, "--try", "fp8")
    assert p["training_from"] == "tokens"
    assert p["training"]["steps"] == pytest.approx(1e11 / (64 * 4096))
    assert p["expense"]["money"] == pytest.approx(2 * p["training"]["gpu_hours"])
    for now in (better["now"], tried["now"]):
        assert now["training"] == pytest.approx(p["training"]), now
        assert now["expense"]["money"] == pytest.approx(p["expense"]["money"])
    saved = better["now"]["training"]["days"] / better["better"]["training"]["days"]
    assert saved == pytest.approx(better["now"]["step_time_s"] / better["better"]["step_time_s"])
    assert "the whole training: 100B tokens: 381,470 steps" in phalanx(tmp_path, "plan", "--from", *asked[:-1])[1]


def test_a_plan_that_improves_a_file_trains_as_long(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(_MEGATRON + "--train-iters 1000")
    phalanx(tmp_path, "plan", "--from", "run.sh", *_ON, "--out", "better.json")
    assert json_of(tmp_path, "predict", "better.json", "--json")["training"]["steps"] == 1000


def test_nothing_is_said_where_nothing_says_it() -> None:
    ask = dict(model="llama3-8b", cluster="dgx-h100", gpus=8, batch=64, seq=4096, strategy="tp=8")
    p = library.predict(**ask)  # type: ignore[arg-type]
    assert p.training is None
    assert p.expense is not None
    assert p.expense.of == "a million tokens"
    uneven = library.predict(**ask, lengths="lognormal:1200,1.1+padded", tokens="1B")  # type: ignore[arg-type]
    assert uneven.training is not None
    assert uneven.lengths is not None
    assert uneven.training.days == pytest.approx(1e9 / uneven.tokens_per_s / 86_400)
    assert uneven.training.steps == pytest.approx(1e9 / (uneven.tokens_per_s * uneven.step_time_s))


def test_the_cheapest_offer_meets_the_deadline_and_where_none_does_the_fastest_is_taken() -> None:
    offered = [
        (name, SimpleNamespace(days=days), SimpleNamespace(money=money, energy_kwh=1.0, carbon_kg=1.0, gpu_hours=1.0))
        for name, days, money in (("many", 2.0, 90.0), ("some", 5.0, 60.0), ("few", 9.0, 50.0))
    ]
    for deadline, name in ((None, "few"), (9.0, "few"), (6.0, "some"), (2.0, "many"), (1.0, "many")):
        assert cheapest(offered, "money", deadline)[0] == name  # type: ignore[arg-type]


@given(dp=st.integers(1, 64), wanted=st.floats(0.02, 0.99), share=st.sampled_from([1.0, 0.9, 0.5]))
@settings(max_examples=60)
def test_the_gpus_that_would_meet_a_deadline_do_and_a_replica_less_would_not(
    dp: int, wanted: float, share: float
) -> None:
    """Two GPUs a replica, and as much is lost of each step on any number of them."""
    lost = TrainingLosses(share, 0.0, 0.0, 1 - share, 0.0, 0.0, 0.0, 3600.0, 0)
    goal, pricing = Goal(1e9, 2 * dp), SimpleNamespace(job=SimpleNamespace(global_batch=64, seq=4096))

    def days(replicas: int) -> float:
        return training_cost(goal, 64 * 4096, 30.0 * dp / replicas, lost).days

    deadline = days(dp) * wanted
    with pytest.raises(InputError, match="GPUs would do") as error:
        require_in_time(goal, pricing, Strategy(dp=dp, tp=2), 30.0, deadline, lambda *_: lost)  # type: ignore[arg-type]
    (named,) = re.findall(r"about ([\d,]+) GPUs would do", str(error.value))
    replicas = int(named.replace(",", "")) // 2
    assert days(replicas) <= deadline < days(replicas - 1) * (1 + 1e-9)
    require_in_time(goal, pricing, Strategy(dp=replicas, tp=2), 30.0 * dp / replicas, deadline, lambda *_: lost)  # type: ignore[arg-type]
