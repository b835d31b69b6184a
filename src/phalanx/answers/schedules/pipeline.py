"""Pipeline schedules: priced, drawn, compared and proved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.answers.answer import DRAWN, Answer
from phalanx.cost.pipeline_time import Costs, PricedSchedule, price
from phalanx.cost.step.predict_pipeline import price_pipeline
from phalanx.cost.step.terms import terms
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.actions import PipelineSchedule
from phalanx.schedule.pipeline.proof import prove as prove_schedule
from phalanx.schedule.pipeline.proof import prove_slots, require_few
from phalanx.schedule.pipeline.schedules import SCHEDULES, build
from phalanx.schedule.pipeline.simulate import strip_sends
from phalanx.schedule.pipeline.torch_csv import cells, from_csv
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError, Unproved
from phalanx.spec.files import plan as plans
from phalanx.spec.ranges import Range
from phalanx.spec.strategy.mesh import mesh


@dataclass(frozen=True)
class ScheduleCost:
    """The price of a proved schedule. Times are in the unit of the given costs, for runs in seconds.
    `peak_activations`: the most activations that each rank holds at once, one for each chunk and micro-batch."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    makespan: float
    bubble_fraction: float
    bubble_overhead: float
    peak_activations: tuple[int, ...]
    messages: int
    priced: PricedSchedule = field(metadata=DRAWN)


@dataclass(frozen=True)
class RunPipeline:
    """The traced step of a run, as measured and as predicted."""

    run: str
    measured: ScheduleCost
    predicted: ScheduleCost


@dataclass(frozen=True)
class PipelineDrawing(Answer):
    """Schedules on one scale, and the traced steps of runs. `costs`: the given times of F, I and W."""

    schedules: tuple[ScheduleCost, ...]
    runs: tuple[RunPipeline, ...]
    costs: str = field(metadata=DRAWN)


