"""Replicas are compared to the bit, and who differs in what is named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import rank_cases
from support.forked_cli import phalanx
from support.rank_pool import Pool
from support.sizes import combined, sampled

from phalanx.runtime.data_parallel.replica_check import checksum
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}
MODEL = build(ModelSpec, complete({**SIZES, "tied": True}), "model")
JOB = Job(8, 8)
UP = "blocks.1.mlp.up.weight"
NORM = "blocks.0.norm1.weight"


STRATEGIES = (
    [Strategy(dp=2)]
    + [Strategy(dp=4, zero=zero, shard=shard) for zero in (1, 2, 3) for shard in (None, 2)]  # type: ignore[arg-type]
    + [Strategy(dp=2, zero=3, reshard="step"), Strategy(tp=2), Strategy(dp=2, tp=2, zero=3)]
)


@pytest.mark.parametrize(
    ("strategy", "how"), combined(STRATEGIES, [("float32", "shm"), ("bfloat16", "native")]), ids=str
)
def test_replicas_of_a_right_program_are_equal(pool: Pool, strategy: Strategy, how: tuple[str, str]) -> None:
    compute, transport = how
    job = replace(JOB, precision=Precision(compute))  # type: ignore[arg-type]
    found = pool.run(strategy.world, rank_cases.compared, MODEL, job, strategy, transport, {})
    assert found == [("", 0)] * strategy.world


@pytest.mark.parametrize(
    ("strategy", "spoiled", "said"),
    sampled(
        [
            (Strategy(dp=2), {1: f"weight {UP}"}, f"{UP} (rank 0 against rank 1)"),
            (Strategy(dp=3), {1: f"weight {UP}"}, f"{UP} (rank 1 against ranks 0, 2)"),
            (Strategy(dp=2, zero=1), {0: f"weight {UP}"}, f"{UP} (rank 0 against rank 1)"),
            (Strategy(dp=4, zero=2), {3: f"weight {UP}"}, f"{UP} (rank 3 against ranks 0, 1, 2)"),
            # ranks 0 and 2 hold one shard, 1 and 3 the other one
            (Strategy(dp=4, zero=2, shard=2), {2: f"weight {UP}"}, f"{UP} (rank 2 against ranks 0, 1, 3)"),
            (Strategy(dp=4, zero=3, shard=2), {2: f"master {UP}"}, f"the master of {UP} (rank 0 against rank 2)"),
            (Strategy(dp=2, zero=3), {1: "buffer cos"}, "buffer cos (rank 0 against rank 1)"),
            # ranks 0 and 2 hold one half of it, 1 and 3 the other one
            (Strategy(dp=2, tp=2), {2: f"weight {UP}"}, f"{UP} (rank 0 against rank 2)"),
            (Strategy(tp=2), {1: f"weight {NORM}"}, f"{NORM} (rank 0 against rank 1)"),
            (Strategy(dp=2, tp=2, zero=3), {3: f"master {NORM}"}, f"the master of {NORM} (rank 2 against rank 3)"),
        ],
        (1, 4, 5, 6, 9),
    ),
    ids=str,
)
def test_one_bit_is_named_on_every_rank(pool: Pool, strategy: Strategy, spoiled: dict[int, str], said: str) -> None:
    job = Job(12, 8)
    for words, _ in pool.run(strategy.world, rank_cases.compared, MODEL, job, strategy, "native", spoiled):
        assert words == f"replicas hold different bits in {said}"


@pytest.mark.parametrize(
    ("strategy", "who"),
    [(Strategy(dp=2), "rank 0 against rank 1"), (Strategy(dp=4, zero=1, shard=2), "rank 0 against rank 2")],
)
def test_masters_of_another_type_count_too(pool: Pool, strategy: Strategy, who: str) -> None:
    job = replace(JOB, precision=Precision("bfloat16"))
    for words, _ in pool.run(strategy.dp, rank_cases.compared, MODEL, job, strategy, "native", {0: f"master {UP}"}):
        assert words == f"replicas hold different bits in the master of {UP} ({who})"


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.randoms(), st.integers(0, 31))
def test_a_checksum_is_exact_whatever_the_order_and_sees_every_bit(values: list[float], random, bit: int) -> None:  # type: ignore[no-untyped-def]
    whole = torch.tensor(values)
    bits = whole.view(torch.int32).tolist()
    assert int(checksum(whole)) == sum(bits)
    random.shuffle(bits)
    shuffled = torch.tensor(bits, dtype=torch.int32)
    assert int(checksum(shuffled.view(torch.float32))) == sum(bits)
    shuffled[0] ^= -(2**31) if bit == 31 else 2**bit
    assert int(checksum(shuffled)) != sum(bits)


def test_a_checksum_does_not_depend_on_how_it_is_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, dtype=torch.float64)
    tensor[7] = math.nan
    whole = int(checksum(tensor))
    monkeypatch.setattr("phalanx.runtime.data_parallel.replica_check._SLICE_ELEMENTS", 64)
    assert int(checksum(tensor)) == whole


@pytest.mark.usefixtures("measured")
def test_a_run_ends_where_its_replicas_part(tmp_path: Path) -> None:
    from support.quick_runs import JOB as TOML
    from support.quick_runs import TEXT

    (tmp_path / "job.toml").write_text(TOML.replace("save_every = 10", "save_every = 2"))
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("train", "job.toml", "--set", "train.check_sync=3")
    code, _, err = phalanx(tmp_path, *words, instead={"phalanx.training.worker": "support.diverging_replica"})
    assert code == 1, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: rank ")
    assert "failed during comparison of the replicas: ReplicasDiffer: after step 3 replicas hold different" in last
    assert last.endswith("bits in head.norm.weight (rank 0 against rank 1)")
    # What was saved is of before.
    assert [p.name for p in (tmp_path / "runs" / "job" / "checkpoint").iterdir()] == ["step-00000002"]
