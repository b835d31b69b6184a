from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.cluster import presets as clusters
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.job import Job, Precision, Train
from phalanx.spec.model.families import complete, from_hugging_face
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy import spec
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import AXES, Strategy
from phalanx.spec.strategy.stack_options import StackOptions

ROOT = Path(__file__).parents[2]


def test_the_quickstart_reads_and_round_trips() -> None:
    file = job_file.load(ROOT / "examples" / "quickstart.toml", ["strategy.dp=2", "train.steps=50"])
    assert file.job.global_batch == 24
    assert (file.strategy, file.train.steps, file.train.name) == (Strategy(dp=2), 50, "quickstart")
    tables = json.loads(json.dumps(job_file.to_tables(file)))
    assert job_file.from_tables(tables, Path()) == file


@given(
    st.builds(
        Strategy,
        dp=st.sampled_from([1, 2, 8]),
        zero=st.sampled_from([0, 1, 2, 3]),
        tp=st.sampled_from([1, 2]),
        pp=st.sampled_from([1, 4]),
        micro_batch=st.integers(1, 8),
        recompute=st.sampled_from(["none", "selective", "full", "every:2"]),
        compression=st.sampled_from(["none", "bf16", "topk:0.01", "powersgd:4", "threshold:1e-3"]),
        bucket=st.sampled_from(["auto", 4.0, 0.5]),
        order=st.sampled_from(["pp/dp/cp/tp", "dp/pp/cp/tp", "tp/cp/pp/dp"]),
    )
)
def test_a_strategy_is_its_own_line(given_strategy: Strategy) -> None:
    assert job_file.make_strategy(str(given_strategy)) == given_strategy


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dp", "field=value"),
        ("dpp=2", "did you mean"),
        ("dp=2,dp=4", "given twice"),
        ("dp=0", "at least 1"),
        ("dp=4,zero=1,shard=3", "does not divide"),
        ("dp=4,shard=2", "zero=0 shards nothing"),
        ("cp=4,ulysses=3", "does not divide"),
        ("sp=1", "tp"),
        ("ep=3,dp=4", "does not divide"),
        ("zero=4", "0, 1, 2 or 3"),
        ("recompute=some", "every:k"),
        ("compression=topk", "topk:0.01"),
        ("bucket=-1", "positive"),
        ("order=pp/dp", "once"),
        ("schedule=1f2b", "is not a pipeline schedule; did you mean 1f1b"),
        ("dp=two", "integer"),
    ],
)
def test_wrong_strategies_say_why(line: str, words: str) -> None:
    with pytest.raises(InputError, match=r"^strategy") as error:
        job_file.make_strategy(line)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["pp=2,dp=2,zero=3,reshard=action"])
def test_what_cannot_run_yet_is_refused_by_name(line: str) -> None:
    parsed = job_file.make_strategy(line)
    assert parsed is not None
    with pytest.raises(InputError, match=r"not yet runnable"):
        require_runnable(parsed, Job(2, 8))


@given(st.integers(1, 5000))
def test_divisors(n: int) -> None:
    assert spec.divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_the_mesh_puts_inner_axes_on_neighbours() -> None:
    grid = mesh(Strategy(pp=2, dp=4, zero=3, shard=2, tp=2))
    assert grid.world == 16
    assert grid.group_of(5, "tp") == (4, 5)
    assert grid.group_of(5, "dp_shard") == (5, 7)
    assert grid.group_of(5, "dp_replicate") == (1, 5)
    assert grid.group_of(5, "pp") == (5, 13)
    assert grid.group_of(5, "dp_replicate+dp_shard") == (1, 3, 5, 7)
    assert grid.group_of(5, "embed") == (5, 13)
    assert grid.coordinates(5) == {"pp": 0, "dp_replicate": 1, "dp_shard": 0, "tp": 1}
    assert grid.gradient_axis == "dp_replicate+dp_shard"
    assert mesh(Strategy(dp=4)).gradient_axis == "dp_replicate"
    assert mesh(Strategy(cp=2, dp=2, zero=1)).gradient_axis == "dp_shard+cp"


def test_experts_and_context_fold_into_the_ranks() -> None:
    grid = mesh(Strategy(dp=4, cp=4, ulysses=2, tp=2, ep=4, etp=2, zero=1))
    assert grid.group_of(0, "etp") == (0, 1)
    assert grid.group_of(0, "ep") == (0, 2, 4, 6)
    assert grid.group_of(0, "edp") == (0, 8, 16, 24)
    assert grid.group_of(0, "ulysses") == (0, 2)
    assert grid.group_of(0, "ring") == (0, 4)


