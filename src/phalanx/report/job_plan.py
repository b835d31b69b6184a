"""A job's plan: the chosen strategy among its alternatives, its buckets, chunks and collectives."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.answers.plan import JobPlan
from phalanx.planning.auto.bucket_size import GIVEN
from phalanx.planning.tables.table import Sheet, Unit, columns
from phalanx.report.pipeline import chunk_table
from phalanx.report.view import View
from phalanx.spec.byte_sizes import write_bytes

_AXES = ("tp", "cp", "ep", "pp")


def view(p: JobPlan, choices: bool = False, rows: int = 10) -> View:
    """Show the fastest `rows` candidates; `choices`: with what serves which collective."""
    plan = p.plan
    cluster = f"{plan.cluster.name}: {plan.cluster.ranks} x {plan.cluster.device.name}"
    head = (
        f"{plan.model.family} decoder, {plan.model.parameter_count:,} parameters; {cluster}, rates "
        f"{plan.choices['rates_origin']}"
    )
    parts: list[str | Sheet] = [head, _alternatives(p, rows)]
    parts += [_searched(p)] if p.worlds else []
    if p.bucket and p.bucket["reason"] != GIVEN:
        parts.append(f"buckets of {write_bytes(p.bucket['bytes'])}: {p.bucket['reason']}")
    if p.chunks:
        parts.append(f"chunks: {p.chunks['reason']}; imbalance {p.chunks['imbalance']:.1%}")
        parts.append(chunk_table(p.chunks["chunks"]))
    if choices:
        parts += _collectives(p)
    return View(parts)


def _alternatives(p: JobPlan, rows: int) -> Sheet:
    """Tabulate the fastest candidates and the fastest of each set of axes; the chosen one is marked."""
    best = str(p.best["strategy"])
    fastest_of_axes = {
        tuple(getattr(c.strategy, axis) > 1 for axis in _AXES): place
        for place, c in reversed(list(enumerate(p.alternatives)))
    }
    shown = [
        c
        for place, c in enumerate(p.alternatives)
        if place < rows or str(c.strategy) == best or place in fastest_of_axes.values()
    ]
    pipelined = any(c.strategy.pp > 1 for c in p.alternatives)
    rejected = any(c.rejected for c in p.alternatives)
    optional: list[tuple[str, Unit] | str] = [("bubble", "share")] if pipelined else []
    optional += ["rejected"] if rejected else []
    names = columns(
        ("strategy", "strategy"),
        ("accum.", "count"),
        ("step", "s"),
        ("tokens/s", "count"),
        ("exposed", "s"),
        ("memory", "bytes"),
        *optional,
    )
    cells = [
        (
            c.strategy,
            c.micro_batches,
            c.step_time_s,
            round(c.tokens_per_s),
            c.exposed_communication_s,
            c.memory_bytes,
            *([c.bubble_share] if pipelined else []),
            *([c.rejected] if rejected else []),
        )
        for c in shown
    ]
    hidden = len(p.alternatives) - len(shown)
    note = "exposed: communication that nothing hides" + (f"; {hidden} more not shown" if hidden else "")
    marked = next((place for place, c in enumerate(shown) if str(c.strategy) == best), None)
    return Sheet("strategies, predicted", names, cells, note, marked=marked, charted=False)


def _searched(p: JobPlan) -> str:
    """Say in one line what was searched."""
    *smaller, largest = p.worlds
    last = f"{largest} rank" if largest == 1 else f"{largest} ranks"
    over = " or ".join(filter(None, [", ".join(map(str, smaller)), last]))
    others = "no other promises to be faster" if p.exhaustive else "the others are slower, or do not fit, by estimate"
    priced = f"{p.strategies_priced_one_by_one} priced one by one"
    return f"{p.strategies_evaluated:,} legal strategies over {over}: {priced}, {others}"


def _collectives(p: JobPlan) -> Iterator[str]:
    """Yield which transport and algorithm serve which collective, by size."""
    from phalanx.report.collectives import choices

    decided = p.plan.collectives
    for op, ranks, hosts in dict.fromkeys((c.op, c.group_size, c.hosts) for c in decided):
        yield f"{op} over {ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
        for line in choices([c for c in decided if (c.op, c.group_size, c.hosts) == (op, ranks, hosts)]):
            yield f"  {line}"
    if not decided:
        yield "collectives: those of torch.distributed; no other was measured on this cluster"
