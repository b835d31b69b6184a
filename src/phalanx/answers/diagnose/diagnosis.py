"""A run's own files compared with its plan, part by part: what `phalanx diagnose` answers.

Logs, traces and dumps give a measured step; the plan gives its parts as predicted. The difference is charged to the
parts, and the largest are named with what gives them away and what to do about them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.answers.answer import Answer
from phalanx.answers.diagnose.causes import LARGE, Cause, Evidence, causes
from phalanx.answers.diagnose.flop_rate import FlopRate, flop_rate
from phalanx.answers.diagnose.planned_parts import axis_of, planned_axes, planned_parts
from phalanx.answers.diagnose.run_files import RunFiles, read_files
from phalanx.answers.diagnose.stated_rate import seconds_at
from phalanx.answers.prediction import Prediction, prediction_of
from phalanx.answers.question.query import Query
from phalanx.answers.question.question import Question
from phalanx.answers.question.resolution import read
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.frameworks.step_logs import StepTime, prints_steps, step_time
from phalanx.planning.explain import explanation
from phalanx.planning.explain.traffic import SENT
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.documents import read_log
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.mesh import mesh
from phalanx.traces import failures
from phalanx.traces.breakdown import Breakdown, breakdown, with_waiting
from phalanx.traces.failures import Failures
from phalanx.traces.memory_snapshot import MemoryUse
from phalanx.traces.nccl import InspectedCollective
from phalanx.traces.rank_trace import KINDS, RankTrace


@dataclass(frozen=True)
class PartGap:
    """A part of a step: predicted, measured, and the difference in seconds."""

    part: str
    predicted_s: float | None
    """None without a plan."""
    measured_s: float | None
    """None where the files do not divide the step."""

    @property
    def gap_s(self) -> float | None:
        """Seconds by which it takes longer than planned."""
        return None if self.predicted_s is None or self.measured_s is None else self.measured_s - self.predicted_s


@dataclass(frozen=True)
class NamedGap:
    """Where time goes that the plan does not have, and what to do about it."""

    cause: str
    seconds: float
    why: str
    remedy: str
    then_s: float
    """Seconds of the step without it."""


@dataclass(frozen=True)
class LinkGap:
    """One kind of collective as NCCL timed it."""

    collective: InspectedCollective
    planned_s: float | None
    """Seconds of a call on the plan's cluster."""


