"""Where the steps of a rank went: every instant of them is charged to one part.

    waits that a program records itself, then computing: attention, experts, products, passes, the optimizer, other
    kernels; then communication that no computing hides, by axis; copies; and what runs on neither: data loading,
    saving, launches (gaps shorter than half a millisecond, in which kernels wait for the CPU) and the host

So the parts of a rank sum to its step. Between ranks, the fastest of a collective's ranks came last: its time is the
transfer's, and what the others took longer they waited for it. No clocks are compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import InputError
from phalanx.traces.rank_trace import KINDS, TRACKS, Floats, RankTrace, TracedCollective

COMPUTING = ("attention", "experts", "products", "forward", "backward", "optimizer", "memory")
IDLE = ("copy", "loading", "checkpoint", "allocation")
SHORT_S = 0.5e-3
"""A gap up to this long in which nothing runs is between two kernels; a longer one is the host's."""
Spans = tuple[Floats, Floats]
AxisOf = Callable[[TracedCollective], str]


@dataclass(frozen=True)
class AxisUse:
    """Communication of a rank over an axis in a step."""

    calls: float
    bytes: float
    active_s: float
    """Seconds in which it was under way."""
    exposed_s: float
    """Seconds of it that nothing hid."""
    waiting_s: float = 0.0
    """Seconds of the exposed ones in which other ranks were waited for, where their traces say so."""
    moving_s: float = 0.0
    """Seconds of all transfers without the waiting, where the traces of other ranks say so; else `active_s`."""


@dataclass(frozen=True)
class Breakdown:
    """A rank's mean step."""

    rank: int | None
    file: str
    steps: int
    step_s: float
    """The sum of `parts`."""
    parts: dict[str, float]
    """Seconds by part: of COMPUTING, `over AXIS` (exposed), of IDLE, launches, host."""
    axes: dict[str, AxisUse]
    counts: dict[str, float]
    """Activities of the device in a step, by kind; and `forward attention`, `backward attention`."""
    step_times: tuple[float, ...]
    """Seconds of each step that is marked."""
    notes: tuple[str, ...] = ()

    @property
    def computing_s(self) -> float:
        """Seconds of a step in which the rank computed."""
        return sum(self.parts.get(name, 0.0) for name in COMPUTING)


def union(start: Floats, stop: Floats) -> Spans:
    """Return disjoint ascending intervals that cover the same instants."""
    keep = stop > start
    start, stop = start[keep], stop[keep]
    if not len(start):
        return start, stop
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    begins = np.concatenate([[True], start[1:] > reach[:-1]])
    return start[begins], reach[np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(start) - 1]])]


def _length(spans: Spans) -> float:
    return float((spans[1] - spans[0]).sum())


