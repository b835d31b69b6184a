"""`phalanx predict`, `explain`, `simulate step`, `lint`, `compare`: a strategy's price, its reasons and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from phalanx.answers.question.query import Query
from phalanx.cli.command import command
from phalanx.cli.options import StepQuery
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import require_writable

OPTIONS = """
--lengths SOURCE+WAY: Lengths of documents: lognormal:1200,1.1 (mean, sigma) or a FILE, one a line; +padded,
    +longest (of the micro-batch), +packed: how they become sequences; +balanced: dealt by cost;
    +dynamic: each on as many ranks as hold it.
"""

if TYPE_CHECKING:
    from phalanx.answers.answer import Answer
    from phalanx.answers.question.question import Question


@command
def predict(
    query: StepQuery,
    output: Annotated[Display, "json", "save", "strict", "assertions"],
    lengths: str | None = None,
    tokens: str | None = None,
    rates: str | None = None,
) -> None:
    """Predict how long a step takes, how much memory it needs and where the time goes, without running anything.

    Name a plan, a run's folder, another framework's configuration with --cluster (`phalanx read`), what `phalanx
    observe --out` wrote with --cluster, or --model, --cluster, --gpus, --batch, --seq and --strategy.

    --tokens 300B|optimal: Tokens of the whole training, for days and cost; by default the file's own.
    """
    from phalanx.answers.prediction import with_expense

    asked = bool(lengths or tokens or rates)
    _show(query, output, lambda question: with_expense(question, lengths, tokens, rates), asked)


@command
def explain(query: StepQuery, output: Annotated[Display, "json", "save", "assertions"]) -> None:
    """Show where a strategy's time and memory go, what to change first, and why its neighbours are no better.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    from phalanx.answers.explanation import explanation_of

    _show(query, output, explanation_of, collectives=True)


@command
def simulate_step(
    query: StepQuery,
    output: Annotated[Display, "json", "save", "assertions"],
    slow: str = "",
    slow_link: str = "",
    kill: str = "",
    jitter: str = "0",
    lengths: str | None = None,
    neighbour: list[str] | None = None,
    on: str = "",
    seed: int = 0,
    trace: Path | None = None,
    ranks: str = "",
) -> None:
    """Run a strategy's step with slow ranks, slow links, a kill, sequences of unequal lengths or other jobs on its
    links: how much longer it takes, who waits for whom.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.

    --slow rank=37:1.3,node=4:1.1: Ranks, or all ranks of nodes, and how many times as long they take.
    --slow-link nic=37:0.5,node=4:0.5,tier=NAME:0.5: A rank's port, all links of a node or a tier, and the share of
        their rate that they have.
    --kill rank=37@40%|node=4@2.5s: A process or a node that dies in the step: what each kind of restart costs.
    --jitter 2%: How much each rank's time varies from step to step.
    --neighbour plan.json@8-15: Another job on the same cluster, with its GPUs, else the next ones; repeatable.
    --on 0-7,16-23: This job's GPUs among others, in the order of its ranks.
    --seed: Which variations to draw.
    --trace FILE.json: Write what ranks do as a trace for Perfetto and chrome://tracing.
    --ranks 0-7,37: Ranks of the trace; by default one of each class, the smallest classes first.
    """
    from phalanx.answers.question.resolution import read
    from phalanx.answers.simulation import Simulation, alone_answer
    from phalanx.spec.errors import InputError

    require_writable("--trace", trace)
    if ranks and trace is None:
        raise InputError("ranks", ranks, "belong to a trace", "name its file: --trace step.json")
    question = read(query)
    alone = alone_answer(question, slow, slow_link, kill, jitter, seed, lengths, on, neighbour or ())
    if alone is not None:
        if trace is not None:
            raise InputError("trace", trace, "is of slow ranks and links alone", "leave it out")
        output.show(alone)
        return
    run = Simulation(question, slow, slow_link, jitter, seed, kill)
    if trace is not None:
        from phalanx.report.simulation import write_trace

        write_trace(trace, run.timelines(ranks), run.strategy)
    output.show(run.answer)


def _show(
    query: Query, output: Display, answer: Callable[[Question], Answer], asked: bool = False, **of_observed: bool
) -> None:
    """Show the answer about a question's strategy, or the price of an observed program. `asked`: whether lengths or
    expenses were asked for, which only strategies have."""
    from phalanx.answers.question.resolution import read

    if not asked and query.source is not None:
        from phalanx.answers import observed  # takes a moment to import

        if (seen := observed.observation_of(query)) is not None:
            output.show(observed.price(seen, query), **of_observed)
            return
    question = read(query)
    show_notes(question.notes)
    output.show(answer(question), **({"expense": True} if asked else {}))


@command
def lint(query: StepQuery, output: Annotated[Display, "json", "save", "strict"]) -> None:
    """Find anti-patterns in a strategy, with numbers and what to do about each; exit code 1 if there are any.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy; or an observed.json, whose program
    is examined, in seconds too with --cluster.
    """
    from phalanx.answers import observed
    from phalanx.answers.findings import lint as look

    seen = observed.observation_of(query)
    findings = look(query) if seen is None else observed.findings(seen, query)
    output.show(findings, failed=bool(findings.findings))


_SHARED = ("model", "cluster", "gpus", "batch", "seq", "stack", "precision", "options", "calibration", "changes")


@command
def compare(
    sides: list[str],
    query: Annotated[Query, _SHARED],
    output: Annotated[Display, "json", "save", "assertions"],
    rates: str | None = None,
) -> None:
    """Compare plans, configurations or strategies: time by term, memory by part, and the settings that differ.

    A strategy is that of the first plan's question, or of --model, --cluster, --gpus, --batch and --seq. Of an
    observed program and a plan: where its step differs, in collectives, bytes, FLOPs and memory.

    sides A B [C]: Plans, runs' folders, configurations of other frameworks, or strategies such as tp=8,zero=1; or an
        observed.json and a plan.
    """
    from phalanx.answers import observed
    from phalanx.answers.compare import comparison_of
    from phalanx.spec.errors import InputError

    seen = [observed.observation_of(Query(name)) for name in sides]
    if not any(seen):
        output.show(comparison_of(sides, query, rates), expense=rates is not None)
        return
    if len(sides) != 2 or seen[0] is None or seen[1] is not None:
        reason = "an observed program is compared with one plan"
        raise InputError("compare", ", ".join(sides), reason, "phalanx compare observed.json plan.json")
    differences = observed.compare(seen[0], Path(sides[1]))
    output.show(differences, failed=bool(differences))
