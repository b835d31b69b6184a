"""Pipeline schedules from a user's CSV files, in a strategy: priced, searched, proved, trained and exported as named
ones are, or refused with the reason."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support import pipeline_cases, toy_model
from support.in_process_cli import phalanx
from support.rank_pool import Pool

import phalanx as face
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule, round_robin, v_shape
from phalanx.schedule.pipeline.proof import prove
from phalanx.schedule.pipeline.schedules import SCHEDULES, build, facts_of
from phalanx.schedule.pipeline.torch_csv import to_csv
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy

JOB = {"model": "opt1.3b", "cluster": "dgx-h100", "gpus": 8, "batch": 32, "seq": 2048, "stack": "phalanx"}

MODEL = """[model]
family = "llama"
vocab = 512
hidden = 32
layers = 6
heads = 4
kv_heads = 2
ffn = 64
max_seq = 64
"""


def drawn(seed: int, ranks: int, m: int) -> PipelineSchedule:
    """A schedule that can run: every rank does, in turn, any pass whose input is there."""
    rng = Random(seed)
    rank_of = rng.choice([round_robin(ranks), round_robin(ranks, 2), v_shape(ranks)])
    split, last = rng.random() < 0.5, len(rank_of) - 1
    backward = "I" if split else "B"
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[tuple[str, int, int]] = set()
    left = {(kind, c, i) for kind in ("FIW" if split else "FB") for c in range(last + 1) for i in range(m)}
    while left:
        ready = [
            (kind, c, i)
            for kind, c, i in sorted(left)
            if (kind == "F" and (c == 0 or ("F", c - 1, i) in done))
            or (kind == backward and ("F", c, i) in done and (c == last or (backward, c + 1, i) in done))
            or (kind == "W" and ("I", c, i) in done)
        ]
        kind, c, i = rng.choice(ready)
        actions[rank_of[c]].append(Action(kind, c, i))  # type: ignore[arg-type]
        done.add((kind, c, i))
        left.remove((kind, c, i))
    return PipelineSchedule("drawn", m, rank_of, tuple(map(tuple, actions)))


def written(path: Path, s: PipelineSchedule) -> Strategy:
    """Write a schedule to a file, and return the strategy that names it."""
    path.write_text(to_csv(s))
    facts = facts_of(str(path))
    return Strategy(pp=s.ranks, schedule=str(path), virtual=facts.chunks if facts.takes_virtual else 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_named_schedule_costs_the_same_from_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    s = written(path, build(name, 4, 8))
    line = f"dp=2,pp=4,micro_batch=2,virtual={s.virtual}"
    ours, its = (face.predict(**JOB, strategy=f"{line},schedule={n}") for n in (name, path))  # type: ignore[arg-type]
    assert its.step_time_s == pytest.approx(ours.step_time_s, rel=1e-12)
    assert its.memory_bytes == pytest.approx(ours.memory_bytes, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_program_of_any_schedule_is_the_plans(tmp_path: Path, seed: int) -> None:
    """Recorded = predicted: collectives, messages, passes in order, FLOPs and live bytes."""
    ranks, m = 2 + seed % 2 * 2, 3 + 2 * seed
    path = tmp_path / "drawn.csv"
    s = written(path, drawn(seed, ranks, m))
    job = path.with_name("job.toml")
    job.write_text(
        MODEL
        + f"""
