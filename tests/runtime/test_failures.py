"""Ranks that die, hang or find no room: who is named, what is left, what goes on. A rank is struck where it says what
it does (tests/support/killed_rank.py), so every case is the same each time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import rank_cases
from support.forked_cli import Launcher
from support.quick_runs import TEXT, rows, wait_for_step
from support.rank_pool import Pool
from support.sizes import sampled
from support.struck_runs import Stroke, begin, folder_of_runs, nothing_is_left, train, words

from phalanx.runs.resume import strategy_for_ranks
from phalanx.runtime.checkpoint.store import intact_steps
from phalanx.runtime.process import agent, status
from phalanx.runtime.process.status import StatusPage
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.strategy.spec import Strategy


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, measured: None) -> Path:
    return folder_of_runs(tmp_path_factory.mktemp("failures"))


@pytest.fixture(scope="module")
def straight(here: Path) -> list[dict[str, Any]]:
    """The steps of a short run left alone."""
    code, err = train(here, "straight", (), "--set", "train.timeout_s=100")
    assert code == 0, err
    return rows(here / "runs" / "straight")


def test_a_run_survives_what_kills_its_ranks(here: Path, straight: list[dict[str, Any]]) -> None:
    """Struck in one phase after the other it goes on from its last checkpoint, and ends with the bits of a run left
    alone."""
    strokes: tuple[Stroke, ...] = (
        ("SIGKILL", 0, "start-up", 1),
        ("SIGSTOP", 1, "forward", 3),
        ("SIGKILL", 0, "writing the checkpoint", 2),
        ("SIGKILL", 1, "backward", 5),
    )
    code, err = train(here, "struck", strokes, "--max-restarts", str(len(strokes)))
    assert code == 0, err
    restarts = [line for line in err.splitlines() if line.startswith("restart ")]
    assert len(restarts) == len(strokes), err
    for i, (line, (name, rank, text, _)) in enumerate(zip(restarts, strokes, strict=True), 1):
        assert line.startswith(f"restart {i} of {len(strokes)}: rank {rank} "), line
        assert f"failed during {text}" in line if name == "SIGKILL" else f"last seen in {text}" in line
        assert name == "SIGSTOP" or "SIGKILL" in line
    assert "has not arrived at " in restarts[1]
    assert restarts[1].count("(its process is stopped)") == 1
    assert "; rank 0 has been waiting for " in restarts[1]
    froms = [line.rsplit("; the run ", 1)[1] for line in restarts]
    assert froms[:2] == ["starts over: nothing was saved yet"] * 2
    # The step whose checkpoint was being written is lost, the one before it is not.
    assert froms[2] == "continues from step 2"
    assert froms[2:] == sorted(froms[2:])
    first = err.rsplit(froms[-1] + "\n", 1)[1].split()[:2]  # that the last attempt tells of
    assert first == ["step", f"{int(froms[-1].split()[-1]) + 1}/8"]
    struck = rows(here / "runs" / "struck")
    assert [row["step"] for row in struck] == list(range(1, 9))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in struck] == [row[key] for row in straight]


def test_replicas_that_step_alone_go_on_from_their_last_synchronisation(here: Path) -> None:
    """A replica that is killed between two of them takes the steps since then with it, and nothing else: parameters,
    outer momentum, residuals and what fragments have sent are those of a run left alone."""
    alone = (
        "--strategy",
        "dp=2,local=4,compression=int4",
        "--set",
        "train.save_every=4",
        "--set",
        "train.check_sync=4",
    )
    alone += ("--set", "job.outer.fragments=2", "--set", "job.outer.mix=0.5")
    code, err = train(here, "alone", (), *alone)
    assert code == 0, err
    code, err = train(here, "lost", (("SIGKILL", 1, "backward", 22),), *alone, "--max-restarts", "1")
    assert code == 0, err
    (restart,) = [line for line in err.splitlines() if line.startswith("restart ")]
    assert "rank 1 (dp_local 1) failed during backward" in restart
    assert restart.endswith("the run continues from step 4")
    for key in ("step", "loss", "grad_norm"):
        assert [row[key] for row in rows(here / "runs" / "lost")] == [
            row[key] for row in rows(here / "runs" / "alone")
        ]


def test_nobody_waits_for_a_rank_that_has_not_begun(here: Path) -> None:
    """It would wait for the meeting, and then take the time that others are given to save what they have."""
    code, err = train(
        here, "early", (("SIGKILL", 0, "start-up", 1),), "--set", "train.timeout_s=1000", grace_s=1000.0
    )
    assert code == 1, err
    assert err.strip().splitlines()[-1].startswith("error: rank 0 failed during start-up: ended with SIGKILL"), err


@pytest.mark.parametrize("transport", sampled(["native", "p2p", "shm"], (0, 2)))
def test_a_rank_that_dies_in_a_collective_is_named(here: Path, transport: str) -> None:
    more = ("--set", f"train.transport={transport}", "--strategy", "dp=2,zero=2,micro_batch=2")
    code, err = train(here, transport, (("SIGKILL", 1, "reduce_scatter", 7),), *more)
    last = err.strip().splitlines()[-1]
    assert code == 1, err
    assert last.startswith("error: rank 1 (dp_shard 1) failed during reduce_scatter of bucket.0 over dp_shard"), err
    assert "SIGKILL" in last


@pytest.mark.usefixtures("straight")
def test_a_full_disk_costs_no_checkpoint(here: Path) -> None:
    more = words("straight", "--resume", "--set", "train.steps=12")
    code, _, err = begin(here, *more, largest=100 * 2**10).finish()  # the checkpoint has more
    assert code == 1, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: rank "), err
    assert " failed during saving of step 10: " in last, err
    assert "CheckpointError: the checkpoint of step 10 cannot be written: File too large" in last, err
    assert last.endswith("the disk is full, or a file-size limit was reached")
    assert intact_steps(here / "runs" / "straight" / "checkpoint") == [6, 8]
    assert "saved at step 8; continue with: phalanx train --resume" in err
    assert nothing_is_left(here)


def test_wrong_input_is_not_tried_again(here: Path) -> None:
    """What only a rank finds: the text changed between planning and reading."""
    process = begin(here, "train", "job.toml", "--set", "train.name=wrong", "--max-restarts", "3")
    run = here / "runs" / "wrong"
    while not (run / "plan.json").exists():
        assert process.running()
        time.sleep(0.01)
    (here / "text.txt").write_text(TEXT + "more")
    code, _, err = process.finish()
    (here / "text.txt").write_text(TEXT)
    assert code == 2
    assert "is not what this run was planned with" in err
    assert "restart" not in err


def test_a_second_interrupt_ends_a_run_that_cannot_stop(here: Path) -> None:
    """A stopped rank finishes no step, and nobody waits for it any longer."""
    (here / "struck").unlink(missing_ok=True)
    process = begin(here, *words("stuck", "--set", "train.timeout_s=1000"), strokes=(("SIGSTOP", 1, "forward", 3),))
    while not (here / "struck").exists():
        assert process.running()
        time.sleep(0.01)
    process.signal(signal.SIGINT)
    deadline = time.monotonic() + 30
    while "Ctrl-C again" not in process.said():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.running()
    process.signal(signal.SIGINT)
    code, _, err = process.finish()
    assert code == 130
    assert err.strip().splitlines()[-1] == "interrupted"
    assert nothing_is_left(here)


def test_ranks_end_without_their_launcher(here: Path) -> None:
    words = ("train", "job.toml", "--set", "train.name=orphans", "--set", "train.steps=100000")
    process = Launcher(here, *words, environment={"TMPDIR": str(here / "tmp")})
    run = here / "runs" / "orphans"
    wait_for_step(run, 2)
    process.signal(signal.SIGKILL)
    process.finish()
    deadline = time.monotonic() + 30
    while not nothing_is_left(here):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert intact_steps(run / "checkpoint")[-1] == rows(run)[-1]["step"]  # they saved what they had


def pages(folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[StatusPage]:
    monkeypatch.setenv(status.FOLDER_VARIABLE, str(folder))
    return [StatusPage(rank) for rank in range(ranks)]


def test_who_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 waits for 1, and 1 for 2, which computes: whoever waits is not the one to name; nor is one that is slow."""
    zero, one, two = pages(tmp_path, 3, monkeypatch)
    for page in (zero, one, two):
        page.arrive("all_reduce of all", "world", range(3))
    zero.arrive("all_reduce of a", "dp", (0, 1))
    one.arrive("all_reduce of b", "tp", (1, 2))
    two.now("forward of micro-batch 3")
    for _ in range(100):
        two.now("forward of micro-batch 4")
    now_s = time.monotonic() + 10
    read = status.read(tmp_path)
    late = agent.late_ranks(read, now_s, 9.0)
    assert late is not None
    assert (late.ranks, late.what.text, late.waiting) == ((2,), "all_reduce of b", (1,))
    assert agent.describe_late(late, read, now_s).startswith(
        "rank 2 has not arrived at all_reduce of b: last seen in forward of micro-batch 4, 10.0 s ago"
    )
    assert agent.late_ranks(read, now_s, 11.0) is None  # not for longer than the timeout
    two.arrive("all_reduce of b", "tp", (1, 2))
    late = agent.late_ranks(status.read(tmp_path), now_s, 9.0)
    assert late is not None
    assert (late.ranks, late.waiting) == ((1,), (0,))
    one.arrive("all_reduce of a", "dp", (0, 1))
    assert agent.late_ranks(status.read(tmp_path), now_s, 9.0) is None  # all have met, and compute


