"""The lab: what real hosts with shaped links show, by bytes; that it is taken down whatever happens."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import typer
from support import lab_cases
from support.forked_cli import Launcher
from support.in_process_cli import phalanx
from support.lab_hosts import Hosts, shaped
from support.quick_runs import JOB, TEXT
from support.relabelled import relabel
from support.sizes import sampled
from support.toy_model import model
from torch.distributed.elastic.multiprocessing.api import SignalException

from benchmarks.lab import hosts as lab
from benchmarks.lab.__main__ import APP
from benchmarks.lab.hosts import Lab
from phalanx.cost.step.expand import expand
from phalanx.runtime.checkpoint.store import intact_steps
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.registry import ALGORITHMS, build
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

command = partial(phalanx, command=typer.main.get_command(APP))
RANKS = 2  # of each host
MIB = 2**20
EXACT = 0.02


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with shaped(2, RANKS, "4gbit") as found:  # paced: where nothing is dropped, nothing is sent again
        found.run(lab_cases.all_reduce, MIB, "native", "")  # all have met
        yield found


def crossing(s: Schedule) -> list[int]:
    """Bytes of float32 that each host sends to others."""
    source, destination = s.source // RANKS, s.destination // RANKS
    leaves = source != destination
    return [int(4 * s.length[leaves & (source == host)].sum()) for host in range(s.ranks // RANKS)]


@pytest.mark.parametrize("op", [op for op in ALGORITHMS if op != "barrier"])
def test_interfaces_count_what_the_schedule_says(hosts: Hosts, op: str) -> None:
    """Every algorithm, from 1 MiB up."""
    for algorithm in ALGORITHMS[op]:
        for size in (MIB, 4 * MIB):
            s = build(op, algorithm, 4, size // 4, tiers=(RANKS, 2))
            counted, expected = hosts.sent(lab_cases.schedule, s), crossing(s)
            # Of the busier direction: who only receives acknowledges.
            assert counted == pytest.approx(expected, abs=EXACT * max(expected)), (algorithm, size)


def test_hierarchical_crosses_with_the_fewest_bytes(hosts: Hosts) -> None:
    size = 4 * MIB
    least = max(hosts.sent(lab_cases.all_reduce, size, "p2p", "hierarchical"))
    assert least == pytest.approx(size, rel=EXACT)
    shared = max(hosts.sent(lab_cases.all_reduce, size, "p2p", "hierarchical", True))
    assert shared == pytest.approx(size, rel=EXACT)
    others = [("p2p", name) for name in ALGORITHMS["all_reduce"] if name != "hierarchical"]
    for transport, algorithm in [*others, ("native", "")]:
        assert max(hosts.sent(lab_cases.all_reduce, size, transport, algorithm)) >= (1 - EXACT) * least


def test_a_hierarchy_in_parts_sums_the_whole_and_crosses_once(hosts: Hosts) -> None:
    """A buffer so long that it goes in three parts, not all of one size; the ranks look at the result."""
    size = 13 * MIB + 4
    sent = max(hosts.sent(lab_cases.all_reduce, size, "p2p", "hierarchical"))
    assert sent == pytest.approx(size, rel=EXACT)


def test_three_hosts_on_a_bridge() -> None:
    with shaped(3, 1, "1gbit") as three:
        three.run(lab_cases.all_reduce, 3 * MIB, "p2p", "ring")
        sent = three.sent(lab_cases.all_reduce, 3 * MIB, "p2p", "ring")
    assert sent == pytest.approx([4 * MIB] * 3, rel=EXACT)


def test_the_order_of_hosts_matters_as_predicted(hosts: Hosts) -> None:
    ring = build("all_reduce", "ring", 4, MIB // 4)
    interleaved = relabel(ring, [0, 2, 1, 3])
    assert crossing(ring) == [1.5 * MIB] * 2
    assert crossing(interleaved) == [3 * MIB] * 2
    for s in (ring, interleaved):
        assert hosts.sent(lab_cases.schedule, s) == pytest.approx(crossing(s), rel=EXACT)


MODEL = model(vocab=1024, hidden=128, ffn=256, head_dim=32, max_seq=128, tied=False)
JOB_OF_4 = Job(8, 128)


def predicted(job: Job, strategy: Strategy) -> list[float]:
    """Bytes that each host sends in a step: Gloo's rings take what they take between neighbours of a group."""
    passes = {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1, "all_to_all": 1}  # Gloo has no reduce-scatter
    grid, found = mesh(strategy), [0.0, 0.0]
    for rank in range(strategy.world):
        for event in expand(Layout(MODEL, job, strategy).rank_view(rank)).events:
            if event.kind == "collective":
                group = grid.group_of(rank, event.axis)
                to = group[(group.index(rank) + 1) % len(group)]
                sent = passes[event.op] * (len(group) - 1) / len(group) * event.bytes
            elif event.op == "send":
                to, sent = event.peer or 0, event.bytes
            else:
                continue
            found[rank // RANKS] += sent * (to // RANKS != rank // RANKS)
    return found


@pytest.mark.parametrize(
    "strategy",
    sampled(
        [
            Strategy(dp=4, micro_batch=2),
            Strategy(dp=4, zero=3, shard=2, micro_batch=2),  # HSDP: shards inside a host, replicas across
            Strategy(tp=2, pp=2, micro_batch=2, schedule="1f1b"),  # layers split inside, stages across
            Strategy(dp=2, tp=2, micro_batch=4),
            Strategy(dp=2, tp=2, micro_batch=4, order="pp/tp/cp/dp"),  # the wrong way round
        ],
        (1, 2, 4),
    ),
    ids=str,
)
def test_training_over_two_hosts(hosts: Hosts, strategy: Strategy) -> None:
    """Losses are one process's, and the links carry what the plan says."""
    alone = replace(strategy, dp=1, zero=0, shard=None, tp=1, pp=1, micro_batch=8)
    [one] = hosts.pool.run(1, lab_cases.losses, MODEL, JOB_OF_4, alone, 3)
    counted = []
    for count in (1, 3):  # for there is more than the steps: replicas begin with rank 0's weights
        before = hosts.lab.traffic()
        for losses in hosts.run(lab_cases.losses, MODEL, JOB_OF_4, strategy, count):
            assert losses == pytest.approx(one[:count], rel=1e-5)
        counted.append([(now - then).sent for now, then in zip(hosts.lab.traffic(), before, strict=True)])
    sent = np.subtract(counted[1], counted[0])
    expected = 2 * np.array(predicted(JOB_OF_4, strategy))
    assert expected.min() > MIB
    assert sent.tolist() == pytest.approx(expected.tolist(), rel=EXACT)


@pytest.mark.long
def test_a_host_that_disappears_is_named_and_the_others_go_on(tmp_path: Path, measured: None) -> None:
    """Its cable is out in mid-training. The ranks that are left start again from the last checkpoint."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "job.toml").write_text(JOB)
    (here / "text.txt").write_text(TEXT)
    settings = (
        *("strategy=dp=4,micro_batch=2", "train.name=lost", "train.steps=5000", "train.save_every=5"),
        *("train.eval_every=0", "train.timeout_s=5", "train.check_sync=0", "cluster.preset=local"),
    )
    words = ["train", "job.toml", *(word for item in settings for word in ("--set", item))]
    options = {
        "nnodes": "1:2",
        "max_restarts": "3",
        "rdzv_conf": "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2",
    }
    run = here / "runs" / "lost"
    with shaped(2, RANKS) as found:
        agents = [found.torchrun(host, here, *words, **options) for host in range(2)]
        wait_for(lambda: bool(intact_steps(run / "checkpoint")), agents)
        found.lab.lose(1)
        saved = intact_steps(run / "checkpoint")[-1]
        wait_for(lambda: json.loads((run / "plan.json").read_text())["strategy"]["dp"] == 2, agents[:1])
        wait_for(lambda: intact_steps(run / "checkpoint")[-1] > saved + 5, agents[:1])
        agents[0].signal(signal.SIGTERM)
        _, _, said = agents[0].finish()
    assert "rank 2, rank 3 (all of host host1) did not arrive" in said
    assert "the ranks were started again; the run goes on with 2" in said
    assert said.count("links between these 2 hosts are not measured") == 1


def wait_for(what: Callable[[], bool], agents: Sequence[Launcher], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        for agent in agents:
            assert agent.running(), agent.finish()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left_over() -> list[str]:
    """Of this process's labs."""
    return [name for name in lab._names() if name.startswith(f"{lab._PREFIX}{os.getpid()}.")]


def test_nothing_is_left_of_a_lab(hosts: Hosts) -> None:
    others = left_over()
    with Lab(3) as made:
        child = made.start(1, ["sleep", "100"])
        assert len(left_over()) == len(others) + 4  # and the switch
    assert child.poll() is not None
    assert left_over() == others
    with pytest.raises(lab.LabError), Lab(2, 1e-3):  # a rate that tc refuses, when all else is there
        pass
    assert left_over() == others


KILLED = """
import os, signal, subprocess
from benchmarks.lab.hosts import Lab
with Lab(2) as made:
    child = made.start(0, ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"], stdout=subprocess.DEVNULL)
    print(made.namespace(0), flush=True)
    while open(f"/proc/{child.pid}/comm").read() != "sh\\n":
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_lab_removes_leftovers_of_a_killed_one(hosts: Hosts) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    name = done.stdout.strip()
    assert name in lab._names()
    with Lab(1) as made:
        assert any(name.startswith(f"{swept}.") for swept in made.swept)
        assert name not in lab._names()
        assert not lab._inside(name)


STOPPED = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it without one
from benchmarks.lab.hosts import Lab, until_stopped
with until_stopped(), Lab(2) as made:
    made.start(1, ["sleep", "100"])
    print(made.namespace(1), flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("number", sampled([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], (0,)))
def test_a_lab_that_is_stopped_leaves_nothing(hosts: Hosts, number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    name = process.stdout.readline().decode().strip()
    assert name in lab._names()
    process.send_signal(number)
    assert process.wait(30)
    assert name not in lab._names()
    process.stdout.close()


def test_a_terminated_host_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[Path] = []

    def told(words: list[str]) -> None:
        logs.append(Path(words[0].removeprefix("--log-dir=")))
        assert logs[0].is_dir()
        raise SignalException("told to end", signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.run.main", told)
    with pytest.raises(SystemExit, match="143"):
        runpy.run_path(str(lab.TORCHRUN), run_name="__main__")
    assert not logs[0].exists()


def test_the_lab_starts_torchrun_on_every_host_and_counts(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import os, socket\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], socket.gethostname(), flush=True)\n"
        "peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "peer.sendto(bytes(8000), ('10.77.0.102' if os.environ['GROUP_RANK'] == '0' else '10.77.0.101', 9))\n"
        "raise SystemExit(3)\n"
    )
    code, out, err = command(tmp_path, "--ranks", "1", "--traffic", "t.json", "--", str(script))
    assert sorted(out.splitlines()[:2]) == ["0 2 host0", "1 2 host1"], err
    assert "Traceback" not in err
    assert code == 1  # torchrun's, of ranks that failed
    assert min(t["sent"] for t in json.loads((tmp_path / "t.json").read_text())) > 8000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "trian"), "command = 'trian': is not a program on this machine; a script's name must end in .py"),
        (
            ("--traffic", "no/t.json", "--", "true"),
            "--traffic = 'no/t.json': cannot be written; make its folder first",
        ),
        (("--rate", "1gb", "--", "true"), "--rate = '1gb': is not a rate; write 1gbit or 500mbit"),
        (("--hosts", "0", "--", "true"), "--hosts = 0: must be 1 to 100"),
    ],
)
def test_mistakes_are_reported_before_a_lab_is_built(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert command(tmp_path, *words) == (2, "", f"error: {said}\n")


def test_hosts_that_wait_for_one_that_failed_are_ended(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_GRACE_S", 0.05)
    monkeypatch.setattr(Lab, "torchrun", lambda _, host, *__: ["sh", "-c", "exit 3" if host else "sleep 100"])
    with Lab(2) as made:
        assert lab.run(made, 1, []) == 3


def test_rates() -> None:
    assert lab.bytes_per_s("1gbit") == 125e6
    assert lab.bytes_per_s("2.5Mbit") == 312500
    for wrong in ("fast", "1gb", "0gbit", "-1gbit"):
        with pytest.raises(InputError, match="rate"):
            lab.bytes_per_s(wrong)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["phalanx", "train", "job.toml"], ["-m", "phalanx", "train", "job.toml"]),
        (["python3.12", "-m", "x"], ["-m", "x"]),
        (["a.py", "b"], ["a.py", "b"]),
        (["-m", "x"], ["-m", "x"]),
        (["hostname"], ["--no-python", "hostname"]),
        (["python3", "-c", "pass"], ["--no-python", "python3", "-c", "pass"]),
    ],
)
def test_words_for_torchrun(command: list[str], words: list[str]) -> None:
    assert lab.torchrun_words(command) == words


def test_one_line_says_why_there_can_be_no_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert command(tmp_path, "--", "x.py") == (2, "", "error: lab: needs iproute2: no ip and no tc here\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lab.unavailable() == "needs root, for network namespaces"
