"""Views of a configuration: its layout, what became of its keys, its mistakes, what to change in it, and exports."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from phalanx.answers.configurations.export import Export
from phalanx.answers.configurations.improve import Improvement, PricedState
from phalanx.answers.configurations.tries import TriedChanges
from phalanx.answers.findings import Findings
from phalanx.answers.question.read import Reading, origins
from phalanx.frameworks.configuration import Configuration, shown
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.planning.budget import short_number
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.expense import in_days, in_words
from phalanx.report.expense import number as amount
from phalanx.report.predict import heading
from phalanx.report.style import count_words, seconds, size
from phalanx.report.view import View, report

_SHOWN = 12
"""The most keys of one kind that are listed by name; --json has all."""


def view(r: Reading) -> View:
    """Show the layout, the keys and the mistakes of a configuration."""
    mistakes = [f"{m.name}: {m.key} {m.problem}; {m.remedy} ({m.source})" for m in r.mistakes]
    caveats = [caveat.line for caveat in r.caveats]
    return View([*caveats, _layout(r.configuration, r.title), _keys(r.configuration), *mistakes])


def _layout(c: Configuration, title: str) -> Sheet:
    """Tabulate the fields that a configuration sets, and the key or rule that each comes from."""
    rows, where = [], origins(c)
    for name, value in {**_strategy(c), **c.options}.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        rows.append((name, text, where[name]))
    named = f", named {c.model_name}" if c.model_name else ""
    model = f"{c.spec.family}, {c.spec.parameter_count:,} parameters" if c.spec else f"open{named}: name it"
    rows.append(("model", model, c.open_model))
    return Sheet(f"{title}: {c.kind}, priced as {c.stack}", columns("field | value | from"), rows)


def _strategy(c: Configuration) -> dict[str, Any]:
    """Return the fields that a file sets, each once: a local batch that a pipeline divides, as its micro-batches."""
    fields = {name: value for name, value in asdict(c.layout).items() if value is not None}
    if recomputed := fields.pop("recomputed", None):
        fields["recompute"] = recomputed
    micro, local, steps = c.fields.get("micro_batch"), c.layout.micro_batch, c.layout.accumulation
    if micro and local and steps:
        fields["accumulation"] = steps * local // micro
    return fields | dict(c.fields)


def _keys(c: Configuration) -> Sheet:
    """Tabulate the numbers of keys that are understood, without effect, not modelled, and not judged."""
    unknown = [f"{shown(key)} (did you mean {near}?)" if near else shown(key) for key, near in c.unknown.items()]
    kinds = {
        "understood": [shown(key) for key in c.understood],
        "without effect": [shown(key) for key in c.without_effect],
        "not modelled": [shown(key) for key in c.not_modelled],
        "not judged": unknown,
    }
    rows = [(kind, len(names), _enumeration(names)) for kind, names in kinds.items()]
    return Sheet("its keys", columns("keys | count [count] | which"), rows)


def _enumeration(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def export(e: Export) -> View:
    """Show the files and notes of an export."""
    where = f"{e.folder}/ has " if e.folder is not None else ""
    notes = (f"note: {note}" for note in e.program.notes)
    blanks = [f"to fill in: {', '.join(e.blanks)}"] if e.blanks else []
    return View([f"{e.program.title}: {where}{', '.join(e.files)}", *notes, *blanks])


def findings(f: Findings) -> View:
    """Show each finding with its remedy, and how many there are."""
    # The heading leaves out what is among the findings: that the strategy does not fit, and the stack's refusal.
    first = any(x.name == "refused" for x in f.findings[:1])
    said = f.question and replace(f.question, refused="" if first else f.question.refused, overfull="")
    lines = [caveat.line for caveat in f.caveats] if said is None else [heading(said)]
    lines += [f"{x.name}: {x.problem}; {x.remedy}" for x in f.findings]
    count = count_words(len(f.findings), "finding") if f.findings else "nothing found"
    if f.strategy is not None:
        lines.append(f"{f.strategy}: {count}")
    elif not f.findings:
        lines.append("nothing found in the file; --cluster looks at the strategy too")
    rows = [(x.name, x.problem, x.remedy) for x in f.findings]
    sheet = Sheet("findings", columns("name | problem | remedy"), rows)
    return View(lines, html=lambda: report([sheet]))


_LONG = 40
_LEGEND = "alone: the file with this change only; together: with all changes above"


def tries_view(x: TriedChanges) -> View:
    """Show the configuration's price, and its price with each change."""
    now = x.now
    rows = []
    for t in (now, *x.changes):
        more = None if t is now or not t.step_time_s else t.step_time_s / (now.step_time_s or 1) - 1
        fits = "" if t.memory_bytes is None else "yes" if t.fits else "no"
        cost = None if t.expense is None else t.expense.money
        days = () if now.training is None else (t.training and t.training.days,)
        figures = (t.tokens_per_s_per_gpu, t.memory_bytes, fits, *days, "" if cost is None else amount(cost))
        rows.append((t.change, t.step_time_s, more, *figures, t.reason))
    tokens = "1M" if now.training is None else short_number(now.training.tokens)
    names = columns(
        "change | step [s] | of the step [change] | tokens/s, GPU [count] | memory [bytes] | fits "
        f"{' | days [number]' * (now.training is not None)} | money, {tokens} tokens | "
    )
    return View([heading(x.question), Sheet("each change alone", names, rows, charted=False)])


