"""Pipelines that run: torch's runtime executes our schedules, ours executes torch's, what lives is what the schedule
says, and a rank that fails is named."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import pipeline_cases, toy_model
from support.forked_cli import phalanx
from support.in_process_cli import text_of
from support.quick_runs import rows, wait_for_step
from support.rank_pool import Pool
from support.sizes import combined, sampled
from support.struck_runs import Stroke, begin, folder_of_runs, nothing_is_left, train, words
from torch.distributed.pipelining import schedules as torchs

from phalanx.answers.schedules.pipeline import of_run
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.actions import Action, live_activations
from phalanx.schedule.pipeline.proof import prove
from phalanx.schedule.pipeline.schedules import SCHEDULES, build
from phalanx.schedule.pipeline.simulate import insert_sends
from phalanx.schedule.pipeline.torch_csv import from_csv, to_csv
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy


@pytest.mark.parametrize("ranks", sampled([2, 3], (1,)))
def test_torch_executes_our_schedules(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Those it gives sends and receives itself, and those that have ours."""
    cases: list[tuple[Path, Any, tuple[int, ...], int]] = []
    for name in SCHEDULES:
        plain = build(name, ranks, 2 * ranks)
        for form, s in (("compute_only", plain), ("compute_comms", insert_sends(plain))):
            path = tmp_path / f"{name}.{form}.csv"
            path.write_text(to_csv(s))
            cases.append((path, form, s.rank_of, s.micro_batches))
    for errors in pool.run(ranks, pipeline_cases.run_by_torch, cases):
        assert len(errors) == len(cases)
        assert max(errors) < 1e-12


THEIRS: list[tuple[str, str]] = [
    ("ScheduleInterleaved1F1B", "interleaved"),
    ("ScheduleLoopedBFS", "interleaved"),
    ("ScheduleInterleavedZeroBubble", "interleaved"),
    ("ScheduleZBVZeroBubble", "zb-v"),
    ("ScheduleDualPipeV", "dualpipe-v"),
]


