"""What a training runs under: failures, restarts, spares, checkpoints and their storage, money and power.

Whatever is not given is taken from a preset, and said in `taken`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from phalanx.answers.question.query import Query
from phalanx.answers.question.question import Question
from phalanx.answers.question.resolution import read
from phalanx.cost.analytic.chips import chip_name
from phalanx.planning.expense.rates import AS_PUBLISHED, ExpenseRates, GivenRates, Taken, rates_on
from phalanx.planning.search.column_pricing import Pricing
from phalanx.reliability import presets
from phalanx.reliability.closed_form import FailureCause, Saving, TimeShares, best_interval, expected_wait, shares
from phalanx.reliability.presets import HARDWARE, UNEXPECTED, FailureCounts, RestartKind, StorageRates
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.spec import Strategy

_COPY_BYTES_PER_S = 20e9
"""From a GPU to its host's memory: PCIe 4.0 with pinned memory, estimated."""
_PAUSE_S = 0.4
"""How long an asynchronous save stops a training in addition to that copy: 0.5 s in all, for 1.5 and 2.25 GB a GPU
(DLRover, megatron_flash_checkpoint.md)."""
_PEER_BYTES_PER_S = 5e9
_LEAST_SHARE = 0.01
"""Useful share of the time below which a training is refused."""
_MOST_FAILURES = 200_000
"""Number of failures above which a training is refused: its simulation takes a step for each."""
MOST_SPARES = 100_000
SHARED_SAVES = "saves on shared storage"
"""Of a training whose nodes save on their own disks."""
_SHARED_EVERY = 10
"""Saves on a node's own disks for each one that goes to shared storage."""


@dataclass(frozen=True)
class Conditions:
    """Failures, restarts, checkpoints and spares as the user gives them; None where a preset decides."""

    failures: str | None = None
    """A preset of failure rates, or a log of one's own job (.csv)."""
    mttf_s: float | None = None
    """Mean time between failures of the job, in place of the preset's; its causes stay in proportion."""
    restart: str = "in-job"
    detect_s: float | None = None
    restart_s: float | None = None
    silent_s: float = 3600.0
    """From silent corruption until a check finds it."""
    interval_s: float | None = None
    """Work between saves; None: the best."""
    storage: str | None = None
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    checkpoint_bytes: float | None = None
    checkpoint: str = "shared"
    """shared, local (a node's disks, every tenth save shared) or replicated (in the memory of two nodes)."""
    synchronous: bool = False
    save_s: float | None = None
    load_s: float | None = None
    stall_s: float | None = None
    spares: int | None = None
    repair_s: float = 86_400.0
    elastic: bool = False
    rates: GivenRates = AS_PUBLISHED
    """Price, power and carbon."""


PLACES = ("shared", "local", "replicated")


@dataclass(frozen=True)
class TrainingJob:
    """The training without failures."""

    step_s: float
    tokens_per_step: int
    gpus: int
    nodes: int
    replicas: int
    device: str
    checkpoint_bytes: float
    writers: int
    """GPUs that write a part of a checkpoint."""


@dataclass(frozen=True)
class Premise:
    """A training with all that it runs under, in seconds and bytes."""

    trained: TrainingJob
    given: Conditions
    counts: FailureCounts
    kind: RestartKind
    storage: StorageRates
    causes: tuple[FailureCause, ...]
    planned: float
    """Seconds stopped for maintenance per second of training."""
    saving: Saving
    interval_s: float
    best_interval_s: float
    save_s: float
    load_s: float
    spares: int
    share_kept: float
    """Share of its speed at which an elastic job works on while it waits for a node; 0 if it stops."""
    rates: ExpenseRates
    taken: tuple[Taken, ...] = field(default=())

    @property
    def per_s(self) -> float:
        """Unexpected failures of the job per second."""
        return sum(cause.per_s for cause in self.causes)

    def shares(self, interval_s: float | None = None) -> TimeShares:
        """Return where the time goes in closed form, with another interval between saves if one is given."""
        return shares(self.interval_s if interval_s is None else interval_s, self.causes, self.saving, self.planned)


def job_of_query(query: Query, checkpoint_bytes: float | None) -> tuple[TrainingJob, Question]:
    """Price a question's step and count the bytes of its checkpoints, unless they are given. Raises InputError."""
    from phalanx.answers.prediction import prediction_of

    question = read(query)
    return job_of_question(question, prediction_of(question).step_time_s, checkpoint_bytes), question


def job_of_question(question: Question, step_s: float, checkpoint_bytes: float | None) -> TrainingJob:
    """Return the training of a question whose step is priced. Raises InputError."""
    exact, s = question.exact, question.strategy
    assert s is not None
    if exact is None:
        return job_of_strategy(question.pricing, s, step_s, checkpoint_bytes)
    bytes_ = _own_state_bytes(exact.model, exact.job) if checkpoint_bytes is None else checkpoint_bytes
    return _training(exact.job, exact.cluster, s, step_s, bytes_)


