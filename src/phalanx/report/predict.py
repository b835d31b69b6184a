"""Views of a prediction (its figures, the parts of time and memory, each term with its formula and numbers), and of
its explanation (figures against targets, rooflines, what to change first).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from phalanx.answers.explanation import Explanation, OperatorIntensity
from phalanx.answers.prediction import Prediction
from phalanx.answers.question.question import Premises
from phalanx.cost.analytic.compression import LARGEST_GROUP, Payment
from phalanx.cost.analytic.step import FORMULAS, TERM_NAMES
from phalanx.planning.budget import short_number
from phalanx.planning.search import HEADROOM
from phalanx.planning.tables.table import Sheet, Unit, columns
from phalanx.report.expense import duration, in_words, number, origins
from phalanx.report.style import seconds, size
from phalanx.report.view import View

_SMALL = 0.001
"""Terms below this share are left out of the tables."""


def view(p: Prediction, expense: bool = False) -> View:
    """Show a prediction; `expense`: whether to show the cost of tokens with its prices."""
    cost = _expense(p) if expense else ()
    return View([heading(p.question), figures(p), *cost, *_lengths(p), time(p), memory(p)], html=lambda: _page(p))


def _expense(p: Prediction) -> Iterator[str | Sheet]:
    if p.expense is not None and p.rates is not None:
        yield f"{p.expense.of}: {number(p.expense.gpu_hours)} GPU-hours, {in_words(p.expense, p.rates)}"
        yield origins(p.rates)


def _lengths(p: Prediction) -> Iterator[Sheet]:
    """Yield a table of the step with documents of unequal lengths, a row for each way of batching them."""
    if p.lengths is None:
        return
    requested = p.lengths.asked
    names = columns(
        "way | step [s] | tokens/s [count] | documents a step [count] | padding [share] | waiting [share] | "
        "most attention of a rank [number]"
    )
    rows = [
        (x.way, x.step_s, x.tokens_per_s, x.documents, x.padding_share, x.waiting_share, x.attention_ratio)
        for x in p.lengths.ways
    ]
    cut = f"{p.lengths.cut_share:.1%} of the tokens are beyond a sequence and not trained"
    note = f"{cut}; most attention: of the mean"
    title = f"documents of {p.lengths.line}"
    yield Sheet(title, names, rows, note, marked=p.lengths.ways.index(requested), charted=False)


def heading(q: Premises) -> str:
    """Return the first lines of every output: why the stack does not run the strategy, that it does not fit, the
    caveats of its price; then the stack, the precision, and where dp is from."""
    engine = "exactly, as our own runtime runs it" if q.engine == "exact" else "by fitted formulas"
    engine += f", {q.calibrated}" if q.calibrated else ""
    options = f"; {q.options}" if q.options.changed() else ""
    peak = " (MFU: of the peak in bf16)" if q.precision.startswith(("fp8", "fp4")) else ""
    line = f"stack {q.stack}, priced {engine}; precision {q.precision}{peak}; {q.dp_rule}{options}"
    refused = [f"{q.stack} does not run it: {q.refused}"] if q.refused else []
    if q.overfull:
        refused.append(f"does not fit: the fullest rank needs {q.overfull}; the figures below assume enough memory")
    return "\n".join((*refused, *_on_hosts(q), *(caveat.line for caveat in q.caveats), line))


_PINNED = 1.5
"""DeepSpeed's estimate of host memory over the bytes of state, for pinned copies and buffers
(deepspeed/runtime/zero/stage3.py, additional_buffer_factor)."""


def _on_hosts(q: Premises) -> Iterator[str]:
    """Yield a line on the memory that offloaded state needs on each node's host, and whether the host has it."""
    if not q.host_bytes:
        return
    has, takes = q.host_memory_bytes, f"offloaded state takes at least {size(q.host_bytes)} of each node's host"
    margin = f"{size(_PINNED * q.host_bytes)} with DeepSpeed's margin for pinned copies"
    if has is None:
        yield f"{takes} ({margin}), whose memory the cluster does not say: host_memory_gib in its file"
    elif q.host_bytes > has:
        yield f"does not fit: {takes}, which has {size(has)}"
    else:
        yield f"{takes}, which has {size(has)}" + (f": tight, {margin}" if _PINNED * q.host_bytes > has else "")


def figures(p: Prediction) -> Sheet:
    """Tabulate the main figures: step time, throughput, MFU, HFU, memory and compression."""
    q = p.question
    note = "the whole training: without failures and saves (phalanx simulate goodput)" if p.training else ""
    title = f"{q.about} on {q.gpus} ranks of {q.cluster}: {p.strategy}"
    return Sheet(title, columns(" | predicted | how it came about"), list(_figures(p)), note)


