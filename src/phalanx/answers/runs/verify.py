"""A strategy's program compared with the step of our own runtime: what `phalanx verify` does.

The cluster only decides the size of `auto` buckets and the strategy that `auto` means. Without one, buckets have
torch DDP's default size.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from phalanx.answers.answer import Answer, plain
from phalanx.answers.machine.this_machine import Announce
from phalanx.answers.plan import decide, with_strategy
from phalanx.answers.question.file_query import query_by
from phalanx.answers.question.query import Query, QueryFields, Source, query_of
from phalanx.answers.question.read import is_configuration
from phalanx.answers.question.resolution import OWN_STACK, read
from phalanx.answers.question.strategy_line import strategy_on
from phalanx.cost.step.expand import expand
from phalanx.observation.diff import Difference, slack
from phalanx.observation.trainer.verify import ProvedClass
from phalanx.observation.trainer.verify import verify as verify_classes
from phalanx.planning.auto.bucket_size import has_buckets
from phalanx.planning.auto.transport import cluster_for_transport
from phalanx.planning.explain.program_traffic import differing_axes
from phalanx.planning.lookup import cluster_on, model_named
from phalanx.planning.search.best_first import price
from phalanx.planning.search.column_pricing import Pricing
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files import plan as plans
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.files.job_file import ClusterChoice, JobFile
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.modules import require_modules
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import PRECISIONS
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class VerifiedJob:
    """A job to be verified.

    `about` states what is proved. `measured` is the peak memory in bytes that a run recorded, if there is one;
    `notes` are lines for the user; `prediction` is that of a plan.json.
    """

    model: ModelSpec
    job: Job
    strategy: Strategy
    measured: int | None = None
    notes: tuple[str, ...] = ()
    prediction: Mapping[str, Any] | None = None
    about: str = "our own runtime's program"
    priced: Pricing | None = None
    """The pricing of a plan for another stack, by which its traffic was computed."""


@dataclass(frozen=True)
class Verification(Answer):
    """The result for each class of ranks; `stale`: figures of the plan that its terms no longer give."""

    target: VerifiedJob
    classes: tuple[ProvedClass, ...]
    stale: tuple[Difference, ...]
    on_gpu: bool = False

    @property
    def proved(self) -> bool:
        """Whether every class of ranks issues the events of the plan, and no figure of the plan is stale."""
        return all(v.proved for v in self.classes) and not self.stale


def target(query: Query, overrides: Sequence[str], announce: Announce) -> VerifiedJob:
    """Return the job to verify, of a plan.json, a run's folder, a job file, another framework's configuration or
    options. Strategy, cluster, number of GPUs and `overrides` replace the fields of a job file. Raises InputError."""
    path = None if query.source is None else Path(query.source)
    strategy, cluster = query.strategy, query.cluster
    if path is None or is_configuration(path):
        of_model = tuple(o for o in overrides if o.startswith("model."))
        query, overrides = replace(query, changes=of_model), [o for o in overrides if o not in of_model]
    if path is None:
        return _of_options(query, overrides)
    if is_configuration(path):
        if overrides:
            raise InputError("set", overrides[0], "is about a job file", "leave it out, or name a job file")
        return _of_configuration(path, query)
    for name, value in (("model", query.model), ("batch", query.batch), ("seq", query.seq)):
        if value is not None:
            raise InputError(name, value, f"is already set by {path}", "leave it out; --set changes a job's fields")
    if query.precision is not None:
        raise InputError("precision", query.precision, f"is already set by {path}", "leave it out")
    if path.is_dir() or path.suffix.lower() == ".json":
        others = {"strategy": strategy, "cluster": cluster, "gpus": query.gpus, "set": overrides}
        for name, given in others.items():
            if given:
                raise InputError(name, str(given), "a plan is verified unchanged", "give the job file instead")
        return _of_plan(path)
    if query.gpus is not None and strategy is None:
        raise InputError("gpus", query.gpus, "fills the dp of a --strategy, and there is none", "leave it out")
    if strategy is not None and query.gpus is not None:
        chosen, rule = strategy_on(strategy, query.gpus)
        announce(f"note: {rule}")
        strategy = str(chosen)
    file = with_strategy(job_file.load(path, overrides), None if strategy is None else str(strategy))
    if cluster is not None:
        file = replace(file, cluster=_chosen(str(cluster)))
    require_modules(file.model, 1 if file.strategy is None else file.strategy.cp)
    if file.strategy is None:
        return _decide(file, announce)
    require_runnable(file.strategy, file.job)
    check(file.strategy, file.model, file.job, None)
    return _of_job(file, file.strategy)


def _of_options(query: Query, overrides: Sequence[str]) -> VerifiedJob:
    """Return the job of a model, a cluster and a strategy that options name; `overrides` set its further fields.
    Raises InputError."""
    question = read(replace(query, stack=OWN_STACK))
    run = [word for word, f in PRECISIONS.items() if f.computes or f.multiplies]
    if question.precision not in run:
        raise InputError("precision", question.precision, "is not run by our runtime", f"use {', '.join(run)}")
    p, strategy = question.pricing, question.strategy
    assert strategy is not None
    require_modules(p.model, strategy.cp)
    job = p.job
    if (products := PRECISIONS[question.precision]).narrow:
        job = replace(job, precision=replace(job.precision, products=products.name))  # type: ignore[arg-type]
    if overrides:
        job = _with_overrides(job, overrides)
    require_runnable(strategy, job)
    check(strategy, p.model, job, None)
    priced = price(p.model, p.cluster, job, strategy)
    notes = [*question.notes, question.dp_rule]
    if priced.reason:
        notes.append(f"on {p.cluster.name} this strategy is rejected: {priced.reason}")
    return VerifiedJob(p.model, job, priced.strategy, None, tuple(notes))


def _with_overrides(job: Job, overrides: Sequence[str]) -> Job:
    """Return a job with `--set job.field=value` applied. Raises InputError."""
    tables = {"job": _without_none(asdict(job))}
    for item in overrides:
        name = item.partition("=")[0].strip()
        if not name.startswith("job.") or name in ("job.global_batch", "job.seq"):
            raise InputError("set", item, "sets a field of a job file", "name a job file, or set the job's alone")
    return job_file.build(Job, job_file.override(tables, overrides)["job"], "job")


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without the keys whose value is None, as files leave them out."""
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in table.items() if v is not None}


