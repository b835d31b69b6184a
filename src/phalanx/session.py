"""What each command does, composed from the rooms: measure, plan, launch, compare.

The command line parses and renders; this file decides the order. It resolves strategy = "auto".
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.cost.program import differences, expand
from phalanx.measure.local import cache_folder, default_ranks, fingerprint, local_cluster
from phalanx.plan.search import Candidate, price, search
from phalanx.report.tables import Comparison
from phalanx.schedule.event import Event
from phalanx.spec import cluster as clusters
from phalanx.spec import jobfile, plan
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Precision
from phalanx.spec.jobfile import JobFile
from phalanx.spec.plan import Plan
from phalanx.spec.strategy import check, require_runnable

Announce = Callable[[str], None]
RUNS = Path("runs")
_RANKS_PER_CORE = 16


@dataclass(frozen=True)
class Decision:
    """A plan with the alternatives that it was chosen from, fastest first."""

    plan: Plan
    chosen: Candidate
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `comparisons` and `differences` hold it against its plan."""

    folder: Path
    interrupted: bool
    recorded: dict[str, Any]
    comparisons: tuple[Comparison, ...]
    differences: tuple[str, ...]


def resolve_cluster(file: JobFile, ranks: int | None, announce: Announce) -> ClusterSpec:
    """The cluster that a job file names; `local` is measured, or read from the cache."""
    choice = file.cluster
    if choice.file:
        return jobfile.cluster_from_toml(Path(choice.file))
    if choice.preset == "local":
        count = ranks or choice.ranks or (file.strategy.world if file.strategy else default_ranks())
        require_local(count)
        return local_cluster(count, file.job.precision.compute, file.train.threads, announce=announce)
    return clusters.preset(str(choice.preset), choice.nodes)


def decide(file: JobFile, world: int | None = None, announce: Announce = lambda _: None) -> Decision:
    """Choose (or price) the strategy. `world`: the number of ranks, where somebody else has started them."""
    strategy = file.strategy
    if strategy is not None:
        require_runnable(strategy)
        limit = file.cluster.ranks if file.cluster.preset == "local" else None
        if world is None and limit is not None and strategy.world > limit:
            raise InputError(
                "strategy.dp", strategy.dp, f"needs {strategy.world} ranks, cluster.ranks is {limit}", "lower dp"
            )
        check(strategy, file.model, file.job, world)
    cluster = resolve_cluster(file, world, announce)
    if strategy is not None and strategy.world > cluster.ranks and world is None:
        raise InputError(
            "strategy.dp",
            strategy.dp,
            f"needs {strategy.world} ranks, {cluster.name} has {cluster.ranks}",
            "lower dp",
        )
    if strategy is None:
        candidates = search(file.model, cluster, file.job, dp=world)
        chosen = candidates[0]
    else:
        chosen = price(file.model, cluster, file.job, strategy)
        candidates = [chosen]
    return Decision(_plan(file, cluster, chosen), chosen, tuple(candidates))


def _plan(file: JobFile, cluster: ClusterSpec, chosen: Candidate) -> Plan:
    p = chosen.prediction
    rates = cluster.rates(file.job.precision.compute, min(chosen.strategy.world, cluster.ranks_per_node))
    prediction = {
        "step_time_s": float(p.step_time_s),
        "forward_s": float(p.forward_s),
        "backward_s": float(p.backward_s),
        "optimizer_s": float(p.optimizer_s),
        "exposed_communication_s": float(p.exposed_communication_s),
        "flops": int(p.flops),
        "memory_bytes": int(p.memory_bytes),
        "state_bytes": int(p.state_bytes),
        "activation_bytes": int(p.activation_bytes),
        "bytes_per_axis": {axis: int(n) for axis, n in p.bytes_per_axis.items()},
    }
    choices = {
        "transport": "native",
        "bucket_bytes": chosen.strategy.bucket_bytes,
        "peak_flops_per_s": rates.peak_flops_per_s,
        "rates_origin": rates.origin,
    }
    return Plan(file.model, cluster, file.job, chosen.strategy, file.train, choices, prediction)


