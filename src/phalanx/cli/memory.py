"""`phalanx memory`: bytes of a model, of its state and activations, and of a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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

if TYPE_CHECKING:
    from phalanx.answers.question import Asked
    from phalanx.report.pictures.figure import Picture
    from phalanx.spec.model.spec import ModelSpec


def memory(
    line: typer.Context,
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    params: Params = None,
    policy: Annotated[
        int,
        typer.Option(
            "--bytes-per-parameter",
            help="Bytes of state per parameter: 16 (weight 2, gradient 2, master and moments 12), 12, 18 or 20.",
        ),
    ] = 16,
    card: Annotated[float, typer.Option("--card", help="Memory of a GPU in GB.")] = 80.0,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Sequences per micro-batch.")] = 1,
    seq: Seq = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Tabulate the memory of a model's state by level of ZeRO, and of its activations by recomputation, tp and sp.

    Of a plan, or of --model with --cluster, --gpus, --batch, --seq and --strategy: the memory of that strategy.
    """
    with exit_on_error():
        require_drawing(plot)
        asked = (plan, strategy, cluster, gpus, batch, stack, precision, options)
        if any(value is not None for value in asked):
            from phalanx.answers.question import Asked

            if params is not None:
                reason = "is about a strategy, and a number of parameters has no shape to split"
                require_only(line, "params", "policy", "card", reason=reason, remedy="leave it out, or --params")
            require_only(line, *OF_A_STRATEGY, reason="is not about a strategy, whose memory is priced")
            _memory_of(
                Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options),
                as_json,
                as_csv,
                plot,
            )
            return
        from phalanx.planning.tables import textbook

        if params is not None and model is None:
            require_only(line, "params", "policy", "card", reason="is about activations, which need a --model")
        require_positive({"--card": card, "--micro-batch": micro_batch, "--seq": seq})
        spec, count = _sized(model, params)
        sheets = [textbook.state(count, RANKS, policy, card * 1e9)]
        if spec is not None:
            degrees = [t for t in (1, 2, 4, 8, 16) if spec.heads % t == 0]
            sheets.append(textbook.activations(spec, micro_batch, seq or spec.max_seq, degrees))
        sheets += [textbook.kinds(count, policy), textbook.savings(RANKS, policy)]

        def pictures() -> list[Picture]:
            from phalanx.report.gallery.memory import activations_of, memory_wall, parameter_bytes
            from phalanx.report.plots import picture

            drawn = [parameter_bytes(f"{count:.6g}", policy=policy), memory_wall(), picture(sheets[:1], "memory")]
            named = str(model)
            return [*drawn, activations_of(spec, named, micro_batch, seq or spec.max_seq)] if spec else drawn

        print_sheets(sheets, as_json, as_csv, plot, of="memory", pictures=pictures)
        if spec is None:
            announce(f"note: {textbook.FOLLOWS}")


def _memory_of(asked: Asked, as_json: bool, as_csv: bool, plot: Path | None) -> None:
    """Print the memory of a strategy by what occupies it, as `predict` and `explain` have it. Raises InputError."""
    from phalanx.answers.question import read
    from phalanx.planning.explain.exact import ExactExplanation
    from phalanx.planning.tables.memory import sheet

    question = read(asked)
    show_notes(question.notes)
    if question.exact is not None:
        usable = question.exact.cluster.device.usable_bytes
        exact = ExactExplanation(question.exact.chosen, (), usable)
        table = sheet(
            question.exact.strategy, exact.memory_terms, float(exact.chosen.prediction.memory_bytes), usable
        )
    else:
        e = question.estimate
        terms = {name: float(value) for name, value in e.memory.terms.items()}
        table = sheet(question.shown, terms, float(e.memory.reserved), int(e.allocatable_bytes))
    print_sheets([table], as_json, as_csv, plot, question, "memory")


def _sized(model: str | None, params: str | None) -> tuple[ModelSpec | None, float]:
    """Return (model or None, number of parameters). Raises InputError."""
    from phalanx.planning import question
    from phalanx.planning.tables import textbook
    from phalanx.spec.errors import InputError

    if (model is None) == (params is None):
        raise InputError("--model", model, "give either a model or --params")
    if params is not None:
        return None, textbook.counted(params)
    spec, _ = question.model_named(str(model))
    return spec, float(spec.parameter_count)