def breakdown(trace: RankTrace, axis_of: AxisOf, step_s: float | None = None) -> Breakdown:
    """Return a rank's mean step, with every instant charged to a part. `step_s`: seconds of a step as known from
    elsewhere, for a trace that does not mark its steps. Raises InputError for one without any computation."""
    busy = trace.on_device
    if not busy.any():
        remedy = "record some steps with torch.profiler, and export them within the active steps"
        raise InputError("trace", trace.file, "records neither kernels nor operators", remedy)
    begin, end, steps, times, notes = _window(trace, busy, step_s)
    start, stop = np.clip(trace.start, begin, end), np.clip(trace.stop, begin, end)
    inside = (stop > start) | ((trace.start >= begin) & (trace.start < end))
    kind = _with_optimizer(trace, busy)
    covered: Spans = (np.empty(0), np.empty(0))
    parts: dict[str, float] = {}

    def charge(name: str, mask: npt.NDArray[np.bool_], begins: Floats = start) -> float:
        """Charge to a part the instants of the masked activities that no earlier part covers; return its seconds of
        a step."""
        nonlocal covered
        before, own = _length(covered), mask & inside
        covered = union(np.append(covered[0], begins[own]), np.append(covered[1], stop[own]))
        seconds = (_length(covered) - before) / steps
        if seconds > 0:
            parts[name] = parts.get(name, 0.0) + seconds
        return seconds

    axes = np.array([axis_of(call) for call in trace.calls] or [""])
    axis = np.where(trace.call >= 0, axes[np.maximum(trace.call, 0)], "")
    names = [name for name in dict.fromkeys(axes.tolist()) if np.any(axis == name) and name]
    waiting = kind == KINDS.index("waiting")
    exposed = {name: charge(f"over {name}", waiting & (axis == name)) for name in names}
    for part in COMPUTING:
        charge(part, busy & (kind == KINDS.index(part)))
    # A kernel that starts while a collective is under way did not wait for it: only what follows the last is exposed.
    last = np.append(begin, covered[1])[np.searchsorted(covered[0], stop)]
    uses = {}
    sizes = np.array([call.bytes for call in trace.calls] or [0])
    for name in names:
        of_axis = (axis == name) & inside
        exposed[name] += charge(f"over {name}", of_axis & busy, np.maximum(start, last))
        issued = of_axis & (kind == KINDS.index("communication"))
        own = waiting.any() and not issued.any()
        calls = of_axis if own else issued
        active = _length(union(start[of_axis], stop[of_axis])) / steps
        moved = float(sizes[trace.call[calls]].sum()) / steps
        uses[name] = AxisUse(float(calls.sum()) / steps, moved, active, exposed[name], 0.0, active)
    for part in IDLE:
        charge(part, kind == KINDS.index(part))
    gaps = np.append(covered[0], end) - np.append(begin, covered[1])
    known = sum(parts.values()) * steps
    short = float(gaps[(gaps > 0) & (gaps <= SHORT_S)].sum())
    for part, seconds in (("launches", short), ("host", end - begin - known - short)):
        if seconds > 1e-9 * (end - begin):
            parts[part] = seconds / steps
    ran = busy & inside
    counts = {k: float((kind[ran] == i).sum()) / steps for i, k in enumerate(KINDS) if (kind[ran] == i).any()}
    attention = np.array(["bwd" in n.lower() or "backward" in n.lower() for n in trace.names] or [False])
    cores = trace.name[ran & (kind == KINDS.index("attention"))]
    counts |= {"backward attention": float(attention[cores].sum()) / steps}
    counts["forward attention"] = counts.get("attention", 0.0) - counts["backward attention"]
    return Breakdown(
        trace.rank, trace.file, steps, (end - begin) / steps, parts, uses, counts, times, (*trace.notes, *notes)
    )


def _window(
    trace: RankTrace, busy: npt.NDArray[np.bool_], step_s: float | None
) -> tuple[float, float, int, tuple[float, ...], tuple[str, ...]]:
    """Return (begin, end, number of steps, their seconds, notes)."""
    first, last = float(trace.start[busy].min()), float(trace.stop[busy].max())
    marked = trace.of("step", "host")
    marked = marked if marked.any() else trace.of("step", "span")
    if marked.any():
        begins, ends = trace.start[marked], trace.stop[marked]
        begin, end = float(begins.min()), float(ends.max())
        if last > begin and first < end:
            # Kernels of the last step may run after the CPU has left it.
            return begin, max(end, min(last, end + (end - begin))), len(begins), tuple((ends - begins).tolist()), ()
    if trace.of("forward").any():
        # Our own timeline is of one step, which begins with the reading of its batch.
        return float(trace.start.min()), float(trace.stop.max()), 1, (), ()
    updates = trace.of("optimizer", "host")
    updates = updates if updates.any() else trace.of("optimizer", "span")
    count = int(updates.sum())
    if count > 1:
        begin, end = float(trace.stop[updates].min()), float(trace.stop[updates].max())
        times = tuple(np.diff(np.sort(trace.stop[updates])).tolist())
        return begin, end, count - 1, times, ("marks no steps; from optimizer step to optimizer step",)
    if step_s:
        count = max(1, round((last - first) / step_s))
        return first, last, count, (), (f"marks no steps; taken as {count} of {step_s:.3g} s",)
    return first, last, 1, (), ("marks no steps; taken as one",)


