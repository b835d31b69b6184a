"""Views of a search's answer (the choice, why, what limits it and what to run next; with `more`, all tables), and of
a job's plan (the chosen strategy among its alternatives, its buckets, chunks and collectives).
"""

from collections.abc import Iterable, Iterator, Sequence
from shlex import quote
from typing import Any

from phalanx.answers.plan import JobPlan
from phalanx.answers.search.model_plan import CostOfCondition, ModelPlan, PlannedStrategy
from phalanx.cost.analytic.step import TERM_NAMES
from phalanx.planning.auto.bucket_size import USER_CHOICE
from phalanx.planning.explain import decision_tree
from phalanx.planning.search.priced import COMMUNICATION
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.expense import carbon, energy, in_days, in_words
from phalanx.report.pipeline import chunk_table
from phalanx.report.predict import heading
from phalanx.report.style import seconds, size
from phalanx.report.view import View
from phalanx.spec.byte_sizes import write_bytes

_REASONS = 4
"""Rejected strategies that the short answer names."""
_ALL_REASONS = 24
_LARGEST = 6
"""Terms of the step that the short answer names."""


def view(a: ModelPlan, more: bool = False, out: str = "plan.json") -> View:
    """Show the choice and its reasons; `more`: the best strategies, families, front, formats and rejected ones.
    `out`: the file that has the plan."""
    sheets = list(_tables(a)) if more else []
    closing = [] if more else [_each_family(a), *_reasons(a), _next(out)]
    return View([heading(a.question), *lines(a), *_with_failures(a), *sheets, *closing], html=lambda: _page(a))


def lines(a: ModelPlan) -> Iterator[str]:
    """Yield lines on the result, the question and the search."""
    best = a.best
    mfu = "" if best.lengths else f"MFU {best.mfu:.1%}; "  # which counts FLOPs of whole sequences
    many = "es" if best.micro_batches > 1 else ""
    yield (
        f"{a.search.best.strategy}: {best.tokens_per_s:,.0f} tokens/s, {best.tokens_per_s_per_gpu:,.0f} a GPU, "
        f"{mfu}a step of {seconds(best.step_time_s)} in {best.micro_batches:,} micro-batch{many} of "
        f"{best.strategy.micro_batch}"
    )
    if a.options.changed():
        yield f"with options of the stack: {a.options}"
    if a.chunks:
        yield f"pipeline chunks, in order: {a.search.lengths}, as the plan lists them; {_equal_chunks(a)}"
    yield (
        f"likely, at 80 %, by published runs: {best.step_time_low_s / best.step_time_s:.2f} to "
        f"{best.step_time_high_s / best.step_time_s:.2f} times what is predicted, "
        f"{seconds(best.step_time_low_s)} to {seconds(best.step_time_high_s)}"
    )
    yield f"where the step goes: {', '.join(_largest(a))}"
    yield f"memory {size(best.memory_bytes)} of {size(best.usable_bytes)}; {a.headroom:.0%} is left free (--headroom)"
    yield best.state.line
    if x := best.lengths:
        yield (
            f"with documents of unequal lengths, {x.way}: {x.tokens_per_s:,.0f} tokens/s trained, a step of "
            f"{seconds(x.step_s)}; {x.padding_share:.1%} padding, {x.waiting_share:.1%} waiting for longer sequences"
        )
        others = [p for p in a.alternatives if p.lengths]
        if others and (first := min(others, key=lambda p: p.step_time_s)).step_time_s < best.step_time_s:
            assert first.lengths is not None
            yield (
                f"not {first.strategy}, {1 - first.step_time_s / best.step_time_s:.1%} faster with equal sequences: "
                f"{first.lengths.waiting_share:.1%} waiting, {first.lengths.tokens_per_s:,.0f} tokens/s trained"
            )
    yield _whole_training(a)
    q = a.question
    yield (
        f"{a.model.family} decoder, {a.model.parameter_count:,} parameters, on {a.gpus} x {a.device} of {q.cluster}; "
        f"a step of {q.global_batch} x {q.seq} tokens"
    )
    p = a.search.pricing
    facts = decision_tree.facts(p.model, p.cluster, a.gpus, p.job.global_batch, p.job.seq)
    yield f"the usual tree (learn tree) says: {decision_tree.sentence(facts)}"
    yield (
        f"{a.strategies_evaluated:,} legal strategies in {a.search_s:.2f} s: {a.strategies_priced_one_by_one:,} "
        "priced one by one, others bounded"
    )
    if few := a.fewer_gpus:
        rest = f"{a.gpus - few.gpus} could stay idle"
        yield f"{few.gpus} GPUs would be as fast, with {few.strategy}: {seconds(few.step_time_s)}; {rest}"
    if a.conditions is not None:
        yield from _costs(a.conditions, a.each_condition)