[cluster]
preset = "dgx-h100"
[job]
global_batch = {m * 8 // ranks}
seq = 16
[strategy]
dp = {8 // ranks}
pp = {ranks}
virtual = {s.virtual}
schedule = "{path}"
"""
    )
    checked = face.verify(job)
    assert checked.proved


def test_gradients_of_drawn_schedules_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    for seed in range(6):
        ranks, m = 2 + seed % 2, 3 + seed % 3
        s = written(tmp_path / f"{seed}.csv", drawn(seed, ranks, m))
        job, spec = Job(m, 8, Precision("float64")), toy_model.model(layers=2 * ranks, tied=True)
        schedule = stages.schedule(s, m)
        assert max(pool.run(ranks, pipeline_cases.run_by_us, spec, job, s, schedule)) < 1e-12


def test_a_search_takes_the_file_that_it_is_given(tmp_path: Path) -> None:
    """And without it never finds one."""
    path = tmp_path / "mine.csv"
    written(path, build("zb-v", 2, 8))
    kept = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "batch": 32, "seq": 8192, "stack": "torchtitan"}
    found = face.plan(**kept, strategy=f"dp=4,pp=2,schedule={path}")  # type: ignore[arg-type]
    assert found.strategy.schedule == str(path)
    free = face.plan(**kept, strategy="dp=4,pp=2")  # type: ignore[arg-type]
    assert free.strategy.schedule in SCHEDULES


def test_what_no_strategy_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    s = build("1f1b", 2, 2)
    Path("size.csv").write_text(to_csv(s))
    first, second = s.actions
    Path("stuck.csv").write_text(to_csv(replace(s, actions=(first[::-1], second))))
    Path("odd.csv").write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    base = "predict --model opt1.3b --cluster dgx-h100 --gpus 2 --batch 2 --seq 128 --stack phalanx --strategy"
    for strategy, said in (
        ("pp=2,schedule=size.csv,micro_batch=2", "size.csv is a schedule of 2 pipeline ranks and 2 micro-batches"),
        ("pp=2,schedule=stuck.csv", "is not proved: rank 0: 0B1 comes before 0F1"),
        ("pp=2,schedule=odd.csv", "has chunks on ranks 0, 0, 1: neither dealt out in turns nor in a V"),
        ("pp=2,schedule=none.csv", "no such file"),
        ("pp=2,schedule=1f2b", "did you mean 1f1b?"),
        ("pp=2,schedule=size.csv,virtual=2", "size.csv has one chunk per rank"),
    ):
        code, out, err = phalanx(tmp_path, f"{base} {strategy}")
        assert (code, out) == (2, ""), strategy
        assert said in err
    code, _, err = phalanx(tmp_path, f"{base.replace('phalanx', 'megatron-core')} pp=2,schedule=size.csv")
    assert code == 2
    assert "is not in the stack, which has 1f1b, interleaved" in err


def test_a_file_that_changes_under_a_program_is_refused(tmp_path: Path) -> None:
    """Prices that were taken would be of the other schedule."""
    path = tmp_path / "mine.csv"
    written(path, build("1f1b", 2, 2))
    path.write_text(to_csv(build("gpipe", 2, 2)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputError, match="has changed since this program read it"):
        facts_of(str(path))


def test_torchtitan_takes_the_file_and_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    s = build("interleaved", 2, 8)
    written(Path("mine.csv"), s)
    line = "--model llama3-8b --cluster dgx-h100 --gpus 8 --batch 32 --seq 8192 --stack torchtitan"
    keep = "dp=4,zero=3,pp=2,virtual=2,schedule=mine.csv"
    assert phalanx(tmp_path, f"plan model {line} --strategy {keep} --out plan.json")[0] == 0
    assert phalanx(tmp_path, "export plan.json --to torchtitan --out exported")[0] == 0
    assert Path("exported/pipeline_schedule.csv").read_text() == to_csv(s)
    again = face.read("exported")
    assert (again.layout.schedule, again.layout.virtual) == ("exported/pipeline_schedule.csv", 2)
    ours, its = face.predict("plan.json"), face.predict("exported", cluster="dgx-h100")
    assert its.step_time_s == pytest.approx(ours.step_time_s, rel=1e-12)
    Path("exported/pipeline_schedule.csv").unlink()
    (missing,) = (caveat for caveat in face.read("exported").caveats if caveat.kind == "missing")
    assert missing.reason.startswith("pipeline_schedule.csv, its pipeline schedule, is not here")


def test_files_and_names_in_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    s = drawn(7, 2, 4)
    Path("mine.csv").write_text(to_csv(s))
    code, out, _ = phalanx(tmp_path, "pipeline table mine.csv 1f1b --ranks 2 --micro-batches 4")
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("mine.csv", "1f1b"))]
    assert code == 0
    assert [row[0] for row in rows] == ["mine.csv", "1f1b"]
    assert int(rows[0][-1]) == prove(s).messages