def _of_configuration(path: Path, query: Query) -> VerifiedJob:
    """Return the job of another framework's configuration, as our runtime runs its strategy. Raises InputError for
    what our runtime does not have."""
    asked, configured = query_by(path, query)
    gpus, job, stack, options = asked.gpus, configured.job, asked.stack, configured.options
    assert gpus is not None  # query_by raises where the file leaves them open
    assert job is not None
    strategy, _ = strategy_on(asked.strategy or "", gpus)
    model = asked.model if isinstance(asked.model, ModelSpec) else model_named(str(asked.model))[0]
    job = replace(job, precision=Precision("float16" if asked.precision == "fp16" else "bfloat16"))
    require_modules(model, strategy.cp)
    require_runnable(strategy, job)
    check(strategy, model, job, None)
    notes = list(configured.notes)
    if options.changed():
        notes.append(f"options of {stack} are not verified, our runtime has none of them: {options}")
    if query.cluster is not None:
        on = cluster_on(query.cluster)(gpus)
        priced = price(model, on, job, strategy)
        strategy = priced.strategy
        notes += [f"on {on.name} this strategy is rejected: {priced.reason}"] if priced.reason else []
    about = (
        f"our own runtime's program of this strategy; {stack}'s own program is not run (phalanx observe does that)"
    )
    return VerifiedJob(model, job, strategy, None, tuple(notes), None, about)


def run(target: VerifiedJob, announce: Announce, on_gpu: bool = False) -> Verification:
    """Run the step of one rank of each class, on the host or on the fake GPU, and compare it with the plan."""
    world = target.strategy.world
    classes = verify_classes(
        target.model,
        target.job,
        target.strategy,
        lambda ranks: announce(f"rank {ranks.rank} of {world} takes a step, on fake tensors"),
        on_gpu,
    )
    return Verification(target, classes, tuple(_stale(target)), on_gpu)