def test_who_is_waited_for_in_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are numbered by the two that exchange them: what went to one rank is not what another waits for."""
    first, second, last = pages(tmp_path, 3, monkeypatch)
    for to, page in ((1, second), (2, last), (1, second)):
        for end in (first, page):
            end.arrive(f"message to {to}", "pp", (0, to))
    first.arrive("message to 2, again", "pp", (0, 2))
    second.now("forward of chunk 1 of micro-batch 2")
    last.now("forward of chunk 2 of micro-batch 1")
    now_s = time.monotonic() + 10
    late = agent.late_ranks(status.read(tmp_path), now_s, 9.0)
    assert late is not None
    assert (late.ranks, late.what.text, late.waiting) == ((2,), "message to 2, again", (0,))


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that is stopped."""
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    while not agent.is_stopped(process.pid):
        time.sleep(0.01)
    yield process.pid
    process.kill()
    process.wait()


def test_a_stopped_process_is_known_whatever_its_name() -> None:
    """Linux puts the name in brackets before the state, and a process may call itself as it likes."""
    for name in ("plain", "a) T 1", "a) S 1", "(", "))"):
        child = os.fork()
        if not child:
            Path("/proc/self/comm").write_text(name)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        known = agent.is_stopped(child)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert known, name
        assert not agent.is_stopped(child)
    assert not agent.is_stopped(os.getpid())