def _with_optimizer(trace: RankTrace, busy: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Return the kind of each activity; products and memory passes within an optimizer's annotation are its own."""
    spans = trace.of("optimizer", "span")
    if not spans.any():
        spans = trace.of("optimizer", "host")
        if not spans.any() or (trace.where == TRACKS.index("device")).any():
            return trace.kind  # annotations on the CPU do not say when kernels run
    begins, ends = union(trace.start[spans], trace.stop[spans])
    at = np.searchsorted(begins, trace.start, side="right") - 1
    during = (at >= 0) & (trace.start < ends[np.maximum(at, 0)])
    plain = np.isin(trace.kind, [KINDS.index("memory"), KINDS.index("products")])
    return np.where(busy & during & plain, KINDS.index("optimizer"), trace.kind).astype(np.int8)


def with_waiting(traces: Sequence[RankTrace], parts: Sequence[Breakdown], axis_of: AxisOf) -> list[Breakdown]:
    """Return the ranks' breakdowns with the waiting for other ranks, from collectives that the traces have in common.

    Calls of the same axis, operation and bytes are matched by their order; where their numbers differ, not at all."""
    durations = [_calls_by_kind(trace, axis_of) for trace in traces]
    waiting: list[dict[str, float]] = [{} for _ in traces]
    total: list[dict[str, float]] = [{} for _ in traces]
    for key in set().union(*durations):
        having = [i for i, d in enumerate(durations) if key in d]
        for group in _groups_of(having, key, traces):
            counts = {len(durations[i][key]) for i in group}
            if len(group) < 2 or len(counts) > 1:
                continue
            least = np.min([durations[i][key] for i in group], axis=0)
            for i in group:
                waiting[i][key[0]] = waiting[i].get(key[0], 0.0) + float((durations[i][key] - least).sum())
                total[i][key[0]] = total[i].get(key[0], 0.0) + float(durations[i][key].sum())
    result = []
    for i, own in enumerate(parts):
        axes, new = dict(own.axes), dict(own.parts)
        for axis, use in own.axes.items():
            lost = waiting[i].get(axis, 0.0)
            share = lost / total[i][axis] if total[i].get(axis) else 0.0
            # Of a collective that computing hides in part, the waiting is the exposed end.
            more = use.exposed_s - min(b.axes[axis].exposed_s for b in parts if axis in b.axes)
            waits = max(use.exposed_s * share, min(lost / own.steps, more))
            axes[axis] = replace(use, waiting_s=waits, moving_s=use.active_s * (1 - share))
            if waits > 0:
                new[f"over {axis}"] = new[f"over {axis}"] - waits
                new["stragglers"] = new.get("stragglers", 0.0) + waits
        result.append(replace(own, axes=axes, parts=new))
    return result


_Key = tuple[str, str, int, tuple[int, ...]]


def _calls_by_kind(trace: RankTrace, axis_of: AxisOf) -> dict[_Key, Floats]:
    """Return the seconds of each call, in order, by (axis, operation, bytes, ranks). Sends are left out: a pipeline's
    wait is its bubble."""
    busy = np.flatnonzero((trace.on_device | trace.of("waiting")) & (trace.call >= 0))
    own = trace.of("waiting")
    if own.any():
        busy = np.flatnonzero(own)
    length = trace.stop - trace.start
    result: dict[_Key, Floats] = {}
    for index in np.unique(trace.call[busy]):
        call = trace.calls[index]
        if call.op in ("send", ""):
            continue
        key = (axis_of(call), call.op, call.bytes, call.ranks)
        result[key] = length[busy[trace.call[busy] == index]]
    return result


def _groups_of(having: list[int], key: _Key, traces: Sequence[RankTrace]) -> list[list[int]]:
    """Return the groups of traces, by index, that ran the call together, of those in `having`: the ranks that the
    call names, or all where it names none."""
    ranks = key[3]
    return [[i for i in having if not ranks or traces[i].rank in ranks]]


def spread(parts: Mapping[int, float]) -> tuple[int, float]:
    """Return the rank that takes longest, and by how many seconds more than the median of the others."""
    slowest = max(parts, key=lambda rank: parts[rank])
    others = [seconds for rank, seconds in parts.items() if rank != slowest]
    return slowest, parts[slowest] - float(np.median(others)) if others else 0.0
