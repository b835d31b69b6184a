"""A proof of generation: its steps, what each sends, and what is held, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.answers.runs.verify import collectives
from phalanx.observation.trainer.generation import ProvedStage
from phalanx.planning.tables.table import Column, Sheet, columns
from phalanx.report.measured.verify import live_bytes
from phalanx.report.view import View
from phalanx.serving.proof.proof import ServingProof

_COUNTS = ("requests", "tokens", "passes", "collectives", "FLOP")


def view(p: ServingProof) -> View:
    """Show the result, stage by stage."""
    s = p.strategy
    head = (
        f"{p.model.family} decoder, {p.model.parameter_count:,} parameters in {p.dtype}; {s}: {s.world} ranks, "
        f"{s.dp} x {p.slots} requests of {p.context:,} tokens"
    )
    return View([head, *(part for stage in p.stages for part in _stage(stage, s.world))])


def _stage(stage: ProvedStage, world: int) -> Iterator[str | Sheet]:
    """Yield the steps, the traffic, the memory and the verdict of a stage."""
    covered = f"all {world} ranks" if stage.ranks.count == world else f"{stage.ranks.description}"
    yield f"\nrank {stage.ranks.rank} represents {covered}"
    if stage.failed:
        yield f"NOT proved: {stage.failed}"
        return
    yield _steps(stage)
    totals = {x.name: collectives(x.program.events) for x in stage.steps}
    if any(totals.values()):
        names = (Column("collectives, predicted"), *(Column(f"{name}, bytes") for name in totals))
        rows = []
        for op, axis in dict.fromkeys(key for of_step in totals.values() for key in of_step):
            cells = (of_step.get((op, axis)) for of_step in totals.values())
            rows.append((f"{op} over {axis}", *(f"{c[0]:,}: {c[1]:,}" if c else "" for c in cells)))
        yield Sheet("", names, rows)
    step = stage.steps[0]
    yield live_bytes(
        [
            ("KV cache", step.program.state.cache, step.cache, None),
            ("weights, cache, tables", step.program.state.total, step.state, None),
        ],
        False,
    )
    for x in stage.steps:
        for difference in x.differences:
            yield f"NOT proved: {x.name}: {difference}"
    if stage.proved:
        sent = sum(bool(e.axis) for x in stage.steps for e in x.program.events)
        passes = sum(not e.axis for x in stage.steps for e in x.program.events)
        yield (
            f"proved in {stage.seconds:.1f} s: {sent:,} collectives and {passes:,} passes in order, FLOPs by unit, "
            "and what is held, to the byte"
        )


def _steps(stage: ProvedStage) -> Sheet:
    rows = []
    for x in stage.steps:
        sent = sum(bool(e.axis) for e in x.program.events)
        flops = sum(e.flops for e in x.program.events)
        passes = len(x.program.events) - sent
        rows.append((x.name, len(x.batch.slots), x.batch.tokens, passes, sent, flops))
    return Sheet("", columns("step", *(f"{name} [count]" for name in _COUNTS)), rows)
