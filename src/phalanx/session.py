"""What each command does, composed from the rooms: measure, plan, launch, compare.

The command line parses and renders; this file decides the order. It resolves strategy = "auto".
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cost.step.expand import expand
from phalanx.measure.this_machine import default_ranks, fingerprint, local_cluster
from phalanx.plan.auto import stage_split, transport
from phalanx.plan.auto.bucket_size import GIVEN, has_buckets
from phalanx.plan.auto.transport import allowed
from phalanx.plan.search.best_first import Candidate, Searched, price, search
from phalanx.report.train import Comparison
from phalanx.runs.folder import RUNS, open_run
from phalanx.runs.initial_weights import begun, come_along
from phalanx.runs.resume import begun_by, goes_on, taken_up_by_others
from phalanx.runtime.process.cache import cache_folder
from phalanx.schedule.event import Event
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files import job_file, plan
from phalanx.spec.files.job_file import JobFile
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import compute_type
from phalanx.spec.model import spec as models
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.spec import Strategy
from phalanx.verify.diff import differences

if TYPE_CHECKING:
    from phalanx.runtime.process.world import World
    from phalanx.train.data import TokenSet

Announce = Callable[[str], None]
_RANKS_PER_CORE = 16


@dataclass(frozen=True)
class Decision:
    """A plan with the alternatives that it was chosen from, fastest first; `searched`: how, where it was."""

    plan: Plan
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    searched: Searched | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `comparisons` and `differences` hold it against its plan, which where it is `routed` says what
    experts would send and compute if the load were even."""

    folder: Path
    recorded: dict[str, Any]
    unigram_entropy: float
    comparisons: tuple[Comparison, ...]
    differences: tuple[str, ...]
    routed: bool = False