def _equal_chunks(a: ModelPlan) -> str:
    assert a.chunks is not None
    step, equal = a.best.step_time_s, a.chunks.equal_step_time_s
    if equal is None:
        return "equal ones do not fit"
    if equal == step:
        return "as equal as whole blocks allow"
    return f"equal ones take {seconds(equal)}, {equal / step - 1:.1%} more"


def _largest(a: ModelPlan) -> Iterator[str]:
    """Yield the largest terms of the step with their shares."""
    ordered = sorted(a.best.terms_s.items(), key=lambda item: -item[1])
    for name, value in ordered[:_LARGEST]:
        if value > 0.005 * a.best.step_time_s:
            yield f"{TERM_NAMES.get(name, name)} {value / a.best.step_time_s:.0%}"


def _whole_training(a: ModelPlan) -> str:
    t = a.best.training
    if t is None or a.goal is None:
        days = 1e12 / a.best.tokens_per_s / 86_400
        return f"10^12 tokens would take {days:,.1f} days (set --tokens for another number)"
    return f"{in_days(t)}: {in_words(a.best.expense, a.rates)}"


def _with_failures(a: ModelPlan) -> Iterator[str | Sheet]:
    """Yield a table of the candidates' time lost to failures, and why the shortest step is not chosen."""
    candidates = (*a.ranked, *a.families.values(), *a.front)
    lossy = ((p, t, t.losses) for p in candidates if (t := p.training) and t.losses)
    rows = sorted(lossy, key=lambda row: row[1].days)
    best = next((row for row in rows if row[0] is a.best), None)
    if best is None:
        return
    each = {f"{row[2].effective_share:.3f}": row for row in [*reversed(rows), best]}  # the best of equal shares
    cells = [
        (
            a.search.best.strategy if p is a.best else p.strategy, p.step_time_s, lost.effective_share,
            lost.saving_share, lost.again_share, lost.down_share, lost.checkpoint_bytes, lost.stall_s, t.days,
        )
        for p, t, lost in sorted(each.values(), key=lambda row: row[1].days)
    ]  # fmt: skip
    heads = "strategy [strategy] | step [s] | effective [share] | saves [share] | done again [share] | down [share]"
    names = columns(f"{heads} | checkpoint [bytes] | a save stops [s] | days [number]")
    marked = [cell[0] for cell in cells].index(a.search.best.strategy)
    yield Sheet("with failures, by the closed form: the best of those that lose alike", names, cells, marked=marked)
    fastest, its, lost = min(rows, key=lambda row: row[0].step_time_s)
    if fastest.step_time_s < a.best.step_time_s and its.days > best[1].days:
        won = best[2].effective_share / lost.effective_share - 1
        yield (
            f"not {fastest.strategy}, whose step is {1 - fastest.step_time_s / a.best.step_time_s:.2%} shorter: it "
            f"takes {its.days:,.1f} days, since {a.search.best.strategy} works {won:.2%} more of the time"
        )


def _costs(whole: CostOfCondition, each: Sequence[CostOfCondition]) -> Iterable[str]:
    """Yield a line on the cost of all conditions, and one on the cost of each on top of the others."""
    if whole.cost is None or whole.step_time_s is None:
        yield f"{whole.condition}: nothing fits without it either"
        return
    without = f"without it {whole.without} takes {seconds(whole.step_time_s)}"
    if whole.cost < 0:  # replicas that step alone: another training, so a step may be shorter
        more = f"while the same loss takes less than {1 / (1 + whole.cost) - 1:.1%} more tokens"
        yield f"{whole.condition} saves {-whole.cost:.1%}: {without}; worth it {more}"
    else:
        yield f"{whole.condition} costs {whole.cost:.1%}: {without}"
    known = [f"{c.condition} {c.cost:.1%}" for c in each if c.cost is not None]
    left = [c.condition for c in each if c.cost is None]
    if known:
        more = f"; not searched for lack of time: {', '.join(left)}" if left else ""
        yield f"each on top of the others: {', '.join(known)}{more}"