def strategy(pp: int, schedule: Any, layers: int) -> Strategy:
    """Every chunk has as many blocks."""
    s = Strategy(pp=pp, schedule=schedule, virtual=2 if schedule == "interleaved" else 1)
    chunks = len(stages.rank_of(s))
    return replace(s, layers="/".join([str(layers // chunks)] * chunks))


@pytest.mark.parametrize(("theirs", "form"), combined(THEIRS, ["compute_only", "compute_comms"]))
def test_we_execute_torchs_schedules(pool: Pool, tmp_path: Path, theirs: tuple[str, str], form: str) -> None:
    """As torch writes them; over the chunks of a schedule of ours."""
    name, like = theirs
    ranks = 3 if form == "compute_only" else 2
    m, path = 2 * ranks, tmp_path / "torch.csv"
    stage: Any = SimpleNamespace(num_stages=2 * ranks, group_size=ranks, group_rank=0, submod=None)
    getattr(torchs, name)([stage, stage], m)._dump_csv(str(path), form)
    s = from_csv(path)
    if form == "compute_only":
        s = insert_sends(s)
    prove(s)
    job, spec = Job(m, 8, Precision("float64")), toy_model.model(layers=2 * ranks, tied=True)
    assert max(pool.run(ranks, pipeline_cases.run_by_us, spec, job, strategy(ranks, like, 2 * ranks), s)) < 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_lives_is_what_the_schedule_holds(pool: Pool, name: str) -> None:
    """Memory itself, after every action: never more activations than were proved, inputs free after I, what was sent
    when the next message goes, and nothing is left."""
    ranks, m = 2, 6
    s = strategy(ranks, name, 4)
    spec, job = toy_model.model(layers=4), Job(m, 8)
    schedule = stages.schedule(s, m)
    bound = prove(schedule).peak
    for rank, (*found, (_, left)) in enumerate(pool.run(ranks, pipeline_cases.live_memory, spec, job, s)):
        own = schedule.actions[rank]
        assert tuple(action for action, _ in found) == own
        inputs: set[tuple[int, int]] = set()
        whole: set[tuple[int, int]] = set()
        for (kind, *of), (_, (into, out_of, sent)), count in zip(own, found, live_activations(own), strict=True):
            at = of[0], of[1]
            if kind == "F":
                inputs.add(at)
                whole.add(at)
            inputs -= {at} if kind in "BI" else set()
            whole -= {at} if kind in "BW" else set()
            assert (into, out_of) == (inputs, whole), (rank, kind, at)
            assert len(out_of) == count
            assert len(sent) == len({a[:2] for a in sent})
        assert max(len(out_of) for _, (_, out_of, _) in found) == bound[rank]
        assert left == [set(), set(), set()]


@pytest.mark.parametrize("name", sampled(["1f1b", "interleaved", "zb-v"], (2,)))
def test_what_is_not_finite_is_named_where_it_arose(pool: Pool, name: str) -> None:
    """On whichever rank it is, and not where it spread to: every rank has it in the end."""
    spec, job = toy_model.model(layers=4, tied=True), Job(4, 8)
    said = pool.run(2, pipeline_cases.origins, spec, job, strategy(2, name, 4))
    assert said[0] == said[1]
    for n, (output, weight, rank) in enumerate(said[0]):
        at = f"on rank {rank} (pp {rank}) in micro-batch 0 is not finite"
        assert output.startswith(f"output of blocks.{n} {at}"), output
        assert weight.startswith(f"weight blocks.{n}.norm2.weight {at}"), weight


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, measured: None) -> Path:
    return folder_of_runs(tmp_path_factory.mktemp("pipelines"))


def test_a_stage_that_fails_is_named_and_the_run_goes_on(here: Path) -> None:
    """One raises, one is killed, one is stopped: rank, place and action are said. The run goes on, is interrupted,
    and goes on over another layout."""
    strokes: tuple[Stroke, ...] = (
        ("raise", 1, "forward of chunk 1 of micro-batch 2", 4),
        ("SIGKILL", 0, "gradients of weights of chunk 0 of micro-batch 1", 2),
        ("SIGSTOP", 1, "gradients of inputs of chunk 1 of micro-batch 3", 1),
    )
    pipeline = ("--strategy", "pp=2,schedule=zb-h1,micro_batch=2")
    code, err = train(here, "struck", strokes, *pipeline, "--max-restarts", "2")
    assert code == 1, err
    first, second, last = (line for line in err.splitlines() if line.startswith(("restart ", "error: ")))
    assert (
        f"rank 1 (pp 1) failed during {strokes[0][2]}: RuntimeError: struck; the run continues from step 2" in first
    )
    assert f"rank 0 (pp 0) failed during {strokes[1][2]}: ended with SIGKILL" in second
    missed = "message B of chunk 1, micro-batch 3 (8192 bytes, rank 1 to rank 0)"
    assert last.startswith(f"error: rank 1 (pp 1) has not arrived at {missed}: last seen in {strokes[2][2]}, "), err
    assert last.count("(its process is stopped); rank 0 has been waiting for ") == 1

    process = begin(here, *words("struck", *pipeline, "--resume", "--set", "train.steps=100000"))
    run = here / "runs" / "struck"
    wait_for_step(run, 6)
    process.signal(signal.SIGINT)
    code, _, err = process.finish()
    assert code == 130, err
    assert "state saved" in err
    assert nothing_is_left(here)
    pipeline = of_run(run)
    measured, predicted = pipeline.measured.priced, pipeline.predicted.priced
    assert measured.schedule == predicted.schedule
    assert 0 <= measured.bubble_fraction < 1
    ran: dict[Action, tuple[float, float]] = {}
    for own, times in zip(measured.schedule.actions, measured.times, strict=True):
        ran |= zip(own, times, strict=True)
    for (kind, chunk, m), (start, _) in ran.items():
        if kind == "F" and chunk:
            assert start >= ran[Action("F", chunk - 1, m)][1] - 1e-3  # another process looks at the clock
    steps = rows(run)[-1]["step"] + 2
    other = ("--resume", "--strategy", "dp=2,micro_batch=2", "--set", f"train.steps={steps}")
    code, err = train(here, "struck", (), *other)
    assert code == 0, err
    assert [row["step"] for row in rows(run)] == list(range(1, steps + 1))


def test_ranks_that_use_their_groups_in_other_orders_meet(here: Path) -> None:
    """The first rank begins with what its embedding sends over tp, the next one with a message. In new processes:
    those of the pool have met."""
    settings = ("strategy.pp=2", "strategy.tp=2", "cluster.ranks=4", "train.transport=native", "train.timeout_s=30")
    words = [word for item in settings for word in ("--set", item)]
    text_of(here, "parity job.toml --steps 1", *words, run=phalanx)