def improvement(x: Improvement) -> View:
    """Show the configuration's price, the better one's, and each change alone and together with the changes above."""
    lines = [heading(x.question), state("now", x.now), *_whole(x.now, x)]
    if x.refused:
        lines.append(f"{x.question.stack} refuses it: {x.refused}")
    if x.better is None:
        count = f"{x.strategies_evaluated:,} strategies of {x.question.stack}"
        return View((*lines, f"nothing to change: none of {count} is faster by 0.2 % or more"))
    lines += [state("better", x.better), *_whole(x.better, x)]
    reasons = [f"{n} alone: {c.alone_refused}" for n, c in enumerate(x.changes, 1) if c.alone is None]
    row = DOCUMENTED.get(x.question.stack)
    # An option that a program's code sets is in no file that an export writes.
    coded = row is not None and any(
        row.options[name].in_code for name in x.better.options.changed() if name in row.options
    )
    return View([*lines, _changes(x), *reasons, _LEGEND + ("" if coded else "; phalanx export writes the whole")])


def state(title: str, s: PricedState) -> str:
    """Return a line on a strategy's step time, MFU and memory."""
    room = "" if s.fits else ", which does not fit"
    figures = f"{seconds(s.step_time_s)} a step, MFU {s.mfu:.1%}, {size(s.memory_bytes)} a GPU{room}"
    return f"{title}: {s.strategy}: {figures}"


def _whole(s: PricedState, x: Improvement) -> Iterator[str]:
    """Yield a line on the whole training, where its length is known."""
    if s.training is not None and s.expense is not None:
        yield f"  the whole training: {in_days(s.training)}: {in_words(s.expense, x.rates)}"


def _changes(x: Improvement) -> Sheet:
    """Tabulate settings, old and new, with the effect of each change on step and memory."""
    rows = []
    for number, c in enumerate(x.changes, 1):
        alone = _difference(x.now, c.alone) if c.alone is not None else "not alone"
        settings = [(e.key, e.old, e.new) for e in c.settings] or [(n, *values) for n, values in c.fields.items()]
        for place, (key, old, new) in enumerate(settings):
            effect = (alone, _difference(x.now, c.together)) if place == 0 else ("", "")
            first = str(number) if place == 0 else ""
            rows.append((first, key, _short(old) or "not set", _short(new) or "leave out", *effect))
    return Sheet("what to change", columns(" | setting | now | better | alone | together"), rows, keys=2)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."


def _difference(now: PricedState, s: PricedState) -> str:
    """Write the change in step and memory."""
    more = s.memory_bytes - now.memory_bytes
    sign = "-" if more < 0 else "+"
    room = "" if s.fits else "\ndoes not fit"
    return f"{s.step_time_s / now.step_time_s - 1:+.1%}\n{sign}{size(abs(more))}{room}"