def _each_family(a: ModelPlan) -> str:
    steps = ", ".join(f"{name} {seconds(p.step_time_s)}" for name, p in a.families.items())
    return f"the best of each family: {steps}"


def _reasons(a: ModelPlan) -> Iterator[str]:
    """Yield the largest loss of the choice, and why its nearest alternatives are no better."""
    losses = {
        name: a.best.terms_s.get(name, 0.0) for name in (*COMMUNICATION, "bubble", "recompute", "head", "launch")
    }
    name, value = max(losses.items(), key=lambda item: item[1])
    if value > 0.01 * a.best.step_time_s:
        yield f"what limits it: {TERM_NAMES[name]}, {seconds(value)} of {seconds(a.best.step_time_s)}"
    for r in a.rejected[:_REASONS]:
        yield f"not {r.strategy}: {r.reason}"


def _next(out: str) -> str:
    return f"next: phalanx explain {quote(out)}; --more has the other tables, --save FILE.html a page"


def _tables(a: ModelPlan) -> Iterator[Sheet]:
    yield _strategy_table((a.best, *a.alternatives[:4]), "the best", a)
    yield _families(a)
    yield _strategy_table(a.front, "time against memory", a)
    if a.steps_alone:
        names = columns("strategy [strategy] | step [s] | more tokens [share]")
        ways = [(x.strategy, x.step_time_s, x.more_tokens) for x in a.steps_alone]
        title = "replicas that step alone: how long, and their changes in how many bits"
        note = "more tokens: as many more may the same loss take before the strategy without these steps is as fast"
        here = [i for i, x in enumerate(a.steps_alone) if x.strategy == a.best.strategy]
        yield Sheet(title, names, ways, note, marked=here[0] if here else None)
    if a.number_formats:
        names = columns("--where | strategy [strategy] | step [s] | saves [share] | memory [bytes]")
        rows = [(o.where, o.strategy, o.step_time_s, o.gain, o.memory_bytes) for o in a.number_formats]
        yield Sheet("narrower number formats: faster, but other numbers; --where takes a line", names, rows)
    rejected = [(r.family, r.strategy, r.reason) for r in a.rejected[:_ALL_REASONS]]
    yield Sheet("why not", columns("family | strategy [strategy] | reason"), rejected)
    if a.offers:
        yield _offers(a)


def _families(a: ModelPlan) -> Sheet:
    return _strategy_table(list(a.families.values()), "the best of each family", a)


def _strategy_table(rows: Sequence[PlannedStrategy], title: str, a: ModelPlan) -> Sheet:
    """Tabulate strategies; the row of the best one is marked and has the figures of the plan."""
    names = columns(
        "family | strategy [strategy] | step [s] | MFU [share] | comm. [share] | bubble [share] | memory [bytes]"
    )
    even = a.search.best.strategy
    marked, cells = None, []
    for place, row in enumerate(rows):
        p = row
        if row.strategy in (even, a.best.strategy):
            marked, p = place, a.best
        figures = (p.step_time_s, p.mfu, p.communication_share, p.bubble_share, p.memory_bytes)
        cells.append((p.family, even if p is a.best else p.strategy, *figures))
    return Sheet(title, names, cells, marked=marked, charted=False)


def _offers(a: ModelPlan) -> Sheet:
    """Tabulate days and costs by number of GPUs."""
    names = columns(
        "GPUs [count] | strategy [strategy] | days [count] | GPU-hours [count] | money [count] | energy | carbon"
    )
    rows = [
        (o.gpus, o.strategy, o.training.days, o.training.gpu_hours, e.money, energy(e), carbon(e))
        for o in a.offers
        if o.training is not None and (e := o.expense) is not None
    ]
    marked = next((place for place, row in enumerate(rows) if row[0] == a.gpus), None)
    note = "fewer GPUs wait less and take longer; --deadline DAYS sets a limit"
    return Sheet("days against money", names, rows, note, marked=marked)


