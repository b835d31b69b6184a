"""`phalanx explain` and `phalanx lint`: where a strategy's time and memory go, and what is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.options import OF_A_STRATEGY
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import FAILED


@command
def explain(query: Annotated[Query, OF_A_STRATEGY], output: Annotated[Display, "json", "save", "assertions"]) -> None:
    """Show where a strategy's time and memory go, what to change first, and why its neighbours are no better.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    from phalanx.answers import observed

    if (seen := observed.observation_of(query)) is not None:
        output.show(observed.price(seen, query), collectives=True)
        return
    from phalanx.answers.explanation import explanation_of
    from phalanx.answers.question import read

    question = read(query)
    show_notes(question.notes)
    output.show(explanation_of(question))


@command
def lint(query: Annotated[Query, OF_A_STRATEGY], output: Annotated[Display, "json", "save", "strict"]) -> None:
    """Find anti-patterns in a strategy, with numbers and what to do about each; exit code 1 if there are any.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy; or an observed.json, whose program
    is examined, in seconds too with --cluster.
    """
    from phalanx.answers import observed
    from phalanx.answers.findings import findings_about

    seen = observed.observation_of(query)
    findings = findings_about(query) if seen is None else observed.findings(seen, query)
    show_notes(findings.notes)
    output.show(findings)
    if findings.findings:
        raise typer.Exit(FAILED)
