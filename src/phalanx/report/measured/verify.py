"""Views of a verification (predicted and recorded for each class of ranks, and the differences), and of parity."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.answers.answer import plain
from phalanx.answers.runs.parity import Parity, ProgramParity
from phalanx.answers.runs.verify import Verification, collectives
from phalanx.observation.diff import slack
from phalanx.observation.trainer.verify import ProvedClass
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.html.page import Section, page
from phalanx.report.style import count_words, size
from phalanx.report.view import View
from phalanx.schedule.pipeline.schedules import SCHEDULES


def view(v: Verification) -> View:
    """Show the result, class by class."""
    return View(list(_parts(v)), html=lambda: verification_page(plain(v)))


def _parts(v: Verification) -> Iterator[str | Sheet]:
    t, s = v.target, v.target.strategy
    count = s.accumulation(t.job)
    ranks = "1 rank," if s.world == 1 else f"{s.world} ranks, each"
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    yield (
        f"{t.model.family} decoder, {t.model.parameter_count:,} parameters; {s}: {ranks} {batches} of "
        f"{s.micro_batch} x {t.job.seq} tokens in a step"
    )
    yield f"what is proved: {t.about}"
    if v.on_gpu:
        yield "on a fake GPU: its rules are checked, its kernels do not run"
    for verified in v.classes:
        yield from _class(v, verified)
    for difference in v.stale:
        yield f"NOT proved: {difference}"
    if len(v.classes) > 1:
        yield from _joint_verdict(v)


def _joint_verdict(v: Verification) -> Iterator[str]:
    """Yield the verdict for all ranks together, where several classes took a step."""
    seconds, failed = sum(c.seconds for c in v.classes), [c.ranks.rank for c in v.classes if not c.proved]
    if failed:
        ranks = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}"
        yield f"\nNOT proved: {len(failed)} of {len(v.classes)} steps ({ranks})"
    elif v.proved:
        yield f"\nall {v.target.strategy.world:,} ranks proved by the steps of {len(v.classes)}, in {seconds:.1f} s"


def _class(v: Verification, verified: ProvedClass) -> Iterator[str | Sheet]:
    """Yield the collectives, memory and verdict of one class of ranks."""
    ranks, world = verified.ranks, v.target.strategy.world
    covered = f"all {world} ranks" if ranks.count == world else f"{ranks.count}: {ranks.description}"
    if world > 1:
        yield f"\nrank {ranks.rank} represents {covered}"
    if verified.failed:
        yield f"NOT proved: {verified.failed}"
        return
    recorded, program = verified.recorded, verified.program
    assert recorded is not None
    count = v.target.strategy.accumulation(v.target.job)
    if recorded.ran < count:
        steady = recorded.ran - 2
        if v.target.strategy.schedule in SCHEDULES:  # their micro-batches come in order
            yield f"micro-batch {steady} did what {steady - 1} did, and represents all up to {count - 2} of {count}"
        else:
            yield f"{recorded.ran} of {count} micro-batches took their passes, and represent the others"
    if totals := collectives(program.events):
        names = columns("collectives of a step, predicted | number [count] | bytes [count]")
        yield Sheet("", names, [(f"{op} over {axis}", n, total) for (op, axis), (n, total) in totals.items()])
    measured = v.target.measured
    rows = [
        ("before the step", program.state.total, recorded.memory.state, None),
        ("peak", program.peak_bytes, recorded.memory.peak, measured),
    ]
    yield live_bytes(rows, measured is not None)
    if v.on_gpu:
        yield from _waits(recorded.waits, count)
    yield from _verdict(verified, v.on_gpu)


def live_bytes(rows: Sequence[tuple[str, int, int | None, int | None]], measured: bool) -> Sheet:
    """Tabulate live bytes from rows (name, predicted, recorded without content, measured or None)."""
    names = columns("live bytes | predicted | recorded", *(["measured"] if measured else []))
    return Sheet("", names, [(name, *map(_bytes, values if measured else values[:2])) for name, *values in rows])


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{size(value)} ({value:,} B)"


def _waits(waits: Mapping[str, int], micro_batches: int) -> Iterator[str]:
    """Yield lines on how often the host waits for the GPU in a step, and at which lines of the program."""
    total = sum(waits.values())
    yield f"waits of the host for the GPU in a step: {total:,}{'; by line:' if total else ''}"
    for place, times in waits.items():
        yield f"  {times:,} ({times / micro_batches:g} a micro-batch) at {place}"


def _verdict(verified: ProvedClass, on_gpu: bool) -> Iterator[str | Sheet]:
    """Yield every difference with the events around it, or a line on what was proved."""
    for d in verified.differences:
        yield f"NOT proved: {d}"
        if d.number is not None:
            marked = next((place for place, (i, _, _) in enumerate(d.around) if i == d.number), None)
            yield Sheet("", columns("event | predicted | recorded"), [*d.around], marked=marked)
    if not verified.proved:
        return
    events = verified.program.events
    sent, passes = sum(bool(e.axis) for e in events), sum(not e.axis for e in events)
    flops = sum(e.flops for e in events if e.phase != "opt")
    events_proved = f"{sent:,} collectives and {passes:,} passes in order, {flops:,} FLOP by unit"
    proved = f"proved in {verified.seconds:.1f} s: {events_proved}"
    if on_gpu:
        yield (
            f"{proved}; one device, no other waits, kernels and types that CUDA has, no buffer in flight used (live "
            f"bytes off by {verified.deviation:,}, as its kernels need other scratch memory)"
        )
        return
    allowed = f"{slack(verified.program):,} are allowed"
    yield f"{proved}, live bytes throughout (off by {verified.deviation:,}; {allowed})"


def parity(p: Parity) -> View:
    """Show a strategy compared with one process."""
    return View(list(_parity_lines(p)))


def program_parity(p: ProgramParity) -> View:
    """Show a program compared with one process."""
    verdict = "holds" if p.passed else "DOES NOT HOLD"
    worst = f" ({p.worst})" if p.worst else ""
    what = f"{count_words(p.parameters, 'gradient')} of the first step, over {count_words(p.passes, 'micro-batch')}"
    most = "no number" if p.grad_rel_max is None else f"{p.grad_rel_max:.1e}"
    errors = f"grad_rel_max {most}{worst}, bound {p.bound:.1e}"
    lines = [f"parity of {p.program} with {p.strategy} in {p.dtype}, {what}, {verdict}: {errors}"]
    if p.zero_gradients:
        number = f"{p.zero_gradients} of these gradients"
        lines.append(f"but {number} are zero in one process too, which says little of their parameters")
    return View([*lines, *([f"but {p.looks_across}"] if p.looks_across else [])])


def _parity_lines(p: Parity) -> Iterator[str]:
    for row in p.optimizers:
        worst = f"  ({row['worst']})" if row["worst"] else ""
        yield f"{row['optimizer']:5}  loss {row['loss_rel_max']:.1e}  gradients {row['grad_rel_max']:.1e}{worst}"
        if row["near_tie"]:
            compared = f"only the {row['steps']} steps before it are compared"
            yield f"{'':7}a router's near-tie in {row['near_tie']}; {compared} (float64 has none)"
    if p.compression:
        lossy = p.compression
        lost = lossy["lost_rel_max"]
        kept = "nothing is kept back" if lost is None else f"sent + kept back = gradient to {lost:.1e}"
        yield (
            f"compressed, lr = 0: {kept}; the first step is off by {lossy['first_error']:.2%}, the mean of "
            f"{p.steps} by {lossy['mean_error']:.2%}; sgd and adamw above are without compression"
        )
    verdict = "holds" if p.passed else "DOES NOT HOLD"
    errors = f"loss_rel_max {p.loss_rel_max:.1e}, grad_rel_max {p.grad_rel_max:.1e}, bound {p.bound:.1e}"
    yield f"parity of {p.strategy} in {p.dtype} over {p.steps} steps {verdict}: {errors}"


def verification_page(v: Mapping[str, Any]) -> str:
    """Return the page of a verification; `v`: its JSON, as `phalanx verify --json` prints it."""
    verdict = "proved" if v["proved"] else "NOT proved"
    ranks = f"{v['world']:,} ranks, {v['micro_batches']} micro-batches in a step"
    text = [f"{verdict}: {v['about']}, {v['strategy']} on {ranks}", *v["notes"], *v["stale"]]
    sections = [Section("The verdict", text=tuple(text))]
    for c in v["classes"]:
        sections += _class_sections(c)
    return page(f"{v['strategy']}: {verdict}", "verification", sections, {"proved": v["proved"]})


def _class_sections(c: Mapping[str, Any]) -> list[Section]:
    """Return the sections of one class of ranks: its traffic and memory, predicted and recorded."""
    name = f"rank {c['rank']}, which represents {c['rank_count']:,}"
    differing = [d["message"] for d in c["differences"]] + ([c["failed"]] if c["failed"] else [])
    text = differing or [f"equal to its plan, in {c['seconds']:.1f} s"]
    if c["rank_count"] > 1:
        text = [f"its {c['rank_count']:,} ranks: {c['ranks']}", *text]
    recorded = c["recorded"] or {"collectives": [], "state_bytes": 0, "peak_bytes": 0}
    there = {(r["op"], r["axis"]): r for r in recorded["collectives"]}
    rows = []
    for p in c["predicted"]["collectives"]:
        r = there.pop((p["op"], p["axis"]), {"count": 0, "bytes": 0})
        rows.append((p["op"], p["axis"], f"{p['count']:,}", f"{r['count']:,}", f"{p['bytes']:,}", f"{r['bytes']:,}"))
    rows += [(r["op"], r["axis"], "0", f"{r['count']:,}", "0", f"{r['bytes']:,}") for r in there.values()]
    held = [
        (what, f"{c['predicted'][key]:,}", f"{recorded[key]:,}")
        for what, key in (("before the step", "state_bytes"), ("peak", "peak_bytes"))
    ]
    names = ("operation", "over", "predicted", "recorded", "bytes predicted", "bytes recorded")
    return [
        Section(f"Collectives of {name}", text=tuple(text), columns=names, rows=rows),
        Section(f"Memory of rank {c['rank']}", columns=("bytes", "predicted", "recorded"), rows=held),
    ]