@dataclass(frozen=True)
class PipelineComparison(Answer):
    """All schedules side by side, and why some were left out."""

    schedules: tuple[ScheduleCost, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class ScheduleProof:
    """Whether a schedule is proved, and the reason if not. `live_by_rank`: the most activations of each rank."""

    schedule: str
    proved: bool
    reason: str = ""
    messages: int = 0
    live_by_rank: tuple[int, ...] = ()


@dataclass(frozen=True)
class PipelineProofs(Answer):
    """Schedules proved: every pass runs once and after what it needs, with no deadlock even if sends block."""

    proofs: tuple[ScheduleProof, ...]

    @property
    def passed(self) -> bool:
        """Whether all schedules are proved."""
        return all(p.proved for p in self.proofs)


def schedule_named(name: str, ranks: int = 4, micro_batches: int = 8, virtual: int | None = None) -> PipelineSchedule:
    """Build a schedule by name, or read it from a CSV file. Raises InputError."""
    if name.endswith(".csv"):
        schedule = from_csv(Path(name))
        require_few(sum(map(len, schedule.actions)) // 2, "schedule", name)
        return schedule
    passes = max(ranks, 0) * max(virtual or 1, 1) * max(micro_batches, 0)
    require_few(passes, "micro_batches" if micro_batches > ranks else "ranks", max(ranks, micro_batches))
    return build(name, ranks, micro_batches, virtual)


def draw(
    names: Sequence[str],
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    costs: str = "1,1,1",
    transfer: float = 0.0,
) -> PipelineDrawing:
    """Prove and price schedules, given by name or CSV file, and the traced steps of runs, given by folder.

    `costs`: times of F, I and W of a rank, over all its chunks; `transfer`: time of a message. Raises InputError,
    Unproved."""
    runs = [name for name in names if Path(name).is_dir()]
    schedules = [schedule_named(name, ranks, micro_batches, virtual) for name in names if name not in runs]
    return PipelineDrawing(
        tuple(_price(s, costs, transfer) for s in schedules), tuple(of_run(Path(name)) for name in runs), costs
    )


def compare(
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    costs: str = "1,1,1",
    transfer: float = 0.0,
    names: Sequence[str] = (),
) -> PipelineComparison:
    """Compare the memory and the bubble of schedules, given by name or CSV file; without names, of all. Raises
    InputError."""
    priced, left_out = [], []
    passes = max(ranks, 0) * max(micro_batches, 0) * len(names or SCHEDULES)  # of all schedules together
    require_few(passes, "micro_batches" if micro_batches > ranks else "ranks", max(ranks, micro_batches))
    for name in names or SCHEDULES:
        takes_virtual = name in SCHEDULES and SCHEDULES[name].takes_virtual
        try:
            schedule = schedule_named(name, ranks, micro_batches, virtual if takes_virtual else None)
        except InputError as error:
            if name not in SCHEDULES or ranks < 1 or micro_batches < 1 or (virtual is not None and virtual < 1):
                raise
            left_out.append(f"{name}: {error}")
        else:
            priced.append(_price(schedule, costs, transfer))
    return PipelineComparison(tuple(priced), tuple(left_out))


def prove(
    names: Sequence[str] = (), ranks: int = 4, micro_batches: int = 8, virtual: int | None = None, slots: bool = False
) -> PipelineProofs:
    """Prove schedules, given by name or CSV file; without names, all. `slots`: the files' cells are time slots, and
    no pass may be in a slot before one that it depends on. Raises InputError."""
    others = [name for name in names or SCHEDULES if not name.endswith(".csv")]
    if slots and others:
        reason = f"only the cells of a CSV file are time slots, and {others[0]} is not one"
        raise InputError("slots", None, reason, "name files, or leave it out")
    proofs = []
    for name in names or SCHEDULES:
        chunks = virtual if names or SCHEDULES[name].takes_virtual else None
        schedule = schedule_named(name, ranks, micro_batches, chunks)
        try:
            if slots:
                prove_slots(schedule, cells(Path(name)))
            proof = prove_schedule(schedule)
        except Unproved as error:
            proofs.append(ScheduleProof(schedule.name, False, str(error)))
        else:
            proofs.append(ScheduleProof(schedule.name, True, "", proof.messages, tuple(proof.peak)))
    return PipelineProofs(tuple(proofs))


def _price(s: PipelineSchedule, costs: str, transfer: float) -> ScheduleCost:
    """Prove a schedule and price it; the chunks of a rank share the rank's costs equally.

    Raises InputError, Unproved.
    """
    try:
        times = [float(word) for word in costs.split(",")]
    except ValueError:
        times = []
    if len(times) != 3 or not all(1e-3 <= number <= 1e6 for number in times):
        raise InputError("costs", costs, "is not three numbers from 0.001 to 1e6", "for F, I and W, such as 1,1,1")
    if problem := Range(0, 1e6).problem(transfer):
        raise InputError("transfer", transfer, problem)
    prove_schedule(s)
    each = s.ranks / s.chunks
    forward, input_grad, weight_grad = (number * each for number in times)
    return _cost(price(strip_sends(s), Costs.equal(s.chunks, forward, input_grad, weight_grad, transfer)))


def _cost(p: PricedSchedule) -> ScheduleCost:
    s = p.schedule
    shape = (s.name, s.ranks, s.micro_batches, s.chunks)
    return ScheduleCost(*shape, p.makespan, p.bubble_fraction, p.bubble_overhead, tuple(p.peak), p.messages, p)


Spans = dict[tuple[str, int, int], tuple[float, float]]
"""Start and end of each pass in seconds, by kind, chunk and micro-batch."""


def of_run(folder: Path) -> RunPipeline:
    """Return the pipeline of a run's first rank, as measured and as predicted.

    Raises InputError if the run had no pipeline, or its trace is missing or incomplete."""
    plan = plans.read(folder / "plan.json")
    s = plan.strategy
    if s.pp == 1:
        raise InputError("run", str(folder), f"was trained without a pipeline ({s})", "train with --strategy pp=2")
    path = folder / "trace.json"
    if not path.exists():
        raise InputError("run", str(folder), "has no trace.json", "it is written in a run's third step")
    ranks = mesh(s).group_of(0, "pp")
    spans: dict[int, Spans] = {rank: {} for rank in ranks}
    try:
        for event in read_json(path, "run")["traceEvents"]:
            if event.get("cat") == "schedule" and event["pid"] in spans:
                action = event["args"]
                start, key = event["ts"] / 1e6, (action["kind"], action["chunk"], action["micro_batch"])
                spans[event["pid"]][key] = (start, start + event["dur"] / 1e6)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError("run", str(folder), f"its trace.json is damaged ({error!r})", "train it again") from None
    layout = Layout(plan.model, plan.job, s)
    views = layout.stage_views()
    predicted = price_pipeline(views, [terms(view) for view in views], plan.cluster).priced
    schedule = strip_sends(layout.schedule)
    try:
        times = [
            [spans[rank][a.kind, a.chunk, a.micro_batch] for a in actions]
            for rank, actions in zip(ranks, schedule.actions, strict=True)
        ]
    except KeyError as error:
        raise InputError("run", str(folder), f"its trace lacks {error.args[0]}", "train it again") from None
    origin = min(passes[0][0] for passes in times)
    measured = [[(start - origin, stop - origin) for start, stop in passes] for passes in times]
    real = PricedSchedule(schedule, measured, predicted.messages, predicted.peak)
    return RunPipeline(str(folder), _cost(real), _cost(predicted))