def _stale(target: VerifiedJob) -> Iterator[Difference]:
    """Yield figures of a plan.json that differ from those computed now: it was edited, or is of another version."""
    if target.priced is not None:
        for axis, then, now in differing_axes(target.priced, target.strategy):
            reason = f"priced as {target.priced.stack} sends them, not as our runtime does"
            yield Difference(f"bytes that the job sends over {axis}", f"{then:,.0f}", f"{now:,.0f}", reason)
        return
    if target.prediction is None:
        return
    steps = [expand(view) for view in Layout(target.model, target.job, target.strategy).stage_views()]
    flops = sum(e.flops for step in steps for e in step.events) // len(steps)
    figures: dict[str, tuple[Any, Any]] = {
        "flops": (flops, target.prediction.get("flops")),
        "bytes_per_axis": (steps[0].bytes_per_axis(), target.prediction.get("bytes_per_axis")),
        "memory_bytes": (max(step.peak_bytes for step in steps), target.prediction.get("memory_bytes")),
    }
    for name, (now, then) in figures.items():
        near = name == "memory_bytes" and isinstance(then, int) and abs(now - then) <= max(map(slack, steps))
        if now != then and not near:
            yield Difference(f"{name} of the plan", str(then), str(now), "made by another version, or edited")


def _of_plan(path: Path) -> VerifiedJob:
    """Return the job of a plan.json or a run's folder. Raises InputError."""
    path = path / "plan.json" if path.is_dir() else path
    plan = plans.read(path)
    require_modules(plan.model, plan.strategy.cp)
    require_runnable(plan.strategy, plan.job)
    check(plan.strategy, plan.model, plan.job, None)
    if plan.strategy.world > plan.cluster.ranks:
        reason = f"has more ranks than its cluster, {plan.cluster.ranks}"
        raise InputError("plan.strategy", str(plan.strategy), reason)
    measured, notes = _measured_peak(path.with_name("recorded.json"))
    if "stack" not in plan.prediction:
        return VerifiedJob(plan.model, plan.job, plan.strategy, measured, notes, plan.prediction)
    question = read(Query(path))
    about = (
        f"our own runtime's program of this strategy, and that it sends what the plan's price has {question.stack} "
        f"send; {question.stack}'s own program is not run"
    )
    return VerifiedJob(plan.model, plan.job, plan.strategy, measured, notes, plan.prediction, about, question.pricing)


def _measured_peak(record: Path) -> tuple[int | None, tuple[str, ...]]:
    """Return (peak memory in bytes that a run recorded, or None; a note where the record is damaged)."""
    if not record.exists():
        return None, ()
    try:
        peak = read_json(record, "recorded")["memory_bytes"]
        if type(peak) is int and 0 < peak < 2**63:
            return peak, ()
        why = f"memory_bytes is {peak!r}"
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
    return None, (f"{record} holds no measured peak memory ({why})",)


def _chosen(cluster: str) -> ClusterChoice:
    """Return the choice of a cluster, by preset or TOML file. The number of nodes follows from the strategy."""
    if cluster.lower().endswith(".toml"):
        return ClusterChoice(file=str(Path(cluster).absolute()))
    return ClusterChoice(preset=cluster)


def _decide(file: JobFile, announce: Announce) -> VerifiedJob:
    """Return a job whose strategy is "auto", with the strategy that a search finds. Raises InputError."""
    decision = decide(file, announce=announce)
    return VerifiedJob(file.model, file.job, decision.plan.strategy, None, file.notes)