_ERROR = 0.06
"""Median error of predictions of reserved memory, with constants fitted without the family (docs/prediction.md)."""


def _figures(p: Prediction) -> Iterator[tuple[str, str, str]]:
    remark = "estimated: the terms below, summed" if p.engine == "formulas" else p.origin
    yield "step", seconds(p.step_time_s), remark
    if p.step_time_low_s is not None and p.step_time_high_s is not None:
        yield "  likely", f"{seconds(p.step_time_low_s)} to {seconds(p.step_time_high_s)}", p.interval
    yield "tokens/s per GPU", f"{p.tokens_per_s_per_gpu:,.0f}", f"{p.tokens_per_s * p.step_time_s:,.0f} tokens a step"
    if p.mfu is not None:
        remark = f"{p.model_flops:.3g} FLOP a step; 6N says {p.six_n_flops:.3g}; peak of 16 bits"
        remark += f", not of {p.question.precision}" if p.question.precision in ("fp32", "tf32") else ""
        yield "MFU", f"{p.mfu:.1%}", remark
        yield "HFU", f"{p.hfu:.1%}", "including what recomputation repeats"
    if (t := p.training) is not None:
        remark = f"{t.steps:,.0f} steps, {short_number(t.tokens)} tokens (by {p.training_from})"
        remark += f": {number(t.gpu_hours)} GPU-hours"
        yield "whole training", duration(t), remark
    share = p.memory_bytes / p.usable_bytes
    tight = f", tight: {share:.0%}" if share > 1 - HEADROOM and p.engine == "formulas" else ""
    close = f", by {share - 1:.0%}, which is within an estimate's error" if 1 < share <= 1 + _ERROR else ""
    fits = f"fits{tight}" if p.fits else "does not fit" + (close if p.engine == "formulas" else "")
    if p.memory_peak_bytes is not None:
        yield "memory, peak", size(p.memory_peak_bytes), "allocated, fullest rank, fullest instant"
    origin = " (estimated)" if p.engine == "formulas" else ""
    yield "memory, reserved", size(p.memory_bytes), f"{fits}: {size(p.usable_bytes)} usable{origin}"
    if p.estimate is not None and p.estimate.layout.compressed.bound:
        yield "compression", "a bound", "gradients decide what is sent; priced at the most, one in dp x cp"
    if p.compression is not None and p.estimate is not None:
        c, g = p.estimate.layout.compressed, float(p.estimate.profile.gradient_bytes)
        each, rest = c.values, c.extra_bytes
        formula = f"2 g / (v g + x) = 2 x {g:g} / ({each:g} x {g:g} + {rest:g}), g bytes of a gradient"
        yield from _payment(p.compression, formula)


def _payment(p: Payment, by_bytes: str) -> Iterator[tuple[str, str, str]]:
    """Yield rows on what compression costs or saves in the gradient exchange, and the ranks for which it pays."""
    gain = p.dense_s - p.sent_s - p.coding_s
    parts = f"all-reduce {seconds(p.dense_s)}; compressed {seconds(p.sent_s)}, coding {seconds(p.coding_s)}"
    yield "compression", f"{'saves' if gain > 0 else 'costs'} {seconds(abs(gain))}", f"alone, {parts}"
    pays = "never" if p.ranks is None else "with {} to {} ranks".format(*p.ranks)
    yield "  pays", pays, f"with coding, of 2 to {LARGEST_GROUP:,} ranks of this cluster"
    if p.by_bytes is not None:
        yield "  by bytes alone", f"up to {p.by_bytes:.4g} ranks", by_bytes


def time(p: Prediction) -> Sheet:
    """Tabulate the terms of a step's time."""
    names: Mapping[str, str] = TERM_NAMES if p.engine == "formulas" else {}
    return shares("where the time goes", "of the step", p.terms_s, "s", lambda name: names.get(name, name))


def memory(p: Prediction) -> Sheet:
    """Tabulate the parts of the fullest rank's memory."""
    title = f"where the memory goes: {size(p.memory_bytes)} of {size(p.usable_bytes)}, the fullest rank"
    rest = max(p.memory_bytes - sum(p.memory_terms.values()), 0.0)
    terms = {**p.memory_terms, "reserved by the allocator beyond these": rest}
    return replace(shares(title, "of it", terms, "bytes", str), note=p.state.line)


