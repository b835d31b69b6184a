"""The report of a plan: the answer, time, memory, what else there was, layout, pipeline, rooflines."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.answers.search.model_plan import ModelPlan
from phalanx.cost.analytic.memory import memory as memory_of
from phalanx.cost.analytic.step import TERM_NAMES
from phalanx.planning.explain import explanation, operators
from phalanx.planning.explain.analytic import AnalyticSubject, state_in
from phalanx.planning.placement import default_placement
from phalanx.planning.search.planner import SearchAnswer
from phalanx.planning.search.priced import COMMUNICATION, layout_of
from phalanx.planning.search.refine import RankedStrategy, timeline
from phalanx.planning.search.strategy_columns import columns_of
from phalanx.report.gallery.mesh import nodes, one_of_each_stage
from phalanx.report.html.page import Section, page
from phalanx.report.pictures.figure import Bar, Bars, Lane, LaneBlock, Lines, PlotAxis, RuleLine, Series, Timeline
from phalanx.report.style import seconds, size
from phalanx.schedule.pipeline.actions import Action
from phalanx.spec.cluster.spec import GIB

_COMPUTING = ("matmul", "attention", "memory", "recompute", "adapters", "launch", "optimizer", "other")
_MOST_PASSES = 480
"""Passes of a pipeline that are drawn: more cannot be distinguished."""
_MOST_DRAWN = 3000
"""Passes in all; of more, evenly spaced pipeline ranks are drawn."""
_MOST_NODES = 32
"""Nodes that are all drawn; of more, one for each set of pipeline ranks that share a node."""


def report(plan: ModelPlan, lines: Sequence[str]) -> str:
    """Return the page of a search's answer. `lines`: the terminal's lines about the question and the search."""
    return page(title(plan), "plan", sections(plan, lines), data(plan))


def title(plan: ModelPlan) -> str:
    """Return the title of the page."""
    a, p = plan.search, plan.search.pricing
    size_b = p.model.parameter_count / 1e9
    return f"{p.model.family} of {size_b:.3g} B parameters on {a.gpus} GPUs of {p.cluster.name}"


def data(plan: ModelPlan) -> dict[str, Any]:
    """Return the keys of the page's JSON in addition to its charts."""
    return {"strategy": str(plan.search.best.strategy), "terms_s": dict(plan.best.terms_s)}


def sections(plan: ModelPlan, lines: Sequence[str]) -> list[Section]:
    """Return the sections of that page."""
    a, x, best = plan.search, plan.subject, plan.search.to_run
    _, *rest = lines
    return [
        Section("The answer", text=(_in_a_paragraph(a), *rest)),
        waterfall("Time of a step", best.priced.terms, TERM_NAMES),
        _memory(a),
        *([_memory_by_rank(a)] if best.strategy.pp > 1 else []),
        _front(a),
        _neighbours(x),
        _layout(a.best, a),
        *([_pipeline(best, a)] if best.strategy.pp > 1 else []),
        _roofline(x),
        _axes(x),
        _rejected_section(a),
    ]


def _in_a_paragraph(a: SearchAnswer) -> str:
    """Return the answer in a paragraph: the strategy, its speed and memory, and the largest losses of a step."""
    best, p = a.to_run, a.pricing
    s, terms, step = a.best.strategy, best.priced.terms, best.seconds
    computes = sum(t for name, t in terms.items() if name in _COMPUTING)
    others = ((t, name) for name, t in terms.items() if name not in _COMPUTING and t > 0.001 * step)
    lost = sorted(others, reverse=True)
    m = s.accumulation(p.job)
    text = (
        f"Run it as {s} under {p.profile.name}: {p.job.global_batch * p.job.seq / step:,.0f} tokens/s, "
        f"{p.job.global_batch * p.job.seq / step / s.world:,.0f} a GPU, an MFU of {best.mfu:.1%}. A step of "
        f"{p.job.global_batch:,} sequences takes {seconds(step)} in {m:,} micro-batch{'es' * (m > 1)} of "
        f"{s.micro_batch} for each replica, and the fullest GPU holds {size(best.priced.bytes_)} of "
        f"{size(p.cluster.device.usable_bytes)}. {computes / step:.1%} of the step computes"
    )
    if lost:
        parts = [f"{seconds(t)} to {TERM_NAMES.get(name, name)}" for t, name in lost[:3]]
        text += f"; the rest goes {', '.join(parts)}" + (" and to less than that." if len(lost) > 3 else ".")
    return text if lost else text + "."