def job_of_strategy(p: Pricing, s: Strategy, step_s: float, checkpoint_bytes: float | None) -> TrainingJob:
    """Return the training of a strategy whose step is priced. Raises InputError."""
    return _training(
        p.job, p.cluster, s, step_s, _state_bytes(p, s) if checkpoint_bytes is None else checkpoint_bytes
    )


def _training(job: Job, cluster: ClusterSpec, s: Strategy, step_s: float, bytes_: float) -> TrainingJob:
    return TrainingJob(
        step_s=step_s,
        tokens_per_step=job.global_batch * job.seq,
        gpus=s.world,
        nodes=-(-s.world // cluster.ranks_per_node),
        replicas=s.dp,
        device=cluster.device.name,
        checkpoint_bytes=bytes_,
        writers=s.world if s.level.state else max(s.world // s.dp, 1),
    )


def _own_state_bytes(model: ModelSpec, job: Job) -> float:
    """Return the bytes of our own checkpoints: masters and moments (runtime/checkpoint/store.py)."""
    row, decay = job.optimizer.row, job.optimizer.first_decay
    kept = sum(
        p.numel * (1 + len((row.matrices if p.matrices else row.others).held(decay))) for p in parameters(model)
    )
    return float(kept * DTYPE_BYTES[job.precision.master_dtype])


_BYTES_OF_ADAPTERS = 12
"""A parameter of an adapter and its two moments, in fp32."""


def _state_bytes(p: Pricing, s: Strategy) -> float:
    """Return the bytes of a stack's checkpoint: the state that ZeRO-1 shards and, where parameters are not their own
    masters, 16-bit weights too; where adapters are trained, these alone."""
    if p.extra.lora:
        return float(_BYTES_OF_ADAPTERS * (p.shape.adapters + p.shape.expert_adapters) * p.shape.layers)
    of_state = float(p.profile.shard_bytes)
    return float(p.model.parameter_count * (of_state if s.level.parameters else of_state + 2))


def premise_of(trained: TrainingJob, given: Conditions) -> Premise:
    """Complete the conditions of a training from presets. Raises InputError for impossible ones, such as saves that
    take longer than the interval between them."""
    _require(given, trained)
    taken: list[Taken] = []

    def take(what: str, value: str, source: str) -> None:
        taken.append(Taken(what, value, source))

    name = given.failures or presets.failures_for(_chip(trained.device)).name
    counts = presets.failures_named(name, trained.gpus, trained.nodes)
    if given.failures is None and given.mttf_s is None:
        take("failures", name, counts.source)
    kind = presets.restart_named(given.restart)
    if given.detect_s is None or given.restart_s is None:
        take("restart", f"{kind.name}: {kind.note}", kind.source)
    storage = _storage(given, take)
    writing = max(-(-trained.writers * trained.nodes // trained.gpus), 1)
    write, read_ = storage.write(writing), storage.read(trained.nodes)
    if given.checkpoint == "replicated":
        write = read_ = trained.nodes * _PEER_BYTES_PER_S
        take("memory of two nodes", "5 GB/s a node", "estimated: a 400 Gb/s link shared with the training")
    save_s = given.save_s if given.save_s is not None else trained.checkpoint_bytes / write
    load_s = given.load_s if given.load_s is not None else trained.checkpoint_bytes / read_
    copy_s = trained.checkpoint_bytes / trained.writers / _COPY_BYTES_PER_S
    stall_s = save_s if given.synchronous else min(_PAUSE_S + copy_s, save_s)
    if given.stall_s is not None:
        stall_s = given.stall_s
    elif not given.synchronous:
        take("a save's stall", f"{stall_s:.3g} s", "asynchronous: 0.4 s and a copy at 20 GB/s a GPU (DLRover)")
    shared_every = _SHARED_EVERY if given.checkpoint == "local" else 1
    if shared_every > 1:
        lost = "a node that fails takes the others with it, which Young, Daly and recovery do not count"
        take(SHARED_SAVES, f"1 of {shared_every}", f"assumed: {lost}")
    saving = Saving(stall_s, max(save_s - stall_s, 0.0), shared_every)
    causes = _causes(trained, given, counts, kind, load_s)
    planned_s = given.restart_s if given.restart_s is not None else kind.software_s
    planned = counts.rate("planned", trained.gpus, trained.nodes) * (planned_s + load_s + stall_s)
    nodes_per_s = sum(c.per_s for c in causes if c.takes_node)
    kept = _share_kept(given, trained)
    spares = given.spares
    if spares is None:
        spares = _cheapest(nodes_per_s, given.repair_s, trained.nodes, kept)
        take(
            "spares",
            f"{spares} nodes, repaired in {given.repair_s / 3600:g} h",
            "the least GPU-hours for the work, theirs included",
        )
    wait = expected_wait(spares, nodes_per_s, given.repair_s) * (1 - kept)
    causes = tuple(replace(c, wait_s=wait) if c.takes_node else c for c in causes)
    best = best_interval(causes, saving, trained.step_s)
    if given.interval_s is None:
        interval = best = max(best, save_s)  # one save at a time
        take("interval", f"{interval:,.0f} s", "the best one")
    elif save_s > (interval := given.interval_s) + stall_s:
        reason = f"is shorter than a save, {save_s:,.0f} s to {storage.name}: the storage is slower than its load"
        raise InputError("interval", f"{interval:,.0f} s", reason, "save less often, or name faster storage")
    if counts.silent and given.mttf_s is None:
        take("silent corruption", f"found after {given.silent_s / 3600:g} h", "estimated: no figure is published")
    rates = rates_on(trained.device, given.rates, ("training", "idle"))
    return Premise(
        trained, given, counts, kind, storage, causes, planned, saving, interval, best, save_s, load_s, spares, kept,
        rates, tuple(taken),
    )  # fmt: skip


def _chip(device: str) -> str:
    """Return the chip of a device, or the device itself if no such chip is known, as with a CPU."""
    try:
        return chip_name(device)
    except InputError:
        return device


def _cheapest(nodes_per_s: float, repair_s: float, nodes: int, kept: float) -> int:
    """Return the number of spares with which the work takes the least GPU-hours, the spares' included. `kept`: as
    `_share_kept` returns it."""

    def paid(spares: int) -> float:
        return (1 + spares / nodes) * (1 + nodes_per_s * (1 - kept) * expected_wait(spares, nodes_per_s, repair_s))

    most = nodes_per_s * repair_s
    few = np.unique(np.geomspace(1, 2 + most + 6 * np.sqrt(most + 1), 100).astype(int))
    near = min((0, *few.tolist()), key=paid)
    return min(range(max(near - 3, 0), near + 4), key=paid)


def _causes(
    trained: TrainingJob, given: Conditions, counts: FailureCounts, kind: RestartKind, load_s: float
) -> tuple[FailureCause, ...]:
    scale = 1.0
    if given.mttf_s is not None:
        scale = 1 / (given.mttf_s * counts.per_s(trained.gpus, trained.nodes))
    causes = []
    for component in UNEXPECTED:
        if not (rate := scale * counts.rate(component, trained.gpus, trained.nodes)):
            continue
        hardware = component in HARDWARE
        seconds = kind.hardware_s if hardware else kind.software_s
        detect = kind.detect_s if given.detect_s is None else given.detect_s
        causes.append(
            FailureCause(
                component,
                rate,
                detect_s=given.silent_s if component == "silent" else detect,
                restart_s=(seconds if given.restart_s is None else given.restart_s) + load_s,
                takes_node=hardware,
                count=counts.count(component) if given.mttf_s is None else None,
            )
        )
    return tuple(causes)


def _storage(given: Conditions, take: Callable[[str, str, str], None]) -> StorageRates:
    name = given.storage or ("local" if given.checkpoint == "local" else "shared")
    storage = presets.storage_named(name)
    rates = {
        f"{what}_bytes_per_s": rate
        for what in ("write", "read")
        if (rate := getattr(given, f"{what}_bytes_per_s")) is not None
    }
    if given.storage is None and len(rates) < 2 and given.checkpoint != "replicated":
        take("storage", storage.name, storage.source)
    each = {f"{name}_per_node": rate for name, rate in rates.items()}
    return replace(storage, **rates, **each) if rates else storage


def _share_kept(given: Conditions, trained: TrainingJob) -> float:
    """Return the share of its speed at which a job works on, without one replica, while it waits for a node."""
    return 1 - 1 / trained.replicas if given.elastic else 0.0


def _require(given: Conditions, trained: TrainingJob) -> None:
    if given.checkpoint not in PLACES:
        raise InputError("checkpoint", given.checkpoint, "is no place of a checkpoint", f"one of {', '.join(PLACES)}")
    if given.spares is not None and not 0 <= given.spares <= MOST_SPARES:
        raise InputError("spares", given.spares, f"must be from 0 to {MOST_SPARES:,} nodes")
    if given.mttf_s is not None and not given.mttf_s > 0:
        raise InputError("mttf", given.mttf_s, "must be positive")
    if given.interval_s is not None and given.interval_s < trained.step_s:
        reason = f"is shorter than a step, {trained.step_s:.3g} s"
        raise InputError("interval", f"{given.interval_s:g} s", reason, "save at most once a step")


def require_progress(p: Premise, share: float, failures: float = 0.0) -> None:
    """Raise InputError if the useful `share` of the time is too small, or `failures` too many to be simulated."""
    if share > _LEAST_SHARE and failures <= _MOST_FAILURES:
        return
    reason = f"a job that fails every {1 / p.per_s:,.0f} s spends {share:.1%} of its time on work"
    reason += f" and fails {failures:,.0f} times" if share > _LEAST_SHARE else ""
    raise InputError("failures", p.counts.name, reason, "restart faster, save more often, or use fewer GPUs")