def shares(title: str, share: str, terms: Mapping[str, float], unit: Unit, name: Callable[[str], str]) -> Sheet:
    """Tabulate terms with their shares of the whole, the largest first."""
    total = sum(terms.values())
    ordered = sorted(terms.items(), key=lambda item: -item[1])
    rows = [(name(term), value, value / total) for term, value in ordered if value > _SMALL * total]
    return Sheet(title, columns(f" | takes [{unit}] | {share} [share]"), rows, bars=True)


def formulas(p: Prediction) -> Sheet:
    """Tabulate each term's formula and the numbers that went into it."""
    rows = []
    for name, value in p.terms_s.items():
        numbers = ", ".join(f"{k} = {_number(k, v)}" for k, v in p.factors.get(name, {}).items())
        rows.append((name, value, FORMULAS[name], numbers))
    return Sheet("terms of the step", columns("term | seconds [s] | formula | with"), rows)


def _number(name: str, value: float) -> str:
    if name.endswith("_s"):
        return seconds(value) if value else "0"
    return f"{value:,.4g}"


def _page(p: Prediction) -> str:
    from phalanx.report.html.page import page
    from phalanx.report.html.plan import memory as memory_section
    from phalanx.report.html.plan import waterfall

    sections = [
        waterfall("Time of a step", dict(p.terms_s), TERM_NAMES),
        memory_section(
            "Memory by part",
            {str(p.strategy): dict(p.memory_terms)},
            ("usable", p.usable_bytes),
            f"of the fullest rank; {p.state.line}",
        ),
    ]
    return page(str(p.strategy), "prediction", sections, {"terms_s": dict(p.terms_s)})


def explanation(x: Explanation) -> View:
    """Show an explanation, the most asked-for tables first."""
    p = x.prediction
    mfu = "" if p.mfu is None else f", MFU {p.mfu:.1%}"
    lines = (heading(p.question), f"{p.strategy}: {seconds(p.step_time_s)} a step{mfu}")
    sheets = [time(p), memory(p)]
    if p.engine == "formulas":
        sheets += [_targets(x), _axes(x), operator_table(_OPERATORS, x.operators, x.ridge), _losses(x), formulas(p)]
    return View([*lines, *sheets, _neighbours(x)], html=lambda: view(p).page())


_OPERATORS = "operators of a block, forward, on the compute roofline"


def _targets(x: Explanation) -> Sheet:
    names = columns("figure | here [share] | good [share] | excellent [share] |  | source")
    rows = [(t.name, t.value, t.good, t.excellent, t.mark, t.source) for t in x.targets]
    return Sheet("figures against targets", names, rows)


def _axes(x: Explanation) -> Sheet:
    names = columns(
        "axis | links | sent [bytes] | FLOP/byte [count] | ridge [count] | regime | exposed [s] "
        "| critical batch [count]"
    )
    rows = [
        (a.axis, a.tier, a.sent_bytes, a.flop_per_byte, a.ridge, a.regime, a.exposed_s, a.critical_batch)
        for a in x.communication
    ]
    note = "critical batch: sequences in a step from which data-parallel communication takes less than compute; "
    note += "from how many on more of them save few steps, no price knows"
    exposed_s = next((a.exposed_s for a in x.communication if a.axis == "tp"), 0.0)
    if (again := exposed_s - x.prediction.terms_s.get("tp", 0.0)) > _SMALL * exposed_s:
        note += f"; {seconds(again)} of what tp exposes is sent again for recomputation, and stands in its row above"
    return Sheet("on the communication roofline, per rank and step", names, rows, note)


def operator_table(title: str, rows: Iterable[OperatorIntensity], ridge: float | None) -> Sheet:
    """Tabulate operators on the compute roofline."""
    names = columns("operator | size | FLOP [number] | bytes [bytes] | FLOP/byte [count] | bound by | time [s]")
    cells = [(o.name, o.size, o.flops, o.bytes, o.intensity, o.bound, o.takes_s) for o in rows]
    return Sheet(title, names, cells, f"the chip's ridge: {ridge or 0.0:,.0f} FLOP per byte of memory")


def _losses(x: Explanation) -> Sheet:
    names = columns("loss | takes [s] | gain at most [share] | best single change | step then [s]")
    rows = [(a.name, a.takes_s, a.at_most, a.change or "none that fits is faster", a.step_time_s) for a in x.losses]
    return Sheet("what to change first", names, rows, f"order of the mesh, {x.order}" if x.order else "")


def _neighbours(x: Explanation) -> Sheet:
    step = x.prediction.step_time_s
    names = columns("change | strategy | step [s] | [change] | memory [bytes] | why not")
    rows = [
        (n.change, n.strategy, n.step_time_s, n.step_time_s / step - 1, n.memory_bytes, n.reason)
        for n in x.neighbours
    ]
    return Sheet("why not its neighbours", names, rows)