def waterfall(title: str, terms: dict[str, float], names: dict[str, str]) -> Section:
    """Draw the terms of a step one after the other: computing first, then communication and waiting."""
    order = [name for name in _COMPUTING if name in terms] + [name for name in terms if name not in _COMPUTING]
    shown = [name for name in order if abs(terms[name]) > 1e-3 * sum(terms.values())]
    total = sum(terms.values())
    bars, at = [], 0.0
    for name in shown:
        kind = "computing" if name in _COMPUTING else "communication" if name in COMMUNICATION else "waiting"
        bars.append(Bar(names.get(name, name), [(kind, terms[name])], seconds(terms[name]), at))
        at += terms[name]
    bars.append(Bar("the step", [("total", total)], seconds(total)))
    return Section(
        title,
        "from pure computing to the step; communication as far as nothing hides it",
        columns=("", "takes", "of the step"),
        rows=[(bar.label, bar.text, f"{bar.parts[0][1] / total:.1%}") for bar in bars],
        panels=(Bars("seconds", tuple(bars)),),
    )


def memory(title: str, bars: dict[str, dict[str, float]], limit: tuple[str, float], note: str) -> Section:
    """Draw memory by part, a bar for each strategy or rank, against a limit."""
    rows = [(bar, part, size(value)) for bar, parts in bars.items() for part, value in parts.items() if value]
    name, most = limit
    drawn = [
        Bar(label, [(part, n / GIB) for part, n in parts.items() if n > 1e-3 * most], size(sum(parts.values())))
        for label, parts in bars.items()
    ]
    panel = Bars("GiB", tuple(drawn), ((f"{name}: {size(most)}", most / GIB),))
    return Section(title, note, columns=("", "part", "takes"), rows=rows, panels=(panel,))


def _memory(a: SearchAnswer) -> Section:
    bars = {"chosen": a.to_run.priced.memory_terms}
    bars |= {r.family: r.priced.memory_terms for r in a.families if r.strategy != a.best.strategy}
    note = (
        "of the fullest rank at its fullest instant: of the chosen strategy, and of the fastest of each other family"
    )
    note += f"; {state_in(a.pricing, a.best.strategy).line}"
    return memory("Memory by part", bars, ("usable", float(a.pricing.cluster.device.usable_bytes)), note)


def _memory_by_rank(a: SearchAnswer) -> Section:
    s, p = a.best.strategy, a.pricing
    how = layout_of(p, [s], [a.to_run.run.blocks])
    by_part = memory_of(p.shape, how, p.profile, p.step(columns_of([s])).ahead)
    bars = {
        f"rank {rank}": {name: float(np.ravel(column)[0]) for name, column in parts.items()}
        for rank, parts in enumerate(by_part.by_rank(s.pp))
    }
    note = (
        "at each rank's fullest instant, without what its allocator wastes; the first has the most passes in flight"
    )
    return memory("Memory by pipeline rank", bars, ("usable", float(p.cluster.device.usable_bytes)), note)


