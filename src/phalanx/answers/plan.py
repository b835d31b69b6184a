"""Plans of jobs (`phalanx plan JOB.toml`): the cluster, the strategy, its price; and plans made of other prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.answers.answer import DRAWN, Answer
from phalanx.answers.machine.this_machine import Announce, require_local
from phalanx.answers.question.file_query import query_by
from phalanx.answers.question.query import Query
from phalanx.answers.question.read import Reading
from phalanx.answers.question.resolution import resolve
from phalanx.cost.hardware.bent import scaled_cluster
from phalanx.frameworks.writing.source_file import file_entry
from phalanx.measure.this_machine import default_ranks, local_cluster
from phalanx.planning.auto import stage_split, transport
from phalanx.planning.auto.bucket_size import USER_CHOICE, has_buckets
from phalanx.planning.auto.transport import cluster_for_transport
from phalanx.planning.budget import Goal
from phalanx.planning.expense.expense import Expense
from phalanx.planning.expense.rates import ExpenseRates, rates_on, read_rates
from phalanx.planning.lookup import calibration_of
from phalanx.planning.search.best_first import STACK, Candidate, SearchResult, price, search
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import PipelineRun
from phalanx.planning.training_cost import TrainingCost, expense_on, training_cost
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.calibration import Calibration, in_words
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.files.job_file import ClusterChoice, JobFile
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Train
from phalanx.spec.model.modules import require_modules
from phalanx.spec.strategy.legality import require_runnable, require_synchronised
from phalanx.spec.strategy.spec import Strategy

if TYPE_CHECKING:
    from phalanx.runtime.process.environment import World


@dataclass(frozen=True)
class Decision:
    """A plan, and the strategies that it was chosen from.

    `chosen` is the plan's strategy with its price; `candidates` are all that were priced, fastest first; `searched`
    is the result of the search, None if the job names its strategy.
    """

    plan: Plan
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    searched: SearchResult | None = None


@dataclass(frozen=True)
class JobCandidate:
    """A strategy of a job, priced exactly."""

    strategy: Strategy
    """As it was asked for: bucket and chunks may be `auto`."""
    micro_batches: int
    step_time_s: float
    tokens_per_s: float
    exposed_communication_s: float
    bubble_share: float
    memory_bytes: int
    rejected: str
    """Why it cannot be run; "" if it can."""


@dataclass(frozen=True)
class JobPlan(Answer):
    """The fastest strategy of a job on its cluster, and the strategies that it was chosen from."""

    rows_of = "alternatives"
    best: Mapping[str, Any]
    """Strategy and prediction of the fastest."""
    strategies_evaluated: int
    strategies_priced_one_by_one: int
    exhaustive: bool
    """Whether every strategy without an exact price is known to be slower, by its lower bound."""
    worlds: tuple[int, ...]
    """Numbers of ranks that were searched; () where the job names its strategy."""
    bucket: Mapping[str, Any] | None
    chunks: Mapping[str, Any] | None
    collectives: tuple[Mapping[str, Any], ...]
    alternatives: tuple[JobCandidate, ...]
    """Fastest first, the best among them."""
    training: TrainingCost
    """All of the job's steps, with the fastest."""
    expense: Expense
    """For a million tokens, with the fastest."""
    rates: ExpenseRates
    """Prices of a GPU-hour, of energy and of carbon, with their sources."""
    plan: Plan = field(repr=False, compare=False, metadata=DRAWN)