@dataclass(frozen=True)
class Diagnosis(Answer):
    """A measured step and its plan."""

    about: str
    step_s: float | None
    """None where no file says it."""
    planned_s: float | None
    parts: tuple[PartGap, ...]
    findings: tuple[NamedGap, ...]
    rate: FlopRate | None
    rank: int | None
    """The rank whose trace is compared: the usual one of the stage that computes longest."""
    ranks: int
    """Ranks whose traces were read."""
    used: tuple[str, ...]
    """What each file gave."""
    further: str = ""
    """The change of the plan itself that helps most, with its price."""
    links: tuple[LinkGap, ...] = ()
    """Collectives as NCCL timed them."""
    memory: tuple[MemoryUse, ...] = ()
    planned_bytes: float | None = None
    """Memory that the plan reserves on the fullest rank."""
    cautions: tuple[str, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each part."""
        return [
            {"part": p.part, "predicted_s": p.predicted_s, "measured_s": p.measured_s, "gap_s": p.gap_s}
            for p in self.parts
        ]


def diagnosis_of(words: Sequence[str], query: Query) -> Diagnosis:
    """Compare a run's files with its plan. `words`: files and folders, seconds of a step (4.3s) or a rate
    (230TFLOP/s, 9600tok/s/gpu); `query`: the plan.

    Raises InputError for a file that cannot be used, and where nothing says how long a step took."""
    files = read_files(words)
    question = _question(files, query)
    prediction = None if question is None else prediction_of(question)
    logs = _logs(files, question)
    timed = [log.time for log in logs if log.time is not None]
    used = [*files.notes, *(f"{log.file}: {log.time.note}" for log in logs if log.time is not None)]
    rates = sorted(files.stated, key=lambda rate: rate.unit != "s")  # of several words, one that says seconds
    flops = next((rate.number for rate in rates if rate.unit == "TFLOP/s"), timed[0].tflops if timed else None)
    stated = timed[0].seconds if timed else None
    if rates and (rates[0].unit == "s" or (stated is None and not files.traces)):
        stated = seconds_at(rates[0], prediction)
    timeless = not files.traces and stated is None
    if timeless and not (files.memory or files.collectives or files.nccl or any(log.failures for log in logs)):
        raise InputError(
            "FILE", " ".join(words), "says no step's time", "give a log, a trace, or seconds such as 4.3s"
        )
    name = axis_of(None if question is None else question.strategy)
    steps = [breakdown(trace, name, stated) for trace in files.traces]
    steps = with_waiting(files.traces, steps, name) if len(steps) > 1 else steps
    used += [_words(b) for b in steps]
    own = _compared_rank(steps, question)
    rest = Diagnosis(
        about="no plan was named" if question is None else question.about,
        step_s=None,
        planned_s=None if prediction is None else prediction.step_time_s,
        parts=(),
        findings=(),
        rate=None,
        rank=None,
        ranks=0,
        used=tuple(used),
        links=tuple(LinkGap(c, _call_s(c, question)) for c in files.collectives),
        memory=files.memory,
        planned_bytes=None if prediction is None else prediction.memory_bytes,
        cautions=(*_endings(logs, prediction), *_cautions(files, prediction)),
    )
    step_s = own.step_s if own is not None else stated
    if step_s is None:
        return rest
    extra = {"delayed steps": timed[0].delay_s if timed else 0.0, "between steps": files.between_s}
    whole = step_s + sum(extra.values())
    planned = {} if question is None or prediction is None else planned_parts(question, prediction)
    rows = _rows(planned, own, step_s, extra)
    named = _findings(question, prediction, files.traces, steps, own, rows, step_s, extra)
    rate = flop_rate(question, prediction, step_s, flops)
    return replace(
        rest,
        step_s=whole,
        parts=tuple(rows),
        findings=tuple(NamedGap(c.name, c.seconds, c.why, c.remedy, whole - c.seconds) for c in named),
        rate=rate,
        rank=None if own is None else own.rank,
        ranks=len(steps),
        further=_plan_change(question),
    )


def _call_s(c: InspectedCollective, question: Question | None) -> float | None:
    """Return the planned seconds of a call whose ranks are spread evenly over its nodes; None where no formula is."""
    if question is None or question.exact is not None or c.op not in SENT:
        return None
    node = question.pricing.cluster.ranks_per_node
    stride = max(1, node * c.nodes // max(c.ranks, 1))
    return float(collective_s(c.op, float(c.bytes), float(c.ranks), float(stride), question.pricing.system))


def _cautions(files: RunFiles, prediction: Prediction | None) -> Iterator[str]:
    """Yield warnings about memory and NCCL, to which no seconds of a step are charged."""
    yield from files.nccl.cautions if files.nccl is not None else ()
    for use in files.memory:
        idle = use.reserved_bytes - use.allocated_bytes
        if use.failures:
            yield f"{use.file}: {use.failures} allocations failed"
        if idle > _FRAGMENTED * use.reserved_bytes:
            remedy = "try PYTORCH_ALLOC_CONF=expandable_segments:True"
            yield f"{use.file}: no tensor holds {idle / use.reserved_bytes:.0%} of the reserved memory; {remedy}"
        if prediction is not None and use.peak_reserved_bytes > _MORE_BYTES * prediction.memory_bytes:
            more = use.peak_reserved_bytes / prediction.memory_bytes - 1
            most = f"; {use.largest[0][0]} holds most" if use.largest else ""
            yield f"{use.file}: {more:.0%} more memory than planned{most}"


_FRAGMENTED, _MORE_BYTES = 0.25, 1.1
"""Share of reserved memory that no tensor holds, and times the planned bytes, from which there is a warning."""


def _question(files: RunFiles, query: Query) -> Question | None:
    """Return the plan's question; None where none is named."""
    if query.source is None and query.model is None:
        if files.plan is None:
            return None
        query = replace(query, source=files.plan)
    question = read(query)
    world = max((t.world or 0 for t in files.traces), default=0)
    assert question.strategy is not None
    if world and world != question.strategy.world:
        reason = f"is of {world} ranks, and the plan has {question.strategy.world}"
        raise InputError("FILE", files.traces[0].file, reason, "name the plan that was run, or --gpus")
    return question


@dataclass(frozen=True)
class _Log:
    """What a log says. `time`: None of one that ends before its first step, or is NCCL's."""

    file: Path
    time: StepTime | None
    failures: Failures


def _logs(files: RunFiles, question: Question | None) -> list[_Log]:
    sizes = (0, 0, 0)
    if question is not None:
        job = question.exact.job if question.exact else question.pricing.job
        sizes = job.global_batch, job.seq, question.gpus
    logs = []
    for file in files.logs:
        text = read_log(file, "log")
        ended, time = failures.read(text), None
        if not (ended or file in files.silent) or prints_steps(text):
            time = step_time(text, str(file), *sizes)
        logs.append(_Log(file, time, ended))
    return logs


def _endings(logs: Sequence[_Log], prediction: Prediction | None) -> Iterator[str]:
    """Yield what ended the runs; of an allocation that failed, with the memory of the plan."""
    for log in logs:
        for verdict in log.failures.verdicts:
            of_memory = verdict.startswith("out of memory")
            planned = f"; the plan takes {write_bytes(prediction.memory_bytes)}" if of_memory and prediction else ""
            yield f"{log.file}: {verdict}{planned}"


def _words(b: Breakdown) -> str:
    steps = f"{b.steps} step{'s' * (b.steps > 1)} of {b.step_s:.4g} s"
    rank = "" if b.rank is None else f" of rank {b.rank}"
    return "; ".join((f"{b.file}: {steps}{rank}", *b.notes))


def _compared_rank(steps: Sequence[Breakdown], question: Question | None) -> Breakdown | None:
    """Return the rank to compare: in the stage that computes longest, the one at the lower median; None of none."""
    if not steps:
        return None
    stages: dict[int, list[Breakdown]] = {}
    grid = None if question is None or question.strategy is None else mesh(question.strategy)
    for b in steps:
        known = grid is not None and b.rank is not None and b.rank < grid.world
        stages.setdefault(grid.place(b.rank)["pp"] if known else 0, []).append(b)  # type: ignore[union-attr,arg-type]
    middle = [sorted(of, key=lambda b: b.computing_s)[(len(of) - 1) // 2] for of in stages.values()]
    return max(middle, key=lambda b: b.computing_s)


def _rows(planned: dict[str, float], own: Breakdown | None, step_s: float, extra: dict[str, float]) -> list[PartGap]:
    """Return the parts, predicted and measured, the largest gap first."""
    if own is None:
        whole = [PartGap("step", sum(planned.values()) if planned else None, step_s)]
        return [*whole, *(PartGap(name, 0.0, seconds) for name, seconds in extra.items() if seconds)]
    measured = dict(own.parts)
    if "over pp" in measured:
        measured["pipeline"] = measured.get("pipeline", 0.0) + measured.pop("over pp")
    if "experts" in measured and "experts" not in planned:
        measured["products"] = measured.get("products", 0.0) + measured.pop("experts")
    passes, kernels = ("forward", "backward"), ("products", "attention", "memory")
    if planned and any(p in planned for p in passes) != any(p in measured for p in passes):
        planned, measured = ({**p} for p in (planned, measured))
        for parts in (planned, measured):
            parts["computing"] = sum(parts.pop(name, 0.0) for name in (*passes, *kernels))
    measured |= {name: seconds for name, seconds in extra.items() if seconds}
    names = dict.fromkeys((*planned, *measured))
    rows = [PartGap(n, planned.get(n, 0.0) if planned else None, measured.get(n, 0.0)) for n in names]
    return sorted(rows, key=lambda row: -(row.gap_s if row.gap_s is not None else row.measured_s or 0.0))


def _findings(
    question: Question | None,
    prediction: Prediction | None,
    traces: Sequence[RankTrace],
    steps: Sequence[Breakdown],
    own: Breakdown | None,
    rows: Sequence[PartGap],
    step_s: float,
    extra: dict[str, float],
) -> list[Cause]:
    """Return the causes of the gaps, the largest first."""
    named = []
    if (late := extra["delayed steps"]) > LARGE * step_s:
        remedy = "is it saving or evaluation: do these less often, or asynchronously"
        named.append(Cause("delayed steps", late, "some take more than 1.5 times the median", remedy))
    if (between := extra["between steps"]) > LARGE * step_s:
        why = f"{between:.3g} s pass between two steps on average: saving and evaluation"
        named.append(Cause("saving of checkpoints", between, why, "save and evaluate less often"))
    if question is None or prediction is None or question.strategy is None or own is None:
        return named
    s, cluster = question.strategy, question.exact.cluster if question.exact else question.pricing.cluster
    evidence = Evidence(
        strategy=s,
        grid=mesh(s),
        ranks_per_node=cluster.ranks_per_node,
        own=own,
        ranks=steps,
        gaps={r.part: r.gap_s for r in rows if r.gap_s is not None and r.part not in extra},
        planned={r.part: r.predicted_s or 0.0 for r in rows},
        axes=planned_axes(question, prediction),
        spread_out=_spread_out(traces, question, cluster.ranks_per_node),
        fp32_share=_fp32_share(traces) if question.precision not in ("fp32", "tf32") else 0.0,
    )
    return sorted([*named, *causes(evidence)], key=lambda cause: -cause.seconds)


def _spread_out(traces: Sequence[RankTrace], question: Question, node: int) -> frozenset[str]:
    """Return the axes with a group whose ranks, as the traces name them, are on several nodes of `node` ranks."""
    name = axis_of(question.strategy)
    calls = {call for trace in traces for call in trace.calls if len({rank // node for rank in call.ranks}) > 1}
    return frozenset(map(name, calls))


_FP32_NAMES = re.compile(r"sgemm|f32f32|s1688gemm|simt|nvjet(_sm\d+)?_s|aten::\w+ float$", re.IGNORECASE)


def _fp32_share(traces: Sequence[RankTrace]) -> float:
    """Return the share of the products' seconds that are in fp32 (TF32 included), by their kernels' names."""
    single = total = 0.0
    for trace in traces:
        products = trace.on_device & (trace.kind == KINDS.index("products"))
        by_name = np.array([bool(_FP32_NAMES.search(name)) for name in trace.names] or [False])
        seconds = (trace.stop - trace.start)[products]
        total += float(seconds.sum())
        single += float(seconds[by_name[trace.name[products]]].sum())
    return single / total if total else 0.0


def _plan_change(question: Question | None) -> str:
    """Return the change of the plan itself that helps most, with its price; "" if none does."""
    if question is None or question.exact is not None:
        return ""
    better = [
        (loss.step_time_s, loss) for loss in explanation.losses(question.subject) if loss.step_time_s is not None
    ]
    if not better:
        return ""
    seconds, best = min(better, key=lambda pair: pair[0])
    return f"of the plan itself: {best.change} would take {seconds:.3g} s (it is against {best.name})"
