"""`phalanx explain` and `phalanx lint`: where a strategy's time and memory go, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from phalanx.cli.observed import observation_in, show_lint, show_price
from phalanx.cli.options import (
    Batch,
    Cluster,
    Gpus,
    Json,
    Model,
    OptionalStack,
    Plan,
    Precision,
    Seq,
    StackOptionsLine,
    StrategyLine,
)
from phalanx.cli.show import show_notes
from phalanx.cli.terminal import FAILED, console, exit_on_error, print_json

if TYPE_CHECKING:
    from phalanx.answers.question import Question
    from phalanx.planning.explain.exact import ExactExplanation
    from phalanx.planning.explain.lint import Finding
    from phalanx.planning.explain.lint import LintSubject as Lintable


def explain(
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
    as_json: Json = False,
) -> None:
    """Show where a strategy's time and memory go, what to change first, and why its neighbours are no better.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    with exit_on_error():
        if (seen := observation_in(plan, line)) is not None:
            show_price(seen, cluster, as_json, collectives=True)
            return

        from phalanx.answers.question import Asked, read

        asked = read(Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options))
        show_notes(asked.notes)
        if asked.exact is not None:
            from phalanx.planning.explain.exact import explain_exactly

            _explain_exact(asked, explain_exactly(asked.exact), as_json)
            return

        from phalanx.planning.explain.explanation import as_json as to_json

        x = asked.subject
        if as_json:
            print_json({"question": asked.as_json(), **to_json(x)})
            return

        from phalanx.report.explain import tables
        from phalanx.report.style import seconds

        out = console()
        out.print(asked.heading, highlight=False, soft_wrap=True)
        out.print(f"{x.shown}: {seconds(x.seconds)} a step, MFU {x.mfu:.1%}", highlight=False, soft_wrap=True)
        for table in tables(x):
            out.print(table)


def _explain_exact(asked: Question, exact: ExactExplanation, as_json: bool) -> None:
    """Print the exact price of a strategy on our own runtime."""
    from phalanx.planning.explain.exact import as_json as to_json
    from phalanx.report.explain import exact_tables
    from phalanx.report.style import seconds

    if as_json:
        print_json({"question": asked.as_json(), **to_json(exact)})
        return
    out = console()
    out.print(asked.heading, highlight=False, soft_wrap=True)
    out.print(f"{exact.chosen.as_requested}: {seconds(exact.chosen.seconds)} a step", highlight=False, soft_wrap=True)
    for table in exact_tables(exact):
        out.print(table)


def _show_mistakes(mistakes: list[Finding], as_json: bool) -> None:
    """Print the mistakes of a configuration that nobody asked to price."""
    from dataclasses import asdict

    if as_json:
        print_json({"findings": [asdict(f) for f in mistakes]})
    else:
        for f in mistakes:
            print(f"{f.name}: {f.problem}; {f.remedy}")
        if not mistakes:
            print("nothing found in the file; --cluster looks at the strategy too")
    if mistakes:
        raise typer.Exit(FAILED)


def lint(
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
    as_json: Json = False,
) -> None:
    """Find anti-patterns in a strategy, with numbers and what to do about each; exit code 1 if there are any.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy; or an observed.json, of which it finds
    those of the program, in seconds too with --cluster.
    """
    with exit_on_error():
        if (seen := observation_in(plan, line)) is not None:
            show_lint(seen, cluster, as_json)
            return
        from dataclasses import asdict

        from phalanx.answers.question import Asked, read
        from phalanx.answers.read import findings_in, is_configuration
        from phalanx.planning.explain.lint import lint as findings_of

        mistakes = findings_in(plan, gpus) if plan is not None else []
        if cluster is None and plan is not None and is_configuration(plan):
            _show_mistakes(mistakes, as_json)
            return
        asked = read(Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options))
        show_notes(asked.notes)
        x: Lintable = asked.exact or asked.lintable
        findings = [*mistakes, *findings_of(x)]
        if as_json:
            print_json(
                {"question": asked.as_json(), "strategy": str(x.strategy), "findings": [asdict(f) for f in findings]}
            )
        else:
            print(asked.heading)
            for f in findings:
                print(f"{f.name}: {f.problem}; {f.remedy}")
            count = f"{len(findings)} finding{'s' * (len(findings) > 1)}" if findings else "nothing found"
            print(f"{x.strategy}: {count}")
        if findings:
            raise typer.Exit(FAILED)