def open_run(decision: Decision, resume: bool) -> Path:
    """The run's folder with its plan.json; an old run of that name is moved aside unless it is resumed."""
    folder = RUNS / decision.plan.train.name
    try:
        if folder.exists() and not resume:
            stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
            os.replace(folder, folder.with_name(f"{folder.name}.{stamp}"))
        folder.mkdir(parents=True, exist_ok=True)
        plan.write(decision.plan, folder / "plan.json")
    except OSError as error:
        raise InputError("train.name", decision.plan.train.name, f"{folder} cannot be written ({error})") from None
    return folder


def latest_run() -> Path:
    """The run that was active last."""
    found = [p.parent for p in RUNS.glob("*/plan.json") if list((p.parent / "checkpoint").glob("step-*"))]
    if not found:
        raise InputError("--resume", None, f"no run with a checkpoint in {RUNS}/", "name the job file to start one")
    return max(found, key=lambda p: p.stat().st_mtime)


def resumed(path: Path | None, overrides: Sequence[str]) -> JobFile:
    """The job of a run that is taken up again: its own plan.json, with overrides laid over it.

    Raises InputError where there is nothing to resume.
    """
    folder = RUNS / jobfile.load(path, overrides).train.name if path else latest_run()
    from phalanx.runtime.checkpoint import steps

    if not (folder / "plan.json").exists() or not steps(folder / "checkpoint"):
        raise InputError("--resume", str(folder), "holds no checkpoint", "train it without --resume first")
    old = plan.read(folder / "plan.json")
    tables = json.loads(json.dumps(jobfile.to_tables(_job_file(old))))
    tables = jobfile.override(tables, overrides)
    return jobfile.from_tables(tables, Path())


def _job_file(old: Plan) -> JobFile:
    choice = jobfile.ClusterChoice(preset=old.cluster.name, nodes=old.cluster.nodes)
    if old.cluster.name == "local":
        choice = jobfile.ClusterChoice(preset="local", ranks=old.cluster.ranks)
    return JobFile(old.model, choice, old.job, old.strategy, old.train)


def prepare_data(file: JobFile) -> Any:
    """The tokens of a job: read, encoded and cached before any rank starts."""
    from phalanx.train.data import Batches, prepare

    tokens = prepare(file.train.data, file.model.vocab, cache_folder())
    Batches(tokens.training(), file.job.seq, file.job.global_batch, file.train.seed)
    return tokens


def train_local(folder: Path, given: Plan, resume: bool, announce: Announce) -> bool:
    """Run the plan on ranks of this machine. True if the user stopped it. Raises RankFailure."""
    from phalanx.runtime.launch import launch

    argument = json.dumps({"folder": str(folder), "resume": resume})

    def on_interrupt() -> None:
        announce("stopping after this step; Ctrl-C again to end at once")

    return launch("phalanx.train.worker", argument, given.strategy.world, given.train.threads, on_interrupt)


def outcome(folder: Path) -> Outcome:
    """What a finished run recorded, held against its plan."""
    given = plan.read(folder / "plan.json")
    recorded = json.loads((folder / "recorded.json").read_text())
    events = tuple(Event(**event) for event in recorded["events"])
    predicted = given.prediction
    measured_bytes: dict[str, int] = {}
    for event in events:
        if event.axis:
            measured_bytes[event.axis] = measured_bytes.get(event.axis, 0) + event.bytes
    rows = [
        Comparison("step time (median)", predicted["step_time_s"], recorded["step_time_s"], "s"),
        *(
            Comparison(
                f"bytes over {axis}", predicted["bytes_per_axis"].get(axis, 0), measured_bytes.get(axis, 0), "bytes"
            )
            for axis in dict.fromkeys((*predicted["bytes_per_axis"], *measured_bytes))
        ),
        Comparison("peak memory", predicted["memory_bytes"], recorded["memory_bytes"], "memory"),
    ]
    program = expand(given.model, given.job, given.strategy)
    found = tuple(differences(program.events, events))
    return Outcome(folder, recorded["interrupted"], recorded, tuple(rows), found)


def with_overrides(file: JobFile, strategy: str | None) -> JobFile:
    """A job file with another strategy, given as a line."""
    return replace(file, strategy=jobfile.make_strategy(strategy)) if strategy else file