def resolve_cluster(file: JobFile, world: World | None, announce: Announce) -> ClusterSpec:
    """The cluster that a job file names; `local` is measured, or read from the cache."""
    choice = file.cluster
    if choice.file:
        return job_file.cluster_from_toml(Path(choice.file))
    if choice.preset == "local":
        if world is not None:  # the ranks of this host, under the load that they will make; hosts alike
            host = local_cluster(world.local_size, file.job.precision.compute, file.train.threads, announce=announce)
            hosts = -(-world.size // world.local_size)
            if hosts > 1:
                announce(
                    f"note: links between these {hosts} hosts are not measured, and priced like those inside of one; "
                    "under the same torchrun: -m phalanx measure --out FILE, and [cluster] file = FILE"
                )
            return replace(host, nodes=hosts)
        count = choice.ranks or (file.strategy.world if file.strategy else default_ranks())
        require_local(count)
        return local_cluster(count, file.job.precision.compute, file.train.threads, announce=announce)
    return clusters.preset(str(choice.preset), choice.nodes)


def decide(
    file: JobFile, world: World | None = None, tokens: str = "", announce: Announce = lambda _: None
) -> Decision:
    """Choose (or price) the strategy. `world`: the ranks, where somebody else has started them; `tokens`: the
    digest of the text that will be trained on. Raises InputError."""
    strategy, size = file.strategy, world.size if world else None
    models.require_runnable(file.model)
    if strategy is not None:
        require_runnable(strategy, file.job)
        limit = file.cluster.ranks if file.cluster.preset == "local" else None
        if world is None and limit is not None and strategy.world > limit:
            raise InputError(
                "strategy", str(strategy), f"needs {strategy.world} ranks, cluster.ranks is {limit}", "use fewer"
            )
        check(strategy, file.model, file.job, size)
    else:
        require_runnable(Strategy(), file.job)
    cluster = allowed(resolve_cluster(file, world, announce), file.train.transport)
    if file.train.transport == "shm" and cluster.device.kind != "cpu":
        raise InputError("train.transport", "shm", "is for CPU ranks", "use auto")
    needed = size or (strategy.world if strategy else 1)
    if needed > cluster.ranks:
        raise InputError(
            "cluster", cluster.name, f"has {cluster.ranks} ranks, {needed} are needed", "add nodes, or lower dp"
        )
    if strategy is not None:
        chosen = price(file.model, cluster, file.job, strategy)
        return Decision(_plan(file, cluster, chosen, tokens), chosen, (chosen,))
    found = search(file.model, cluster, file.job, _worlds(file, cluster, size))
    return Decision(_plan(file, cluster, found.best, tokens), found.best, found.candidates, found)


def _worlds(file: JobFile, cluster: ClusterSpec, started: int | None) -> list[int]:
    """How many ranks a search may take: those that were started, all of a cluster; of this machine fewer too, where
    they would be faster: as many as were at work together when it was measured."""
    if started is not None:
        return [started]
    if file.cluster.preset != "local":
        return [cluster.ranks]
    measured = {k.concurrent for k in cluster.kernels if k.dtype == file.job.precision.compute}
    return sorted({n for n in measured if n < cluster.ranks} | {cluster.ranks})


def _plan(file: JobFile, cluster: ClusterSpec, chosen: Candidate, tokens: str) -> Plan:
    p = chosen.prediction
    rates = cluster.rates(file.job.precision.compute, min(chosen.strategy.world, cluster.ranks_per_node))
    prediction = {
        "step_time_s": float(p.step_time_s),
        "forward_s": float(p.forward_s),
        "backward_s": float(p.backward_s),
        "optimizer_s": float(p.optimizer_s),
        "communication_s": float(p.communication_s),
        "exposed_communication_s": float(p.exposed_communication_s),
        "bubble_fraction": float(p.bubble_fraction),
        "flops": int(p.flops),
        "model_flops": int(p.model_flops),
        "memory_bytes": int(p.memory_bytes),
        "state_bytes": int(p.state_bytes),
        "activation_bytes": int(p.activation_bytes),
        "bytes_per_axis": {axis: int(n) for axis, n in p.bytes_per_axis.items()},
    }
    choices = {
        "transport": file.train.transport,
        "collectives": [asdict(c) for c in transport.decide(cluster, file.train.transport)],
        "bucket": {"bytes": chosen.strategy.bucket_bytes, "reason": chosen.bucket_reason or GIVEN}
        if has_buckets(chosen.strategy)
        else None,
        "chunks": stage_split.explained(
            file.model, cluster, file.job, chosen.strategy, chosen.layers_reason or GIVEN
        ),
        "peak_flops_per_s": rates.peak_flops_per_s,
        "rates_origin": rates.origin,
        "tokens": tokens,
        "cluster": asdict(file.cluster),
    }
    return Plan(file.model, cluster, file.job, chosen.strategy, file.train, choices, prediction)


def prepare_data(file: JobFile, announce: Announce) -> TokenSet:
    """The tokens of a job: read, encoded and cached before any rank starts. Raises InputError."""
    from phalanx.train import tensorboard
    from phalanx.train.data import Batches, prepare, require_documents

    if file.train.tensorboard:
        tensorboard.require()
    tokens = prepare(file.train, file.model.vocab, cache_folder(), announce)
    if file.job.documents == "separate":
        require_documents(tokens)
    Batches(tokens.training(), file.job.seq, file.job.global_batch, file.train.seed)
    return tokens


def train(
    file: JobFile,
    resume: bool,
    world: World | None,
    show: Callable[[Decision], None],
    announce: Announce,
    max_restarts: int = 0,
) -> Outcome | None:
    """Plan a job, run it, and hold it against the plan: on ranks that we launch here, and start again
    `max_restarts` times, or as one rank of a `world` that torchrun or srun has started (then the outcome is rank 0's
    alone). Raises InputError, RankFailure."""
    if world is not None:
        return _train_rank(file, resume, world, show, announce)
    from phalanx.runtime.checkpoint.store import sweep
    from phalanx.runtime.process.launch import launch

    require_this_machine(file)
    decision, tokens = _begin(file, resume, None, announce)
    show(decision)
    with open_run(decision.plan, tokens.tokenizer, resume, come_along(decision.plan.train)) as folder:
        argument = json.dumps({"folder": str(folder), "resume": resume})
        try:
            launch(
                "phalanx.train.worker",
                argument,
                decision.plan.strategy.world,
                decision.plan.train.threads,
                lambda: announce("stopping after this step; Ctrl-C again to end at once"),
                decision.plan.train.timeout_s,
                max_restarts,
                lambda number, failure: announce(f"restart {number} of {max_restarts}: {failure}; {goes_on(folder)}"),
            )
        finally:
            sweep(folder / "checkpoint")
        return outcome(folder, tokens.unigram_entropy)


def _begin(file: JobFile, resume: bool, world: World | None, announce: Announce) -> tuple[Decision, TokenSet]:
    """Everything that can go wrong before the first rank works."""
    models.require_runnable(file.model)
    if file.strategy is not None:
        require_runnable(file.strategy, file.job)
        check(file.strategy, file.model, file.job, world.size if world else None)
    if file.train.weights and not resume:
        file = begun(file, announce)
    tokens = prepare_data(file, announce)
    decision = decide(file, world, tokens.digest, announce)
    if decision.chosen.reason:
        raise InputError("strategy", str(decision.plan.strategy), decision.chosen.reason, "use a smaller micro_batch")
    if resume:
        old = plan.read(RUNS / file.train.name / "plan.json")
        if old.choices["tokens"] != tokens.digest:
            raise InputError("train.data", file.train.data, "has changed since the run began", "start a new run")
        if old.choices["transport"] == file.train.transport and old.cluster.ranks == decision.plan.cluster.ranks:
            # On the same ranks the same transports: losses stay equal to the bit, whatever a new measurement says.
            decision.plan.choices["collectives"] = old.choices.get("collectives", [])
        if decision.plan.strategy == old.strategy and old.choices.get("bucket"):
            decision.plan.choices["bucket"] = old.choices["bucket"]  # the size is the old one, and so is its reason
    return decision, tokens


def _train_rank(
    file: JobFile, resume: bool, world: World, show: Callable[[Decision], None], announce: Announce
) -> Outcome | None:
    """Be one rank. Rank 0 decides and tells the others; the run folder is on a file system that all share."""
    from phalanx.runtime.checkpoint.store import steps
    from phalanx.runtime.process import world as worlds
    from phalanx.runtime.process.launch import StopFlag, named
    from phalanx.train import worker

    with named(world):
        worlds.join(world, file.train.timeout_s)
        launchers = worlds.launchers()
    if world.rank:
        told = worlds.tell([None, None, None])
        if told[0] != "folder":
            raise InputError("rank 0", None, f"gave up: {told[1]}")
        with named(world):
            worker.train_rank(world, Path(str(told[1])), bool(told[2]), StopFlag())
        return None
    with ExitStack() as stack:
        try:
            ours = begun_by(launchers, file.train.name)
            if ours and steps(RUNS / file.train.name / "checkpoint"):
                file, resume = taken_up_by_others(file, world.size), True
                announce(f"note: the ranks were started again; the run goes on with {world.size}: {file.strategy}")
            decision, tokens = _begin(file, resume, world, announce)
            decision.plan.choices["launchers"] = launchers
            show(decision)
            small = come_along(decision.plan.train)
            folder = stack.enter_context(open_run(decision.plan, tokens.tokenizer, resume or ours, small))
        except Exception as error:
            worlds.tell(["error", str(error), None])
            raise
        worlds.tell(["folder", str(folder), "resume" if resume else ""])
        with named(world):
            worker.train_rank(world, folder, resume, StopFlag())
        return outcome(folder, tokens.unigram_entropy)


def outcome(folder: Path, unigram_entropy: float) -> Outcome:
    """What a finished run recorded, held against its plan."""
    given = plan.read(folder / "plan.json")
    recorded = json.loads((folder / "recorded.json").read_text())
    events = tuple(Event(**event) for event in recorded["events"])
    if not events:  # ranks that were started again after the last step, say
        return Outcome(folder, recorded, unigram_entropy, (), ())
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
    found = tuple(map(str, differences(program.events, events)))
    return Outcome(folder, recorded, unigram_entropy, tuple(rows), found, any(e.routed for e in program.events))


def with_overrides(file: JobFile, strategy: str | None) -> JobFile:
    """A job file with another strategy, given as a line."""
    return replace(file, strategy=job_file.make_strategy(strategy)) if strategy else file


def parity(file: JobFile, steps: int, dtype: str, announce: Announce) -> dict[str, Any]:
    """Hold a strategy against one process; the result as `phalanx parity --json` prints it. Raises InputError,
    RankFailure."""
    from phalanx.runtime.process.launch import launch
    from phalanx.verify.parity import BOUNDS

    if dtype not in BOUNDS:
        raise InputError("--dtype", dtype, "parity has no bound for it", f"use {' or '.join(BOUNDS)}")
    if steps < 1:
        raise InputError("--steps", steps, "must be at least 1")
    if file.strategy is None:
        raise InputError("strategy", "auto", "parity examines one strategy", "name it, e.g. --strategy dp=2")
    models.require_runnable(file.model)
    require_runnable(file.strategy, file.job)
    check(file.strategy, file.model, file.job, None)
    require_local(file.strategy.world)
    train = file.train
    collectives: tuple[Choice, ...] = ()
    if file.strategy.world > 1 and train.transport != "native":  # what `train` would use on this machine
        here = local_cluster(file.strategy.world, file.job.precision.compute, train.threads, announce=announce)
        collectives = transport.decide(here, train.transport)
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        out = Path(folder) / "parity.json"
        given = {"tables": job_file.to_tables(file), "out": str(out), "steps": steps, "dtype": dtype}
        given["collectives"] = [asdict(c) for c in collectives]
        launch("phalanx.verify.worker", json.dumps(given), file.strategy.world, train.threads, None, train.timeout_s)
        found = json.loads(out.read_text())
    optimizers, compression = found["optimizers"], found["compression"]
    loss, grad = (max(d[key] for d in optimizers) for key in ("loss_rel_max", "grad_rel_max"))
    lost = (compression or {}).get("lost_rel_max") or 0.0
    return {
        "strategy": str(file.strategy),
        "dtype": dtype,
        "steps": steps,
        "bound": BOUNDS[dtype],
        "loss_rel_max": loss,
        "grad_rel_max": grad,
        "passed": max(loss, grad, lost) <= BOUNDS[dtype] and all(d["steps"] for d in optimizers),
        "optimizers": optimizers,
        "compression": compression,
    }


def local_collectives(
    op: str, ranks: int, announce: Announce
) -> tuple[tuple[CollectiveFit, ...], tuple[Choice, ...]]:
    """What was measured of a collective between this machine's ranks, and which way serves which size. Raises
    InputError."""
    if ranks < 2:
        raise InputError("--ranks", ranks, "leaves nobody to talk to", "use 2 or more")
    require_local(ranks)
    cluster = local_cluster(ranks, "float32", 1, announce=announce)
    fits = tuple(cluster.fits(op, ranks))
    if not fits:
        ops = sorted({f.op for f in cluster.collectives})
        raise InputError("--op", op, "is not measured between local ranks", nearest(op, ops))
    return fits, transport.choose(fits)


def require_local(ranks: int, field: str = "cluster.ranks") -> None:
    """That this machine can hold so many ranks: one per GPU, or a few per core. Raises InputError."""
    if ranks < 1:
        raise InputError(field, ranks, "must be at least 1")
    machine = fingerprint()
    gpus = len(machine["gpus"])
    most = gpus or _RANKS_PER_CORE * machine["cores"]
    if ranks > most:
        have = f"{gpus} GPUs" if gpus else f"{machine['cores']} cores ({_RANKS_PER_CORE} ranks each at most)"
        raise InputError(field, ranks, f"is too many for this machine with {have}", f"use at most {most}")


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
    """A few lines that the trained model writes; empty where none are wanted. Raises InputError."""
    from phalanx.infer.generate import Sampling, generate

    train = plan.read(folder / "plan.json").train
    return generate(folder, train.prompt, Sampling(tokens=train.sample_tokens)) if train.sample_tokens else ""


def measure(ranks: int | None, dtype: str, threads: int, announce: Announce) -> ClusterSpec:
    """This machine, measured anew. Raises InputError, RankFailure."""
    kind = compute_type(dtype, "--dtype")
    count = ranks if ranks is not None else default_ranks()
    if count < 1 or threads < 1:
        raise InputError("--ranks" if count < 1 else "--threads", min(count, threads), "must be at least 1")
    require_local(count, "--ranks")
    return local_cluster(count, kind, threads, anew=True, announce=announce)