def test_a_stopped_rank_is_named_and_not_who_waits_for_it(
    stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 is stopped while 2 waits for an all-gather that both have begun, so that neither comes to what 0 and 1 do."""
    four = pages(tmp_path, 4, monkeypatch)
    for page in four[2:]:
        page.arrive("all_gather of bucket.0", "dp_shard", (2, 3))
    for page in four:
        page.now("evaluation")

    def named() -> tuple[tuple[int, ...], str]:
        read = status.read(tmp_path)
        read[3] = replace(read[3], pid=stopped)
        return agent.overdue_ranks(read, time.monotonic() + 10, 9.0)

    assert named()[0] == (3,)  # whom nobody waits for yet
    for page in four[:2]:
        page.arrive("all_reduce of evaluation", "world", range(4))
    late, why = named()
    assert late == (3,)
    assert why.startswith("rank 3 has not arrived at all_reduce of evaluation: last seen in evaluation")
    assert "(its process is stopped); ranks 0, 1 have been waiting" in why
    four[3].arrive("all_reduce of evaluation", "world", range(4))  # and is stopped there; 2 comes no further
    late, why = named()
    assert late == (3,)
    assert why.startswith("rank 3 makes no progress: last seen in all_reduce of evaluation")


def test_who_is_late_as_its_peers_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 keeps 0 and 1 waiting. 1 times out and closes its connections, and 0, which sees that, is heard first."""
    zero, one, two = pages(tmp_path, 3, monkeypatch)
    for page in (zero, one):
        page.arrive("the object gather", "world", range(3))
    two.now("checkpoint of step 8")
    read, closed = status.read(tmp_path), "RuntimeError: Connection closed by peer [127.0.0.1]:59610"

    def said(waited_s: float, words: dict[int, str], ended: dict[int, int]) -> str:
        return agent.describe_by_peers(read, words, ended, time.monotonic() + waited_s, 10.0)

    named = "rank 2 has not arrived at the object gather"
    assert said(9.5, {0: closed, 1: ""}, {0: 1}).startswith(named)
    assert said(6.0, {0: "RuntimeError: Timed out waiting 10000ms"}, {0: 1}).startswith(named)
    assert said(6.0, {0: closed}, {0: 1}) == ""  # 1 may have died of something else while 2 computed
    assert said(9.5, {0: closed, 1: "ValueError: no such file"}, {0: 1}) == ""
    assert said(9.5, {0: closed}, {0: 1, 1: -9}) == ""


def test_ranks_of_torchrun_say_who_did_not_come(pool: Pool) -> None:
    said = pool.run(3, rank_cases.fails_waiting, 1)
    for rank in (0, 2):
        assert said[rank].startswith(f"rank {rank}")
        assert " failed during all_reduce of a: RuntimeError: Timed out" in said[rank]
        assert said[rank].endswith("; rank 1 did not arrive")


@given(
    dp=st.sampled_from([2, 4, 6, 8]),
    zero=st.integers(0, 3),
    shard=st.sampled_from([None, 1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    micro_batch=st.sampled_from([1, 2, 3, 4]),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 16),
)
def test_a_strategy_on_the_ranks_that_are_left(
    dp: int, zero: int, shard: int | None, tp: int, micro_batch: int, accumulation: int, world: int
) -> None:
    job = Job(dp * micro_batch * accumulation, 8)
    try:
        before = Strategy(dp=dp, zero=zero, shard=shard, tp=tp, micro_batch=micro_batch)  # type: ignore[arg-type]
    except InputError:
        return
    possible = world % tp == 0 and job.global_batch % (world // tp) == 0
    try:
        after = strategy_for_ranks(before, job, world)
    except InputError:
        assert not possible
        return
    assert possible
    assert after.world == world
    assert after.micro_batch * after.dp * after.accumulation(job) == job.global_batch
    assert after.micro_batch <= before.micro_batch
    kept = replace(after, dp=before.dp, micro_batch=before.micro_batch, shard=before.shard)
    assert kept == before
    assert world != before.world or after == before
