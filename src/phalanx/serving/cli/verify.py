"""`phalanx serve verify`: prove that generation does what is predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import Json, Precision, Seq, StrategyLine
from phalanx.cli.terminal import FAILED, announce, console, exit_on_error, print_json, require_torch
from phalanx.serving.cli.options import Model

if TYPE_CHECKING:
    from phalanx.serving.proof.proof import ServingProof


def verify(
    model: Model,
    strategy: StrategyLine = None,
    requests: Annotated[int, typer.Option("--batch", help="Requests of a replica.")] = 16,
    context: Seq = None,
    precision: Precision = None,
    as_json: Json = False,
) -> None:
    """Run the real prefill and decode of each class of ranks on fake tensors, and compare them with the predicted
    steps."""
    with exit_on_error():
        require_torch()
        from phalanx.serving.proof.proof import as_json as to_json
        from phalanx.serving.proof.proof import prove

        result = prove(model, strategy, requests, context, precision, announce)
        if as_json:
            print_json(to_json(result))
        else:
            _show(result)
        if not result.proved:
            raise typer.Exit(FAILED)


def _show(p: ServingProof) -> None:
    """Print the result, stage by stage."""
    from phalanx.answers.verify import collectives
    from phalanx.report.verify import memory
    from phalanx.serving.proof.report import steps, traffic

    out, s = console(), p.strategy
    out.print(
        f"{p.model.family} decoder, {p.model.parameter_count:,} parameters in {p.dtype}; {s}: {s.world} ranks, "
        f"{s.dp} x {p.slots} requests of {p.context:,} tokens",
        highlight=False,
        soft_wrap=True,
    )
    for stage in p.stages:
        covered = f"all {s.world} ranks" if stage.ranks.count == s.world else f"{stage.ranks.description}"
        print(f"\nrank {stage.ranks.rank} stands for {covered}")
        if stage.failed:
            print(f"NOT proved: {stage.failed}")
            continue
        out.print(steps([(x.name, len(x.batch.slots), x.batch.tokens, x.program.events) for x in stage.steps]))
        totals = {x.name: collectives(x.program.events) for x in stage.steps}
        if any(totals.values()):
            out.print(traffic(totals))
        step = stage.steps[0]
        rows: list[tuple[str, int, int | None, int | None]] = [
            ("KV cache", step.program.state.cache, step.cache, None),
            ("weights, cache, tables", step.program.state.total, step.state, None),
        ]
        out.print(memory(rows, False))
        for x in stage.steps:
            for difference in x.differences:
                print(f"NOT proved: {x.name}: {difference}")
        if stage.proved:
            sent = sum(bool(e.axis) for x in stage.steps for e in x.program.events)
            passes = sum(not e.axis for x in stage.steps for e in x.program.events)
            print(
                f"proved in {stage.seconds:.1f} s: {sent:,} collectives and {passes:,} passes in order, FLOPs by "
                "unit, and what is held, to the byte"
            )