def _front(a: SearchAnswer) -> Section:
    curves, rows = [], []
    series: dict[str, tuple[RankedStrategy, ...]] = {
        "front of time and memory": a.front,
        "best of its family": a.families,
        "among the best": a.ranked[1:],
        "chosen": (a.best,),
    }
    for name, some in series.items():
        points = [(r.seconds, r.priced.bytes_ / GIB) for r in some]
        about = [f"{r.strategy}: {seconds(r.seconds)}, {size(r.priced.bytes_)}, MFU {r.mfu:.1%}" for r in some]
        curves.append(Series(name, points, dots=True, line=False, about=about))
        rows += [(name, str(r.strategy), seconds(r.seconds), size(r.priced.bytes_), f"{r.mfu:.1%}") for r in some]
    usable = a.pricing.cluster.device.usable_bytes
    return Section(
        "Time against memory",
        f"of what the search priced (phalanx plan --more: all); dashed: {size(usable)} usable; hover, or open the "
        "numbers, for strategies",
        columns=("", "strategy", "step", "memory", "MFU"),
        rows=rows,
        panels=(
            Lines(
                PlotAxis("seconds a step", "s"),
                PlotAxis("GiB", "count"),
                tuple(curve for curve in curves if curve.points),
                rules=(RuleLine("y", usable / GIB, "usable"),),
            ),
        ),
    )


def _neighbours(x: AnalyticSubject) -> Section:
    rows = [(what, seconds(p.seconds), size(p.bytes_), reason) for what, p, reason in explanation.why_not(x)]
    return Section("Why not its neighbours", columns=("change", "step", "memory", "why not"), rows=rows)


def _layout(best: RankedStrategy, a: SearchAnswer) -> Section:
    placed = default_placement(best.strategy, a.pricing.cluster)
    axis = next((name for name, count in reversed(placed.mesh.axes) if count > 1), placed.mesh.axes[-1][0])
    note = (
        f"nodes, GPUs and ranks; colours: groups of {axis}. `phalanx tables mesh --rank R` outlines a rank's groups"
    )
    drawn = None
    if len(placed.topology.hosts) > _MOST_NODES:
        drawn = one_of_each_stage(placed)[:_MOST_NODES]
        note += "; one node for each set of pipeline ranks that share one"
    return Section("The layout", note, panels=nodes(placed, axis, hosts=drawn).panels)