@given(st.sampled_from([(2, 4, 1, 2), (1, 6, 2, 1), (4, 2, 2, 2)]), st.permutations(AXES))
def test_groups_of_an_axis_cover_every_rank_once_and_ascend(sizes: tuple[int, ...], order: list[str]) -> None:
    pp, dp, cp, tp = sizes
    grid = mesh(Strategy(pp=pp, dp=dp, cp=cp, tp=tp, zero=1, shard=2, ep=2, order="/".join(order)))
    fused = (grid.gradient_axis, grid.shard_axis, "dp_shard+cp", "tokens", "ep+etp", "dp_replicate+dp_shard+cp+tp")
    for axis in ("pp", "dp_shard", "cp", "tp", *fused, "ep", "edp", "etp", "ring", "ulysses", "world"):
        groups = grid.groups(axis)
        assert np.array_equal(np.sort(groups.ravel()), np.arange(grid.world)), axis
        assert np.all(np.diff(groups, axis=1) > 0), axis  # torch.distributed numbers a group's ranks so
    for rank in range(grid.world):
        assert grid.group_of(rank, grid.shard_axis)[grid.shard(rank)] == rank
    for group in grid.groups("embed"):
        assert [grid.place(int(rank))["pp"] for rank in group] == sorted({0, pp - 1})


def test_an_axis_is_priced_on_the_tier_that_it_spans() -> None:
    grid = mesh(Strategy(dp=4, tp=8))
    cluster = clusters.preset("dgx-h100", nodes=4)
    assert grid.tier("tp", cluster).name == "nvlink"
    assert grid.tier("dp_replicate", cluster).name == "infiniband"


def test_parameter_names_are_unique_and_gpt3_is_golden() -> None:
    sizes = {
        "family": "gpt2",
        "vocab": 50257,
        "hidden": 12288,
        "layers": 96,
        "heads": 96,
        "ffn": 49152,
        "max_seq": 2048,
    }
    model = ModelSpec(**complete(sizes))
    names = [p.fqn for p in parameters(model)]
    assert len(set(names)) == len(names)
    assert model.parameter_count == 174_604_259_328  # worked numbers, G28


def test_hugging_face_configs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    llama = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "attention_dropout": 0.1,
    }
    path.write_text(json.dumps(llama))
    fields, notes = from_hugging_face(path)
    assert ModelSpec(**complete(fields)).parameter_count == 8_030_261_248
    assert notes == ["dropout set to 0 (attention_dropout in config.json)"]
    for broken, words in (
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "t5"}', "'t5' is not supported"),
        ('{"model_type": "gpt2"}', "has no"),
    ):
        path.write_text(broken)
        with pytest.raises(InputError, match=words):
            from_hugging_face(path)
    with pytest.raises(InputError, match="no such file"):
        from_hugging_face(tmp_path / "none.json")


def test_learning_rate_follows_the_batch() -> None:
    train = Train(lr=1.0, lr_scaling="sqrt", lr_base_batch=16)
    assert train.scaled_lr(64) == 2.0
    assert Train(lr=1.0, lr_scaling="linear", lr_base_batch=16).scaled_lr(64) == 4.0
    assert Train(lr=1.0).scaled_lr(64) == 1.0


def test_precision_follows_from_compute() -> None:
    assert Precision("bfloat16").master_dtype == "float32"
    assert Precision("float64").reduce_dtype == "float64"
    assert Precision("bfloat16", reduce="bfloat16").reduce_dtype == "bfloat16"


def test_job_numbers_are_checked() -> None:
    with pytest.raises(InputError, match=r"job\.seq = 0: must be at least 1"):
        Job(global_batch=1, seq=0)


@pytest.mark.parametrize(
    ("given_options", "said"),
    [
        ({"lora": -1}, "must not be negative"),
        ({"optimizer_offload": 2.0}, "must be in"),
        ({"mtp": 17}, "must be at most 16"),
    ],
)
def test_numbers_of_options_are_checked(given_options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"options\.{next(iter(given_options))} = .*: {said}"):
        StackOptions(**given_options)


def test_of_a_long_value_both_ends_are_shown() -> None:
    path = "/home/somebody/" + "folder/" * 20 + "a.jsonl:2"
    said = str(InputError("train.data", path, "is not JSON"))
    assert said.startswith("train.data = '/home/somebody/")
    assert said.endswith("folder/a.jsonl:2': is not JSON")
    assert len(said) < 120
