"""Views of a disturbed step: how much longer it takes, and where ranks wait."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from phalanx.answers.shared_network import LinksInUse
from phalanx.answers.simulation import KilledStep, SimulatedStep
from phalanx.planning.stragglers.timelines import SimulatedRank
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.predict import heading
from phalanx.report.style import seconds
from phalanx.report.view import View
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_FIGURES = " | | how it came about"


def view(a: SimulatedStep) -> View:
    """Show the step, the slow ranks, and where GPU-seconds are lost."""
    if a.lengths:
        x = a.lengths.asked
        wait = f"{a.slowdown:.3f} times as long; four of five take {x.step_low_s:.3g} to {x.step_high_s:.3g} s"
        cells = [
            ("even step", seconds(a.undisturbed_s), "every micro-batch takes as long as the mean one"),
            ("step", seconds(a.step_time_s), wait),
            ("tokens trained", f"{x.tokens:,.0f}", f"{x.padding_share:.1%} of all are padding"),
            ("most attention", f"{x.attention_ratio:.2f}", "of a replica, over the mean one's"),
        ]
        sheet = Sheet(f"{a.strategy}, documents of {a.lengths.line}", columns(_FIGURES), cells)
        return View([heading(a.question), sheet, *_losses(a)], "simulate")
    if a.links:
        return View([heading(a.question), *_neighbours(a, a.links), *_losses(a)], "simulate")
    delayed = f"{a.delayed_pipelines} of {a.pipelines} pipelines end later by themselves; all wait for the last"
    figures = [
        ("step without", seconds(a.undisturbed_s), "as predicted, all ranks equally fast"),
        ("step", seconds(a.step_time_s), f"{a.slowdown:.3f} times as long; {delayed}"),
        ("lost a step", f"{a.lost_gpu_s:,.3g} GPU-s", f"of {a.strategy.world * a.step_time_s:,.4g}"),
    ]
    if a.jitter:
        figures.append(("jitter", f"{a.jitter:.1%}", "of each rank's passes; the mean of eight drawn steps"))
    parts: list[str | Sheet] = [heading(a.question), Sheet(str(a.strategy), columns(_FIGURES), figures)]
    if a.slow:
        rows = [(s.rank, s.factor, _place(s.coordinates), s.lockstep_ranks) for s in a.slow]
        heads = columns("rank [count] | times as long [number] | place | ranks at its pace [count]")
        parts.append(Sheet("slow ranks", heads, rows, charted=False))
    return View([*parts, *_losses(a), *_killed_step(a.killed)], "simulate")


def _neighbours(a: SimulatedStep, x: LinksInUse) -> Iterator[str | Sheet]:
    rows = [
        (j.about, j.gpus, j.alone_s, j.step_s, j.slowdown, j.step_low_s, j.step_high_s, j.sending_share, j.kept_share)
        for j in x.jobs
    ]
    heads = "job | GPUs | alone [s] | with the others [s] | times as long [number] | best start [s] "
    heads += "| worst start [s] | sends [share] | of its rate [share]"
    note = "sends: of its step alone, over links that are shared; of its rate: kept while it sends"
    title = f"{len(x.jobs)} jobs on {a.question.cluster}, from {x.starts} drawn starts"
    yield Sheet(title, columns(heads), rows, note, charted=False)
    if not x.tiers:
        yield "no link is shared: these jobs leave no block of the cluster by the same ports or uplinks"
    else:
        yield f"shared: {', '.join(x.tiers)}"


def _killed_step(k: KilledStep | None) -> Iterator[str | Sheet]:
    if k is None:
        return
    rows = [(r.kind, *(f"{x:,.0f} s" for x in (r.detect_s, r.restart_s, r.again_s)), r.gpu_hours) for r in k.restarts]
    stops = f"{k.stopped_ranks:,} ranks stop at once, all after at most {seconds(k.all_stopped_s)}"
    heads = columns("restart | until it is known | until it works | work done again | GPU-hours [number]")
    yield Sheet(f"{k.what} dies {seconds(k.at_s)} into the step: {stops}", heads, rows, charted=False)
    yield "\n".join((f"saves every {k.interval_s:,.0f} s; assumed:", *(f"  {line}" for line in k.taken)))


def write_trace(file: Path, ranks: Iterable[SimulatedRank], s: Strategy) -> None:
    """Write ranks' timelines as a trace for Perfetto and chrome://tracing: a process for each rank, with a thread for
    its work and one for its waits."""
    grid, events = mesh(s), list[dict[str, Any]]()
    for r in ranks:
        place = _place(grid.coordinates(r.rank))
        name = f"rank {r.rank} ({place})" + (f", {r.alike:,} ranks alike" if r.alike > 1 else "")
        events.append({"ph": "M", "pid": r.rank, "name": "process_name", "args": {"name": name}})
        for number, thread_name in enumerate(("works", "waits for")):
            label = {"name": thread_name}
            events.append({"ph": "M", "pid": r.rank, "tid": number, "name": "thread_name", "args": label})
        for span in r.spans:
            times = {"ts": span.start_s * 1e6, "dur": (span.stop_s - span.start_s) * 1e6}
            args = {} if span.micro_batch is None else {"micro_batch": span.micro_batch}
            thread = {"pid": r.rank, "tid": int(span.waits)}
            events.append({"ph": "X", **thread, "name": span.name, **times, "args": args})
    write_json(file, {"displayTimeUnit": "ms", "otherData": {"strategy": str(s)}, "traceEvents": events})


def _losses(a: SimulatedStep) -> Iterator[Sheet]:
    if a.lost_gpu_s:
        lost = [(w.where, w.gpu_s, w.share) for w in a.waits]
        yield Sheet("who loses time", columns("where | GPU-seconds a step [number] | of it [share]"), lost, bars=True)


def _place(coordinates: dict[str, int]) -> str:
    return ", ".join(f"{axis} {i}" for axis, i in coordinates.items()) or "the only rank"