def _pipeline(best: RankedStrategy, a: SearchAnswer) -> Section:
    s, m = best.strategy, best.strategy.accumulation(a.pricing.job)
    per_micro_batch = 2 * s.pp * s.virtual
    least = 2 * s.pp if s.schedule == "interleaved" else s.pp
    drawn = min(m, max(least, _MOST_PASSES // per_micro_batch // s.pp * s.pp))
    priced = timeline(a.pricing, s, best.run.blocks, drawn)
    shown = _spread(s.pp, max(3, _MOST_DRAWN // max(map(len, priced.schedule.actions))))
    lanes = []
    for rank in shown:
        actions = zip(priced.schedule.actions[rank], priced.times[rank], strict=True)
        lanes.append(Lane(f"rank {rank}", [_block(action, *times) for action, times in actions]))
    few = f"the first {drawn} of {m} micro-batches" if drawn < m else f"all {m} micro-batches"
    few += f" on {len(shown)} of {s.pp} pipeline ranks" if len(shown) < s.pp else ""
    return Section(
        "The pipeline over time",
        f"{few} of {s.schedule}, without messages between stages; a gap is bubble",
        columns=("rank", "blocks", "busy", "idle"),
        rows=[
            (str(rank), ", ".join(_blocks(best, rank)), seconds(busy), seconds(priced.makespan - busy))
            for rank, busy in enumerate(priced.work)
        ],
        panels=(Timeline("seconds", tuple(lanes)),),
    )


def _block(action: Action, start: float, end: float) -> LaneBlock:
    kind = _PASSES[action.kind]
    about = f"{kind} of chunk {action.chunk}, micro-batch {action.micro_batch}"
    return LaneBlock(float(f"{start:.6g}"), float(f"{end:.6g}"), str(action.micro_batch), kind, about)


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


_PASSES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def _blocks(best: RankedStrategy, rank: int) -> list[str]:
    from phalanx.schedule.pipeline.stages import rank_of

    owners = rank_of(best.strategy)
    return [str(count) for chunk, count in enumerate(best.run.blocks) if owners[chunk] == rank]


def _roofline(x: AnalyticSubject) -> Section:
    priced = operators.training(x.pricing, x.strategy)
    peak, memory_rate = float(x.pricing.system.peak_bf16), float(x.pricing.system.memory_bytes_per_s)
    ridge = peak / memory_rate
    low, high = min(o.intensity for o in priced) / 2, max(*(o.intensity for o in priced), ridge) * 2
    by_bound: dict[str, list[tuple[tuple[float, float], str]]] = {}
    rows = []
    for o in priced:
        rate = o.flops / o.seconds
        about = f"{o.name}, {o.shape}: {rate / 1e12:.3g} TFLOP/s, {seconds(o.seconds)}"
        by_bound.setdefault(f"bound by {o.bound}", []).append(((o.intensity, rate), about))
        reached = (f"{o.intensity:,.1f}", f"{rate / 1e12:,.1f}", seconds(o.seconds))
        rows.append((o.name, o.shape, *reached, o.bound))
    roof = Series("", [(low, low * memory_rate), (ridge, peak), (high, peak)], colour=5)
    return Section(
        "The compute roofline",
        f"operators of a block, forward; the ridge is at {ridge:,.0f} FLOP per byte of memory",
        columns=("operator", "size", "FLOP per byte", "TFLOP/s", "takes", "bound by"),
        rows=rows,
        panels=(_under_roofs("FLOP per byte of memory", [roof], by_bound),),
    )


def _axes(x: AnalyticSubject) -> Section:
    """Draw each axis under the roof of its links: at `intensity` FLOP for each byte sent, a link of `ridge` FLOP per
    byte lets a rank reach at most peak * min(1, intensity / ridge)."""
    axes, peak = explanation.axes(x), float(x.pricing.system.peak_bf16)
    sending = [a for a in axes if a.sent and a.intensity > 0 and a.ridge > 0]
    rows = [
        (a.axis, a.tier, size(a.sent), f"{a.intensity:,.0f}", f"{a.ridge:,.0f}", a.regime, seconds(a.exposed_s))
        for a in axes
    ]
    reached: dict[str, list[tuple[tuple[float, float], str]]] = {}
    for a in sending:
        about = f"{a.axis}: {size(a.sent)} over {a.tier}, {a.regime}; {seconds(a.exposed_s)} exposed"
        point = (a.intensity, peak * min(1.0, a.intensity / a.ridge))
        reached.setdefault(f"{a.axis}, over {a.tier}", []).append((point, about))
    ends = [value for a in sending for value in (a.intensity, a.ridge)]
    roofs = [
        Series("", [(min(ends) / 2, peak * min(ends) / 2 / ridge), (ridge, peak), (max(ends) * 2, peak)], colour=5)
        for ridge in sorted({a.ridge for a in sending})
    ]
    return Section(
        "The communication roofline",
        "by axis, of one rank and step; a line for each kind of link; left of its ridge an axis sends longer than "
        "its rank computes, and overlap cannot hide it",
        columns=("axis", "links", "sent", "FLOP per byte", "ridge", "regime", "exposed"),
        rows=rows,
        panels=(_under_roofs("FLOP per byte sent", roofs, reached),) if sending else (),
    )


def _under_roofs(
    x: str, roofs: Sequence[Series], reached: Mapping[str, Sequence[tuple[tuple[float, float], str]]]
) -> Lines:
    """Return a roofline: roofs, and series name -> ((x, FLOP/s), words for the point)."""
    series = []
    for i, (name, pairs) in enumerate(reached.items()):
        points, about = zip(*pairs, strict=True)
        series.append(Series(name, points, dots=True, line=False, about=about, colour=i))
    return Lines(PlotAxis(x, "count", log=True), PlotAxis("FLOP/s", "FLOP/s", log=True), (*roofs, *series))


def _rejected_section(a: SearchAnswer) -> Section:
    rows = [(r.family, str(r.priced.strategy), r.reason) for r in a.rejected[:24]]
    return Section("Rejected", columns=("family", "strategy", "why not"), rows=rows)