def parity(file: JobFile, steps: int, dtype: str) -> dict[str, Any]:
    """Hold a strategy against one process; the result as `phalanx parity --json` prints it. Raises InputError,
    RankFailure."""
    from phalanx.runtime.launch import launch
    from phalanx.verify.parity import BOUNDS

    if dtype not in BOUNDS:
        raise InputError("--dtype", dtype, "parity has no bound for it", f"use {' or '.join(BOUNDS)}")
    if steps < 1:
        raise InputError("--steps", steps, "must be at least 1")
    if file.strategy is None:
        raise InputError("strategy", "auto", "parity examines one strategy", "name it, e.g. --strategy dp=2")
    require_runnable(file.strategy)
    check(file.strategy, file.model, file.job, None)
    require_local(file.strategy.world)
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        out = Path(folder) / "parity.json"
        given = {"tables": jobfile.to_tables(file), "out": str(out), "steps": steps, "dtype": dtype}
        if launch("phalanx.verify.worker", json.dumps(given), file.strategy.world, file.train.threads):
            raise KeyboardInterrupt
        found = json.loads(out.read_text())
    loss, grad = (max(d[key] for d in found) for key in ("loss_rel_max", "grad_rel_max"))
    return {
        "strategy": str(file.strategy),
        "dtype": dtype,
        "steps": steps,
        "bound": BOUNDS[dtype],
        "loss_rel_max": loss,
        "grad_rel_max": grad,
        "passed": loss <= BOUNDS[dtype] and grad <= BOUNDS[dtype],
        "optimizers": found,
    }


def require_local(ranks: int) -> None:
    """That this machine can hold so many ranks: one per GPU, or a few per core. Raises InputError."""
    machine = fingerprint()
    gpus = len(machine["gpus"])
    most = gpus or _RANKS_PER_CORE * machine["cores"]
    if ranks > most:
        have = f"{gpus} GPUs" if gpus else f"{machine['cores']} cores ({_RANKS_PER_CORE} ranks each at most)"
        raise InputError("cluster.ranks", ranks, f"is too many for this machine with {have}", f"use at most {most}")


def require_this_machine(file: JobFile) -> None:
    """That local ranks can stand for the job's cluster. Raises InputError."""
    if file.cluster.preset != "local":
        if file.cluster.preset:
            clusters.preset(file.cluster.preset, file.cluster.nodes)
        raise InputError(
            "cluster",
            file.cluster.preset or file.cluster.file,
            "is not this machine",
            "start under torchrun or srun there, or use preset = 'local'",
        )


def sample(folder: Path) -> str:
    """A few lines that the trained model writes."""
    from phalanx.infer.generate import Sampling, generate

    train = plan.read(folder / "plan.json").train
    return generate(folder, train.prompt, Sampling(tokens=train.sample_tokens)) if train.sample_tokens else ""


def measure(ranks: int | None, dtype: str, threads: int, announce: Announce) -> ClusterSpec:
    """This machine, measured anew. Raises InputError, RankFailure."""
    precision = jobfile.build(Precision, {"compute": dtype}, "--dtype")
    count = ranks if ranks is not None else default_ranks()
    if count < 1 or threads < 1:
        raise InputError("--ranks" if count < 1 else "--threads", min(count, threads), "must be at least 1")
    require_local(count)
    return local_cluster(count, precision.compute, threads, anew=True, announce=announce)


def train_rank(world: Any, file: JobFile, resume: bool) -> bool:
    """Be one rank of a job that torchrun or srun started. Rank 0 decides, and tells the others.

    True if a stop was asked for.
    """
    from phalanx.runtime import world as worlds
    from phalanx.train import worker

    worlds.join(world, file.train.timeout_s)
    box: list[str | None] = [None]
    if world.rank == 0:
        try:
            decision = decide(file, world=world.size, announce=lambda _: None)
            box[0] = str(open_run(decision, resume).absolute())
        except InputError as error:
            worlds.tell(["error", str(error)])
            raise
    told = worlds.tell(["folder", box[0]])
    if told[0] == "error":
        raise InputError("rank 0", None, str(told[1]))
    interrupted = worker.train_rank(world, Path(str(told[1])), resume)
    worlds.leave()
    return interrupted
