"""`phalanx comm`: what a strategy sends, and what an all-reduce of gradients costs."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.observed import observation_in, show_price
from phalanx.cli.options import (
    Batch,
    Cluster,
    Csv,
    Gpus,
    Json,
    Model,
    OptionalStack,
    Params,
    Plan,
    Plot,
    Precision,
    Seq,
    StackOptionsLine,
    StrategyLine,
)
from phalanx.cli.show import show_notes
from phalanx.cli.tables import OF_A_STRATEGY, RANKS, print_sheets, require_positive
from phalanx.cli.terminal import announce, exit_on_error, require_drawing
from phalanx.cli.unread import require_only


def comm(
    line: typer.Context,
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    params: Params = None,
    rate: Annotated[
        float, typer.Option("--rate", help="Bandwidth of a rank in one direction, in GB/s, with --params.")
    ] = 25.0,
    beside: Annotated[
        float | None,
        typer.Option("--beside", metavar="SECONDS", help="Put --params beside so many seconds of computing a step."),
    ] = None,
    top_k: Annotated[
        float | None,
        typer.Option("--top-k", metavar="SHARE", help="Of --params, send the largest share of gradients alone."),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Tabulate what each mesh axis of a strategy sends: payload, bytes by tier, time, and whether it is hidden.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy, or --params alone.
    """
    with exit_on_error():
        from phalanx.spec.errors import InputError

        require_drawing(plot)
        if params is not None:
            from phalanx.planning.tables import textbook

            reason = "is about a strategy, and a number of parameters has no shape to split"
            remedy = "leave it out, or --params"
            require_only(line, "params", "rate", "beside", "top_k", reason=reason, remedy=remedy)
            require_positive({"--rate": rate, "--beside": beside, "--top-k": top_k})
            about = {"--model": model, "--cluster": cluster, "--gpus": gpus, "--strategy": strategy}
            for name, given in about.items():
                if given is not None:
                    raise InputError(name, given, "is not read with --params", "leave it out; --rate sets the links")
            if top_k is not None and top_k > 1:
                raise InputError("--top-k", top_k, "is more than all", "use a share such as 0.01")
            count = textbook.counted(params)
            sheets = [textbook.gradient_traffic(count, RANKS, rate * 1e9)]
            sheets += [] if beside is None else [textbook.beside(count, RANKS, rate * 1e9, beside)]
            sheets += [] if top_k is None else [textbook.top_k(count, RANKS, top_k)]
            print_sheets(sheets, as_json, as_csv, plot, of="comm")
            announce(f"note: {textbook.FOLLOWS}")
            return

        reason = "is about gradients of a number of parameters"
        require_only(line, *OF_A_STRATEGY, reason=reason, remedy="add --params 7B")
        if (seen := observation_in(plan, line)) is not None:
            show_price(seen, cluster, as_json, collectives=True)
            return

        from phalanx.answers.question import Asked, read
        from phalanx.planning.tables.communication import exact_sheet, sheet

        asked = read(Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options))
        show_notes(asked.notes)
        table = exact_sheet(asked.exact) if asked.exact is not None else sheet(asked.subject)
        print_sheets([table], as_json, as_csv, plot, asked, "comm")