def job_plan(d: Decision, line: str | None = None) -> JobPlan:
    """Return a decision as the answer of `phalanx plan JOB.toml`. `line`: the user's prices (planning/expense).
    Raises InputError."""
    search, job, cluster = d.searched, d.plan.job, d.plan.cluster
    rates, world = rates_on(cluster.device.name, read_rates(line)), d.chosen.strategy.world
    step_tokens, step_s = job.global_batch * job.seq, float(d.chosen.prediction.step_time_s)
    training = training_cost(Goal(d.plan.train.steps * step_tokens, world), step_tokens, step_s)
    return JobPlan(
        best={"strategy": d.chosen.as_requested, **d.plan.prediction},
        strategies_evaluated=search.legal if search else 1,
        strategies_priced_one_by_one=len(d.candidates),
        exhaustive=search.exhaustive if search else True,
        worlds=tuple(search.worlds) if search else (),
        bucket=d.plan.choices["bucket"],
        chunks=d.plan.choices["chunks"],
        collectives=tuple(d.plan.choices["collectives"]),
        alternatives=tuple(
            JobCandidate(
                strategy=c.as_requested,
                micro_batches=c.strategy.accumulation(job),
                step_time_s=float(c.prediction.step_time_s),
                tokens_per_s=float(job.global_batch * job.seq / c.prediction.step_time_s),
                exposed_communication_s=float(c.prediction.exposed_communication_s),
                bubble_share=float(c.prediction.bubble_fraction),
                memory_bytes=int(c.prediction.memory_bytes),
                rejected=c.reason,
            )
            for c in d.candidates
        ),
        training=training,
        expense=expense_on(world, step_tokens / step_s, rates, world > cluster.ranks_per_node),
        rates=rates,
        plan=d.plan,
    )


def resolve_cluster(file: JobFile, world: World | None, announce: Announce) -> ClusterSpec:
    """Return the cluster that a job file names; `local` is measured, or read from the cache. Raises InputError.

    `world`: the ranks that torchrun or srun started, if any; all their hosts are assumed to be like this one.
    """
    choice = file.cluster
    if choice.file:
        return cluster_from_toml(Path(choice.file))
    if choice.preset == "local":
        if world is not None:  # measure with as many ranks on this host as will train there
            host = local_cluster(world.local_size, file.job.precision.compute, file.train.threads, announce=announce)
            hosts = -(-world.size // world.local_size)
            if hosts > 1:
                announce(
                    f"note: links between these {hosts} hosts are not measured, and priced like links inside a host; "
                    "measure them with -m phalanx measure --out FILE under the same torchrun, then set "
                    "[cluster] file = FILE"
                )
            return replace(host, nodes=hosts)
        count = choice.ranks or (file.strategy.world if file.strategy else default_ranks())
        require_local(count)
        return local_cluster(count, file.job.precision.compute, file.train.threads, announce=announce)
    return clusters.preset(str(choice.preset), choice.nodes)


def decide(
    file: JobFile,
    world: World | None = None,
    tokens: str = "",
    announce: Announce = lambda _: None,
    calibration: Path | None = None,
) -> Decision:
    """Price a job's strategy, or search for one if it is "auto", and return the plan. Raises InputError.

    `world`: the ranks that torchrun or srun started, if any; `tokens`: the digest of the training text;
    `calibration`: a file that `phalanx measure steps` wrote for runs of our own runtime.
    """
    by = None if calibration is None else _own_factors(calibration)
    strategy, size = file.strategy, world.size if world else None
    require_modules(file.model, 1 if strategy is None else strategy.cp)
    if strategy is not None:
        require_runnable(strategy, file.job)
        require_synchronised(strategy, file.train)
        limit = file.cluster.ranks if file.cluster.preset == "local" else None
        if world is None and limit is not None and strategy.world > limit:
            reason = f"needs {strategy.world} ranks, cluster.ranks is {limit}"
            raise InputError("strategy", str(strategy), reason, "use fewer")
        check(strategy, file.model, file.job, size)
    else:
        require_runnable(Strategy(), file.job)
    cluster = cluster_for_transport(resolve_cluster(file, world, announce), file.train.transport)
    cluster = cluster if by is None else scaled_cluster(cluster, by)
    if file.train.transport == "shm" and cluster.device.kind != "cpu":
        raise InputError("train.transport", "shm", "is for CPU ranks", "use auto")
    needed = size or (strategy.world if strategy else 1)
    if needed > cluster.ranks:
        reason = f"has {cluster.ranks} ranks, {needed} are needed"
        raise InputError("cluster", cluster.name, reason, "add nodes, or lower dp")
    if strategy is not None:
        chosen = price(file.model, cluster, file.job, strategy)
        return Decision(_plan(file, cluster, chosen, tokens, by), chosen, (chosen,))
    result = search(file.model, cluster, file.job, _worlds(file, cluster, size))
    return Decision(_plan(file, cluster, result.best, tokens, by), result.best, result.candidates, result)


def _worlds(file: JobFile, cluster: ClusterSpec, started: int | None) -> list[int]:
    """Return the world sizes that a search may use: the number of ranks that were started, or all of a cluster; on
    this machine also the smaller numbers whose rates were measured, because fewer ranks may be faster."""
    if started is not None:
        return [started]
    if file.cluster.preset != "local":
        return [cluster.ranks]
    measured = {k.concurrent for k in cluster.kernels if k.dtype == file.job.precision.compute}
    return sorted({n for n in measured if n < cluster.ranks} | {cluster.ranks})


def _own_factors(file: Path) -> Calibration:
    """Return a calibration that was fitted to runs of our own runtime. Raises InputError."""
    by = calibration_of(file)
    if by.stack != STACK:
        reason = f"is of steps of {by.stack or 'an unnamed stack'}, and a job is priced as our own runtime runs it"
        raise InputError("calibration", str(file), reason, "calibrate with runs/NAME folders")
    return by


def _plan(file: JobFile, cluster: ClusterSpec, chosen: Candidate, tokens: str, by: Calibration | None) -> Plan:
    """Return the plan of a chosen strategy: its prediction, and the choices that all ranks of a run must share."""
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
        "bucket": {"bytes": chosen.strategy.bucket_bytes, "reason": chosen.bucket_reason or USER_CHOICE}
        if has_buckets(chosen.strategy)
        else None,
        "chunks": stage_split.explanation(
            file.model, cluster, file.job, chosen.strategy, chosen.layers_reason or USER_CHOICE
        ),
        "peak_flops_per_s": rates.peak_flops_per_s,
        "rates_origin": rates.origin,
        "tokens": tokens,
        "cluster": asdict(file.cluster),
        **({} if by is None else {"calibrated": in_words(by)}),
    }
    return Plan(file.model, cluster, file.job, chosen.strategy, file.train, choices, prediction)


