"""What disturbs a step, in the lab, with its prediction: a rank that is slowed, a link at half of its rate, a second
job on the links, storage that is slow while a checkpoint is written.

torchrun ... -m benchmarks.disturbed '{"out": FILE, "steps": 6, "rest_s": 0.5, "slow": [1, 6], "every": 3}'

A rank sleeps `rest_s` in each step, as if a device worked, so that two jobs have their times of sending and of not
sending without wanting the same processors. Storage is slowed where a file is made durable: a rank waits there until
its bytes would have been written at `write` bytes/s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.lab import hosts as lab
from benchmarks.lab.hosts import Lab
from benchmarks.lab_ranks import SIZES, model
from benchmarks.result import Result
from benchmarks.shaped import run_ranks
from benchmarks.strategies import Slowed
from phalanx.cli.terminal import announce
from phalanx.planning.stragglers.links import SlowLink, sending_groups
from phalanx.planning.stragglers.own import own_pipelines
from phalanx.planning.stragglers.shared_links import SecondsOfStep, SharedNetwork, shared_step
from phalanx.reliability.answer import goodput
from phalanx.reliability.conditions import Conditions
from phalanx.runtime.checkpoint.async_saver import Saver
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.spec.cluster.part import subcluster
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.files.cluster_toml import cluster_from_toml, to_toml
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

RATE = "200mbit"
PAIR = Strategy(dp=2)
JOB = Job(global_batch=2, seq=32)
STEPS = 6
REST_S = 0.5
SLOW = [1, 6.0]
EVERY, WRITE = 3, 2e7
"""Steps between saves, and bytes/s that both hosts write together."""
OTHER_REST_S = 0.8
"""Of the second job: cycles of two lengths, so that the jobs meet in all ways in turn."""
OTHER_PORT = 29_611


def bench() -> Iterator[Result]:
    """Disturb steps of two ranks on two hosts, and compare how much longer they take with their predictions."""
    why = lab.unavailable()
    if why:
        yield Result("the lab", why)
        return
    rate = lab.bytes_per_s(RATE)
    with Lab(2, rate) as network, tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        announce(f"{RATE}: measuring the hosts for some minutes")
        run_ranks(network, 2, what="measure", cluster=str(here / "cluster.toml"))
        whole = cluster_from_toml(here / "cluster.toml")
        part = subcluster(whole, (0, 2))
        plain = _seconds(part) + REST_S

        def measured(**how: Any) -> float:
            return float(median(_run(network, here, **how)["seconds"]))

        undisturbed = measured()
        yield _compared("the step itself, in seconds", undisturbed, plain, 1.0, 1.0)
        slow = _seconds(part, factor=SLOW) + REST_S
        name = f"rank {SLOW[0]:.0f} takes {SLOW[1]:.0f} times as long"
        yield _compared(name, measured(slow=SLOW), slow, undisturbed, plain)
        network.shape(1, rate / 2)
        halved = measured()
        network.shape(1, rate)
        link = _seconds(part, (SlowLink("node", 1, 0.5),)) + REST_S
        yield _compared("one host's link at half of its rate", halved, link, undisturbed, plain)
        jobs = [_cycle(whole, gpus, rest) for gpus, rest in (((0, 2), REST_S), ((1, 3), OTHER_REST_S))]
        starts = np.random.default_rng(0).random((8, 2))
        together = SharedNetwork(whole, jobs).run(starts, 4 * STEPS).mean_s[:, 0].mean()
        with_other = _with_another(network, here)
        yield _compared("a second job on the links", with_other, float(together), undisturbed, jobs[0].alone_s)
        saving = _run(network, here, every=EVERY, write=WRITE, wait=True)
        _plan(part, here)
        given = Conditions(write_bytes_per_s=WRITE, synchronous=True, mttf_s=1e9, spares=0)
        stall = goodput(here / "plan.json", days=1, given=given).stall_s
        name = f"a save every {EVERY} steps to {WRITE / 1e6:.0f} MB/s, waited for"
        yield _compared(name, float(np.mean(saving["seconds"])), plain + stall / EVERY, undisturbed, plain)
        overlapped = np.mean(_run(network, here, every=EVERY, write=WRITE)["seconds"])
        shown = (
            f"{overlapped / undisturbed:.3f} times as long; its save takes {stall / EVERY / plain:.2f} of its steps"
        )
        yield Result(f"a save every {EVERY} steps, written during the next", shown)


def _plan(part: ClusterSpec, folder: Path) -> None:
    """Write plan.json: the job on these hosts, planned as a user would."""
    (folder / "part.toml").write_text(to_toml(part))
    tables: dict[str, dict[str, Any]] = {
        "model": SIZES,
        "cluster": {"file": "part.toml"},
        "job": {"global_batch": 2, "seq": JOB.seq},
    }
    lines = [f"{table}.{key} = {json.dumps(value)}" for table, row in tables.items() for key, value in row.items()]
    (folder / "job.toml").write_text("\n".join(lines))
    words = ["plan", "job.toml", "--strategy", str(PAIR), "--out", "plan.json"]
    subprocess.run([sys.executable, "-m", "phalanx", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _compared(name: str, measured: float, predicted: float, by: float, by_predicted: float) -> Result:
    a, b = measured / by, predicted / by_predicted
    return Result(name, f"{a:.3f} times as long, predicted {b:.3f}, {b / a - 1:+.1%}", "10 %", abs(b / a - 1) <= 0.1)


def _seconds(part: ClusterSpec, slow: tuple[SlowLink, ...] = (), factor: list[float] | None = None) -> float:
    """Return the predicted seconds of a step, without its rest. `factor`: a rank and how many times as long its
    passes take; its update is as fast as before."""
    factors = np.ones(2)
    if factor:
        factors[int(factor[0])] = factor[1]
    x = own_pipelines(model(), part, JOB, PAIR, slow)
    return x.delayed(factors).step_s - x.update_s * float(factors.max() - 1)


def _cycle(whole: ClusterSpec, gpus: tuple[int, int], rest_s: float) -> Any:
    """Return the cycle of a job on these GPUs, in which it rests in its passes."""
    part = subcluster(whole, gpus)

    def price(share: float) -> SecondsOfStep:
        x = own_pipelines(model(), part, JOB, PAIR, (SlowLink("tier", 0, share),) if share < 1 else ())
        step = x.delayed(np.ones(2))
        passes = float(step.ends_s.max())
        return SecondsOfStep(passes + rest_s, step.step_s - passes - x.update_s, x.update_s)

    return shared_step(price, sending_groups(PAIR), np.array(gpus))


def _run(network: Lab, folder: Path, steps: int = STEPS, **how: Any) -> Any:
    out = folder / "result.json"
    code = lab.run(network, 1, _command(out, steps, how))
    assert code == 0, f"ranks in the lab ended with {code}"
    return json.loads(out.read_text())


def _command(out: Path, steps: int, how: dict[str, Any]) -> list[str]:
    arguments = {"out": str(out), "steps": steps, "rest_s": REST_S, **how}
    return ["-m", "benchmarks.disturbed", json.dumps(arguments)]


def _with_another(network: Lab, folder: Path) -> float:
    """Return the mean seconds of a step while a second job of two ranks runs on the same hosts."""
    ready = folder / "other.json"
    command = _command(ready, 10_000, {"rest_s": OTHER_REST_S, "ready": str(ready)})
    options = {"rdzv-endpoint": f"{network.address(0)}:{OTHER_PORT}", "rdzv-id": "other"}
    others = [network.start(h, network.torchrun(h, 1, command, options)) for h in range(network.hosts)]
    try:
        while not ready.exists():
            assert all(child.poll() is None for child in others), "the second job ended"
            sleep(0.1)
        seconds = _run(network, folder, steps=4 * STEPS)["seconds"]
        assert all(child.poll() is None for child in others), "the second job ended before the first"
    finally:
        for child in others:
            child.terminate()
        for child in others:
            child.wait(60)
    return float(np.mean(seconds))


def main() -> None:
    """Take steps as a rank of a job."""
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    worlds.join(world, 300)
    comm = Comm(world, mesh(PAIR))
    training = Training(model(), JOB, PAIR, comm, 0)
    slow, every, write = arguments.get("slow"), arguments.get("every", 0), arguments.get("write")
    if slow and world.rank == int(slow[0]):
        Slowed(training.model, slow[1])
    if write:
        _slow_storage(write / world.size)
    batch = torch.randint(model().vocab, (1, JOB.seq + 1))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(comm.gather_objects(folder, "world")[0]), comm, keep=1)
        for i in range(arguments["steps"] + 1):
            comm.barrier()
            start = perf_counter()
            sleep(arguments["rest_s"])
            training.step([batch], 1e-3)
            if every and i and i % every == 0:
                saver.save(i, training.owned(), {})
                if arguments.get("wait"):
                    saver.wait()
                    comm.barrier()
            seconds.append(perf_counter() - start)
            if "ready" in arguments and world.rank == 0 and i == 1:
                Path(arguments["ready"]).write_text("{}")
        saver.wait()
        comm.barrier()
    if world.rank == 0:
        write_json(Path(arguments["out"]), {"seconds": seconds[1:]})
    worlds.leave()


def _slow_storage(bytes_per_s: float) -> None:
    """Make a file durable only after its bytes have had their time."""

    sync = os.fsync

    def slow(descriptor: int) -> None:
        sync(descriptor)
        sleep(os.fstat(descriptor).st_size / bytes_per_s)

    patch("os.fsync", slow).start()


if __name__ == "__main__":
    main()