def _page(a: ModelPlan) -> str:
    from phalanx.report.html.plan import report

    return report(a, list(lines(a)))


_AXES = ("tp", "cp", "ep", "pp")
_FASTEST = 10
"""Candidates that are shown whatever their axes."""


def job_plan(p: JobPlan, choices: bool = False) -> View:
    """Show the fastest candidates; `choices`: whether to show how each collective is executed."""
    plan = p.plan
    cluster = f"{plan.cluster.name}: {plan.cluster.ranks} x {plan.cluster.device.name}"
    head = (
        f"{plan.model.family} decoder, {plan.model.parameter_count:,} parameters; {cluster}, rates "
        f"{plan.choices['rates_origin']}" + (f"; {by}" if (by := plan.choices.get("calibrated", "")) else "")
    )
    parts: list[str | Sheet] = [head, _alternatives(p)]
    parts += [_search(p)] if p.worlds else []
    if p.bucket and p.bucket["reason"] != USER_CHOICE:
        parts.append(f"buckets of {write_bytes(p.bucket['bytes'])}: {p.bucket['reason']}")
    if p.expense.money is not None or p.expense.energy_kwh is not None:
        parts.append(f"{p.expense.of}: {in_words(p.expense, p.rates)}")
    parts.append(f"the whole training, {in_days(p.training)}")
    if p.chunks:
        parts.append(f"chunks: {p.chunks['reason']}; imbalance {p.chunks['imbalance']:.1%}")
        parts.append(chunk_table(p.chunks["chunks"]))
    if choices:
        parts += _collectives(p)
    return View(parts)


def _alternatives(p: JobPlan) -> Sheet:
    """Tabulate the fastest candidates and the fastest of each set of axes; the chosen one is marked."""
    best = str(p.best["strategy"])
    fastest_of_axes = {
        tuple(getattr(c.strategy, axis) > 1 for axis in _AXES): place
        for place, c in reversed(list(enumerate(p.alternatives)))
    }
    shown = [
        c
        for place, c in enumerate(p.alternatives)
        if place < _FASTEST or str(c.strategy) == best or place in fastest_of_axes.values()
    ]
    pipelined = any(c.strategy.pp > 1 for c in p.alternatives)
    rejected = any(c.rejected for c in p.alternatives)
    optional = ["bubble [share]"] * pipelined + ["rejected"] * rejected
    names = columns(
        "strategy [strategy] | accum. [count] | step [s] | tokens/s [count] | exposed [s] | memory [bytes]", *optional
    )
    cells: list[tuple[Any, ...]] = []
    for c in shown:
        figures = (c.step_time_s, round(c.tokens_per_s), c.exposed_communication_s, c.memory_bytes)
        others = (*([c.bubble_share] if pipelined else []), *([c.rejected] if rejected else []))
        cells.append((c.strategy, c.micro_batches, *figures, *others))
    hidden = len(p.alternatives) - len(shown)
    note = "exposed: communication that nothing hides" + (f"; {hidden} more not shown" if hidden else "")
    marked = next((place for place, c in enumerate(shown) if str(c.strategy) == best), None)
    return Sheet("strategies, predicted", names, cells, note, marked=marked, charted=False)


def _search(p: JobPlan) -> str:
    """Return a line on the strategies that were searched."""
    *smaller, largest = p.worlds
    last = f"{largest} rank" if largest == 1 else f"{largest} ranks"
    over = " or ".join(filter(None, [", ".join(map(str, smaller)), last]))
    others = "no other promises to be faster" if p.exhaustive else "the others are slower, or do not fit, by estimate"
    priced = f"{p.strategies_priced_one_by_one} priced one by one"
    return f"{p.strategies_evaluated:,} legal strategies over {over}: {priced}, {others}"


def _collectives(p: JobPlan) -> Iterator[str]:
    """Yield the transport and algorithm of each collective, by size."""
    from phalanx.report.collectives import choices

    decided = p.plan.collectives
    for op, ranks, hosts in dict.fromkeys((c.op, c.group_size, c.hosts) for c in decided):
        yield f"{op} over {ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
        for line in choices([c for c in decided if (c.op, c.group_size, c.hosts) == (op, ranks, hosts)]):
            yield f"  {line}"
    if not decided:
        yield "collectives: torch.distributed's; no other was measured on this cluster"