def _of_job(file: JobFile, strategy: Strategy) -> VerifiedJob:
    """Return a job with its strategy; the cluster decides the size of buckets."""
    notes = list(file.notes)
    if file.cluster.preset == "local":
        if has_buckets(strategy) and strategy.bucket == "auto":
            size = write_bytes(strategy.bucket_bytes)
            notes.append(f"buckets of {size}: this machine is not measured for that; name a cluster with --cluster")
        return VerifiedJob(file.model, file.job, strategy, None, tuple(notes))
    cluster = cluster_for_transport(_large_enough(file.cluster, strategy), file.train.transport)
    if cluster.nodes > file.cluster.nodes and file.cluster.nodes > 1:
        notes.append(f"{strategy.world} ranks take {cluster.nodes} nodes, not {file.cluster.nodes}")
    priced = price(file.model, cluster, file.job, strategy)
    if priced.reason:
        notes.append(f"on {cluster.name} this strategy is rejected: {priced.reason}")
    return VerifiedJob(file.model, file.job, priced.strategy, None, tuple(notes))


def _large_enough(choice: ClusterChoice, strategy: Strategy) -> ClusterSpec:
    """Return a cluster with enough nodes for all ranks of a strategy. Raises InputError."""
    if choice.file:
        cluster = cluster_from_toml(Path(choice.file))
        nodes = -(-strategy.world // cluster.ranks_per_node)
        return replace(cluster, nodes=max(cluster.nodes, nodes))
    nodes = -(-strategy.world // clusters.preset(str(choice.preset), 1).ranks_per_node)
    return clusters.preset(str(choice.preset), max(choice.nodes, nodes))


@plain.register
def _(v: Verification) -> dict[str, Any]:
    job, strategy = v.target.job, v.target.strategy
    return {
        "proved": v.proved,
        "device": "cuda (fake)" if v.on_gpu else "cpu",
        "about": v.target.about,
        "strategy": str(strategy),
        "world": strategy.world,
        "micro_batches": strategy.accumulation(job),
        "parameters": v.target.model.parameter_count,
        "classes": [_class_json(checked, v.on_gpu) for checked in v.classes],
        "stale": [str(d) for d in v.stale],
        "measured_peak_bytes": v.target.measured,
        "notes": list(v.target.notes),
    }


def verify(
    source: Source = None, overrides: Sequence[str] = (), device: str = "cpu", **fields: Unpack[QueryFields]
) -> Verification:
    """Run the real step of one rank of each class on tensors without content, and compare it with the plan.

    `source`: a plan.json, a job file, a run's folder, another framework's configuration, or a Query; `overrides`: as
    `train`'s, such as "job.seq=128"; `device`: "cuda" for a fake GPU. Needs torch. Raises InputError."""
    if device not in ("cpu", "cuda"):
        raise InputError("device", device, "is neither cpu nor cuda", "use cuda for a fake GPU")
    return run(target(query_of(source, fields), overrides, lambda _: None), lambda _: None, device == "cuda")


def _class_json(checked: ProvedClass, on_gpu: bool) -> dict[str, Any]:
    recorded, program = checked.recorded, checked.program
    return {
        "rank": checked.ranks.rank,
        "rank_count": checked.ranks.count,
        "ranks": checked.ranks.description,
        "proved": checked.proved,
        "failed": checked.failed or None,
        "predicted": _totals(program.events, program.state.total, program.peak_bytes),
        "recorded": _totals(recorded.events, recorded.memory.state, recorded.memory.peak) if recorded else None,
        "micro_batches_run": recorded.ran if recorded else None,
        "largest_deviation_bytes": checked.deviation,
        "differences": [asdict(d) | {"message": str(d)} for d in checked.differences],
        "host_waits": dict(recorded.waits) if recorded and on_gpu else None,
        "seconds": checked.seconds,
    }


def _totals(events: Sequence[Event], state: int, peak: int) -> dict[str, Any]:
    return {
        "events": len(events),
        "collectives": [
            {"op": op, "axis": axis, "count": count, "bytes": size}
            for (op, axis), (count, size) in collectives(events).items()
        ],
        "flops": sum(e.flops for e in events if e.phase != "opt"),
        "state_bytes": state,
        "peak_bytes": peak,
    }


def collectives(events: Sequence[Event]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (number, bytes) of collectives by (operation, axis)."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for e in events:
        if e.axis:
            count[e.op, e.axis] += 1
            size[e.op, e.axis] += e.bytes
    return {key: (count[key], size[key]) for key in count}
