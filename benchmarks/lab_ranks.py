"""Benchmark ranks on the lab's hosts: all-reduces over a slow link, and training steps with their predictions.

torchrun ... -m benchmarks.lab_ranks '{"out": FILE, "what": "reduce", "size": BYTES}'
torchrun ... -m benchmarks.lab_ranks '{"out": FILE, "what": "measure", "cluster": FILE.toml}'
torchrun ... -m benchmarks.lab_ranks '{"out": FILE, "what": "train", "cluster": FILE.toml, "lines": [STRATEGY]}'
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.interleaved import Figures, Step, rounds
from phalanx.cli import app
from phalanx.measure import collectives
from phalanx.measure.collectives import SHARED, TransportAlgorithm
from phalanx.measure.steal_time import NOTABLE_SHARE
from phalanx.planning.auto import transport
from phalanx.planning.search.best_first import price
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.schedule.collectives.registry import ALGORITHMS, build
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.files.job_file import build as build_spec
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

ROUNDS = 9
SERIAL = ("binomial", "naive")  # these cross the link twice in series
SHM = "hierarchical, shm"  # shared memory inside the hosts
STEP_ROUNDS, STEPS = 5, 2
# Repeat up to TRIES times, until QUIET rounds of each were not disturbed by the host of the virtual machine.
QUIET, TRIES = 5, 6
# What `threshold` sends depends on the gradients; a low one sends the most it may, which is known beforehand.
COMPRESSORS = (
    *("fp16", "bf16", "int8", "int4", "topk:0.01", "randk:0.01", "powersgd:4"),
    *("threshold:1e-7", "threshold:1e-3"),
)
# Compressors with one rank per core: four ranks on two cores would measure how short work is scheduled.
WHOLE = "dp=2"
COMPRESSED = tuple(f"{WHOLE},compression={c}" for c in COMPRESSORS)
APART = tuple(f"{WHOLE},local={how}" for how in ("4", "16", "16,compression=int4"))
"""Replicas that step alone."""
SHARDED, HSDP = "dp=4,zero=3", "dp=4,zero=3,shard=2"
SEQ = 32  # tokens; one sequence per rank
# 4.7 M parameters: 18.9 MB of gradients, and little to compute.
SIZES = {"family": "llama", "vocab": 4096, "hidden": 256, "layers": 4, "heads": 8, "ffn": 512, "max_seq": 64}


def crossing(algorithm: str, ranks: int, local: int) -> float:
    """Return the bytes that the busiest host sends to others, relative to the buffer; Gloo's all-reduce is a ring."""
    name = {"native": "ring", SHM: "hierarchical"}.get(algorithm, algorithm)
    size = 64 * ranks
    s = build("all_reduce", name, ranks, size, tiers=(local, ranks // local))
    leaves = s.source // local != s.destination // local
    return max(float(s.length[leaves & (s.source // local == h)].sum()) / size for h in range(ranks // local))


def _reduce(world: World, arguments: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of every all-reduce in every undisturbed round."""
    ranks, n = tuple(range(world.size)), arguments["size"] // 4
    grid = mesh(Strategy(dp=world.size))
    plain, shared = Comm(world, grid), Comm(world, grid, SHARED)
    own, ordinary = shared.buffer(n, torch.float32), torch.zeros(n)
    tried = {"native": (Call("all_reduce", ranks, world.rank, ordinary, ordinary), TransportAlgorithm("native"))}
    for name in ALGORITHMS["all_reduce"]:
        tried[name] = (tried["native"][0], TransportAlgorithm("p2p", name))
    results = collectives.rounds(plain, tried, ROUNDS)
    call = Call("all_reduce", ranks, world.rank, own, own)
    both = {
        SHM: (call, TransportAlgorithm("p2p", "hierarchical")),
        "native again": (call, TransportAlgorithm("native")),
    }
    results |= collectives.rounds(shared, both, ROUNDS)
    return {name: timed.quiet for name, timed in results.items()}


def _measure(arguments: dict[str, Any]) -> None:
    """Run `phalanx measure`, without its output."""
    with redirect_stdout(io.StringIO()):
        app.app(["measure", "--out", arguments["cluster"]], standalone_mode=False)


def model() -> ModelSpec:
    return build_spec(ModelSpec, complete(SIZES), "model")


def _step(training: Training, batch: torch.Tensor) -> None:
    """Take a step on a batch; of replicas that step alone, all steps up to a synchronisation."""
    for _ in range(max(training.strategy.local, 1)):
        training.step([batch], 1e-3)


def _train(world: World, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the step times of every strategy, and those predicted from the measured cluster."""
    cluster, job, spec = cluster_from_toml(Path(arguments["cluster"])), Job(world.size, SEQ), model()
    chosen = transport.decide(cluster, "auto")
    runs: dict[str, tuple[Step, int]] = {}
    predicted, steps = {}, {}
    for line in arguments["lines"]:
        strategy = make_strategy(line)
        assert strategy is not None
        candidate = price(spec, cluster, job, strategy)
        predicted[line], steps[line] = float(candidate.prediction.step_time_s), max(strategy.local, 1)
        comm = Comm(world, mesh(candidate.strategy), chosen)
        training = Training(spec, job, candidate.strategy, comm, 0)
        runs[line] = (partial(_step, training), world.size)
    batch = torch.randint(spec.vocab, (1, job.seq + 1))
    everyone = Comm(world, mesh(Strategy(dp=world.size)))
    results: Figures = {}
    for _ in range(TRIES):
        more = rounds(runs, batch, everyone, STEP_ROUNDS, STEPS)
        for line, figures in more.items():
            for name, values in figures.items():
                results.setdefault(line, {}).setdefault(name, []).extend(values)
        enough = all(sum(share < NOTABLE_SHARE for share in f["stolen"]) >= QUIET for f in results.values())
        if everyone.gather_objects(enough, "world")[0]:
            break
    tokens = job.global_batch * job.seq
    return {
        line: {
            "predicted": predicted[line],
            "seconds": [tokens / s / steps[line] for s in values["tokens_per_s"]],
            "stolen": values["stolen"],
        }
        for line, values in results.items()
    }


def main() -> None:
    arguments = json.loads(sys.argv[1])
    if arguments["what"] == "measure":
        _measure(arguments)
        return
    world = external_world() or ALONE
    torch.set_num_threads(1)
    worlds.join(world, 300)
    results = {"reduce": _reduce, "train": _train}[arguments["what"]](world, arguments)
    if world.rank == 0:
        write_json(Path(arguments["out"]), results)
    worlds.leave()


if __name__ == "__main__":
    main()