def with_strategy(file: JobFile, strategy: str | None) -> JobFile:
    """Return a job file with the strategy of a line, or unchanged if the line is empty. Raises InputError."""
    return replace(file, strategy=job_file.make_strategy(strategy)) if strategy else file


def plan_of_configuration(reading: Reading, path: Path, query: Query) -> tuple[Plan, tuple[str, ...]]:
    """Return (plan, notes for the user) of a configuration, priced on the query's cluster. Raises InputError for what
    neither the configuration nor the query sets."""
    q = resolve(*query_by(path, query, reading))
    x = q.subject
    plan = plan_of(q.pricing, x.priced, x.run, x.mfu, query.cluster or "", q.precision)
    plan.choices["source"] = file_entry(reading.title, reading.configuration.kind, reading.config, ())
    return plan, q.notes


def plan_of(
    p: Pricing, priced: PricedStrategy, run: PipelineRun, mfu: float, cluster: str | ClusterSpec, precision: str
) -> Plan:
    """Return a priced strategy as a plan. `cluster`: as a user gave it, which may be a file."""
    preset = ClusterChoice(preset=p.cluster.name, nodes=p.cluster.nodes)
    from_file = isinstance(cluster, str) and cluster.lower().endswith(".toml")
    chosen = ClusterChoice(file=str(cluster)) if from_file else preset
    choices: dict[str, Any] = {
        "stack": p.stack,
        "precision": precision,
        "transport": "auto",
        "collectives": [],
        "bucket": None,
        "chunks": {"blocks": list(run.blocks), "imbalance": run.imbalance},
        "peak_flops_per_s": float(p.system.peak_bf16),
        "rates_origin": "estimated",
        "tokens": "",
        "cluster": asdict(chosen),
    }
    prediction = {
        "stack": p.stack,
        "step_time_s": priced.seconds,
        "memory_bytes": int(priced.bytes_),
        "mfu": mfu,
        "bubble_fraction": run.bubble / priced.seconds,
        "terms_s": priced.terms,
        "memory_terms": priced.memory_terms,
    }
    return Plan(p.model, p.cluster, p.job, priced.strategy, Train(), choices, prediction, p.extra)
