"""`phalanx predict`: estimate the time, memory and FLOPs of a strategy on a cluster that need not exist here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.observed import observation_in, show_price
from phalanx.cli.options import (
    Batch,
    Cluster,
    Gpus,
    Json,
    Model,
    OptionalStack,
    Precision,
    Seq,
    StackOptionsLine,
    StrategyLine,
)
from phalanx.cli.show import show_notes
from phalanx.cli.terminal import console, exit_on_error, print_json

if TYPE_CHECKING:
    from phalanx.answers.question import Question
    from phalanx.cost.analytic.estimate import Estimate


def predict(
    line: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN.json|CONFIGURATION|OBSERVED.json",
            help="A plan, a run's folder, another framework's configuration (`phalanx read`), or what `phalanx "
            "observe --out` wrote, both with --cluster; without one, name the model and the rest.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    strategy: StrategyLine = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show each term's formula with its numbers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict how long a step takes, how much memory it needs and where the time goes, without running anything."""
    with exit_on_error():
        from phalanx.answers.question import Asked, read
        from phalanx.spec.errors import InputError

        if (seen := observation_in(source, line)) is not None:
            show_price(seen, cluster, as_json, collectives=False)
            return
        asked = Asked(source, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options)
        x = read(asked)
        show_notes(x.notes)
        if x.exact is not None:
            if explain:
                raise InputError("--explain", None, "is about formulas, and this price is exact", "phalanx explain")
            _show_exact(x, as_json)
            return
        prediction = x.estimate
        title = f"{x.about} on {x.gpus} ranks of {x.pricing.cluster.name}: {x.shown}"
        if as_json:
            print_json({"question": x.as_json(), **_as_json(prediction, title)})
            return

        from phalanx.report.predict import bars, explained, figures

        out = console()
        out.print(x.heading, highlight=False, soft_wrap=True)
        out.print(figures(prediction, title))
        out.print(bars(prediction, out.width))
        if explain:
            out.print(explained(prediction))


def _show_exact(x: Question, as_json: bool) -> None:
    """Print what a step of our own runtime takes, priced exactly."""
    from phalanx.planning.explain.exact import ExactExplanation
    from phalanx.planning.explain.exact import as_json as to_json
    from phalanx.report.explain import exact_tables
    from phalanx.report.style import seconds

    assert x.exact is not None
    exact = ExactExplanation(x.exact.chosen, (), x.exact.cluster.device.usable_bytes)
    if as_json:
        priced = to_json(exact)
        del priced["neighbours"]
        print_json({"question": x.as_json(), **priced})
        return
    out = console()
    out.print(x.heading, highlight=False, soft_wrap=True)
    out.print(f"{x.strategy}: {seconds(exact.chosen.seconds)} a step", highlight=False, soft_wrap=True)
    for table in exact_tables(exact):
        out.print(table)


def _as_json(e: Estimate, title: str) -> dict[str, Any]:
    from phalanx.cost.analytic.estimate import compression_payment

    tokens = e.layout.step_tokens
    memory = e.memory
    return {
        "title": title,
        "step_time_s": float(e.seconds),
        "tokens_per_s_per_gpu": float(tokens / e.seconds / e.layout.world),
        "mfu": float(e.mfu),
        "hfu": float(e.hfu),
        "model_flops": float(e.model_flops),
        "six_n_flops": float(6 * e.active_params * tokens),
        "terms_s": {name: float(value) for name, value in e.step.terms.items()},
        "factors": {name: {k: float(v) for k, v in of.items()} for name, of in e.step.of.items()},
        "memory_bytes": {
            "steady": float(memory.steady),
            "peak": float(memory.peak),
            "reserved": float(memory.reserved),
            "shown": float(memory.shown),
            "usable": float(e.allocatable_bytes),
            "terms": {name: float(value) for name, value in memory.terms.items()},
        },
        "compression": None if (compression := compression_payment(e)) is None else asdict(compression),
        "fits": bool(e.fits),
        "origin": "estimated: formulas with constants fitted on published runs",
    }
