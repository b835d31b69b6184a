"""The proof behind `phalanx serve verify`: prefill and decode of a served model on fake tensors; the steps,
collectives and memory of each stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.answers.machine.this_machine import Announce
from phalanx.answers.runs.verify import collectives
from phalanx.observation.trainer.generation import ProvedStage, verify_generation
from phalanx.planning.lookup import model_named, require_counts
from phalanx.planning.tables.table import Column, Sheet, columns
from phalanx.report.measured.verify import live_bytes
from phalanx.report.view import View
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.job_file import build
from phalanx.spec.job import DType, compute_type
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import SHORT_NAMES
from phalanx.spec.strategy.spec import Strategy, parse

_CHUNK, _PAGE = 512, 16  # the defaults of `phalanx generate`
_MOST_SLOTS = 4096


@dataclass(frozen=True)
class ServingProof:
    """The result of a verification of generation, for each pipeline stage."""

    model: ModelSpec
    strategy: Strategy
    dtype: DType
    slots: int
    context: int
    stages: tuple[ProvedStage, ...]

    @property
    def proved(self) -> bool:
        """Whether the recorded steps of every stage equal the predicted ones."""
        return all(stage.proved for stage in self.stages)


def prove(
    model: str, line: str | None, slots: int, context: int | None, precision: str | None, announce: Announce
) -> ServingProof:
    """Verify prefill and decode of `slots` requests a replica, with `context` tokens each. `line`: a strategy; None:
    one rank. Raises InputError."""
    spec, notes = model_named(model)
    for note in notes:
        announce(f"note: {note}")
    context = min(4096, spec.max_seq) if context is None else context
    require_counts(("batch", slots), ("seq", context))
    if context > spec.max_seq:
        raise InputError("seq", context, f"is longer than the model's context, {spec.max_seq}", "use less")
    if slots > _MOST_SLOTS:
        raise InputError("batch", slots, "is too many requests for one replica", f"at most {_MOST_SLOTS}")
    if precision is not None and precision not in SHORT_NAMES:
        raise InputError("precision", precision, "is not a type to generate in", nearest(precision, SHORT_NAMES))
    dtype = compute_type(SHORT_NAMES[precision or "bf16"], "precision")
    strategy = build(Strategy, parse(line), "strategy") if line else Strategy()
    stages = verify_generation(
        spec,
        strategy,
        dtype,
        slots,
        context,
        _CHUNK,
        _PAGE,
        lambda ranks: announce(
            f"rank {ranks.rank} of {strategy.world} prefills and decodes, on tensors without content"
        ),
    )
    return ServingProof(spec, strategy, dtype, slots, context, stages)


def as_json(p: ServingProof) -> dict[str, Any]:
    """Return the result for `--json`."""
    return {
        **{"proved": p.proved, "strategy": str(p.strategy), "world": p.strategy.world, "precision": p.dtype},
        **{"parameters": p.model.parameter_count, "requests": p.slots, "context": p.context},
        "classes": [
            {
                "rank": stage.ranks.rank,
                "rank_count": stage.ranks.count,
                "ranks": stage.ranks.description,
                "proved": stage.proved,
                "failed": stage.failed or None,
                "seconds": stage.seconds,
                "steps": [
                    {
                        **{"step": step.name, "tokens": step.batch.tokens, "requests": len(step.batch.slots)},
                        "collectives": [
                            {"op": op, "axis": axis, "count": count, "bytes": size}
                            for (op, axis), (count, size) in collectives(step.program.events).items()
                        ],
                        "flops": sum(e.flops for e in step.program.events),
                        "cache_bytes": {"predicted": step.program.state.cache, "recorded": step.cache},
                        "state_bytes": {"predicted": step.program.state.total, "recorded": step.state},
                        "differences": list(map(str, step.differences)),
                    }
                    for step in stage.steps
                ],
            }
            for stage in p.stages
        ],
    }


_COUNTS = ("requests", "tokens", "passes", "collectives", "FLOP")


def view(p: ServingProof) -> View:
    """Return the view of the result, stage by stage."""
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
        for op, axis in dict.fromkeys(key for total in totals.values() for key in total):
            cells = (total.get((op, axis)) for total in totals.values())
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
