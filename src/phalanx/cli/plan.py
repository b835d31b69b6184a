"""`phalanx plan`: the fastest strategy of a job on its cluster, or of all legal ones for a model on any cluster.

phalanx plan JOB.toml                                                  priced exactly, for our own runtime
phalanx plan --model M --cluster C --gpus N --batch B --seq S          estimated, for any stack
phalanx plan --from run.sh --cluster C                                 what to change in a configuration
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from phalanx.answers.question.query import Query
from phalanx.cli.command import command, require_only
from phalanx.cli.forms import forms, has_option
from phalanx.cli.options import QUERY_TYPES
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import announce, require_writable
from phalanx.spec.errors import InputError

OPTIONS = """
--headroom: Share of a device's memory that a strategy must leave free.
--out: File to write the plan to.
"""


_HEADROOM = 0.05
_SEARCH_FIELDS = tuple(name for name in QUERY_TYPES if name not in ("source", "options"))


def _form(words: Sequence[str]) -> str:
    if has_option(words, "--from"):
        return "improve"
    # A misspelt --model is answered with the options of the form that was meant.
    misspelt = has_option(words, "--cluster", "--seq") and not any(word.endswith(".toml") for word in words)
    return "model" if has_option(words, "--model") or misspelt else "job"


@command
def plan_model(
    line: typer.Context,
    query: Annotated[Query, _SEARCH_FIELDS, "options"],
    output: Annotated[Display, "json", "save", "assertions"],
    tokens: str | None = None,
    price: float | None = None,
    rates: str | None = None,
    objective: str = "throughput",
    deadline: float | None = None,
    lengths: str | None = None,
    goodput: bool = False,
    conditions: str | None = None,
    headroom: float = _HEADROOM,
    more: bool = False,
    out: Path = Path("plan.json"),
) -> None:
    """Find the fastest strategy for a --model on a --cluster that need not exist here; --stack all asks every stack.

    The result is written as a plan, which `train`, `verify`, `explain`, `lint` and `export` read.

    --tokens 300B|2e12|optimal: Tokens of the whole training, to estimate days and GPU-hours; optimal: 20 per active
        parameter.
    --price: Price of a GPU-hour, in place of the published one of its chip.
    --objective: What to optimise: throughput or days (the shortest step), gpu-hours, money, energy or carbon
        (also on half of the GPUs, a quarter, ...), or memory (the most left free by strategies within 10 % of the
        fastest).
    --deadline DAYS: Days that the --tokens may take at most.
    --lengths SOURCE+WAY: Lengths of documents, as phalanx predict takes them, such as lognormal:1200,1.1+packed: the
        fastest candidates are weighed by the tokens that they train.
    --goodput: Take failures, restarts and saves into the days (docs/goodput.md): a layout that loses less may win.
    --conditions LINE: What --goodput assumes, by the options of phalanx simulate goodput, such as 'restart=job,
        storage=nas, spares=4, elastic'.
    --more: Show all tables: the best, each family, the rejected ones, and the whole Pareto front of time and memory,
        up to 1.5 times the shortest step.
    """
    from phalanx.answers.search.model_plan import model_plan
    from phalanx.answers.search.stack_comparison import compare_stacks
    from phalanx.answers.search.wishes import Wishes

    if query.stack == "all":
        reason = "needs a single stack, and --stack all only compares steps"
        require_only(line, *_SEARCH_FIELDS, "headroom", reason=reason)
        answer = compare_stacks(query, headroom)
        output.show(answer)
        announce(f"no plan is written; --stack {answer.stacks[0].stack} writes the fastest")
        return
    require_writable("--out", out)
    losses = None
    if goodput:  # a vertical: named
        losses = import_module("phalanx.reliability.losses").losses_under(conditions or "")
    elif conditions is not None:
        raise InputError("conditions", conditions, "is about failures", "add --goodput")
    wishes = Wishes(objective, tokens, price, deadline, headroom, more, lengths, losses, rates)
    result = model_plan(query, wishes, announce)
    result.save(out)
    announce(f"plan: {out}")
    from phalanx.answers.configurations.export import why_not_exported

    if refused := why_not_exported(result.plan, result.question.stack):
        announce(f"phalanx export would not write it: {refused}")
    output.show(result, more=more, out=str(out))


@command
def plan_job(
    job: Path,
    output: Annotated[Display, "json", "save", "assertions"],
    strategy: str | None = None,
    overrides: list[str] | None = None,
    more: bool = False,
    calibration: Path | None = None,
    rates: str | None = None,
    out: Path = Path("plan.json"),
) -> None:
    """Find the fastest strategy for a JOB.toml on its own cluster, priced exactly as our own runtime runs it.

    --more: Show which transport and algorithm serve which collective.
    """
    from phalanx.answers.plan import decide, job_plan, with_strategy
    from phalanx.planning.expense.rates import read_rates
    from phalanx.spec.files import job_file
    from phalanx.spec.files import plan as plans

    require_writable("--out", out)
    read_rates(rates)
    file = with_strategy(job_file.load(job, overrides or ()), strategy)
    show_notes(file.notes)
    decision = decide(file, announce=announce, calibration=calibration)
    if not decision.chosen.reason:
        plans.write(decision.plan, out)
        announce(f"plan: {out}")
    output.show(job_plan(decision, rates), choices=more)


@command
def improve(
    query: Annotated[Query, _SEARCH_FIELDS],
    output: Annotated[Display, "json", "strict", "assertions"],
    sources: list[Path],
    tries: str | None = None,
    tokens: str | None = None,
    rates: str | None = None,
    headroom: float = _HEADROOM,
    out: Path = Path("plan.json"),
) -> None:
    """Find what to change in another framework's configuration (--from FILE) or an observed program, and what each
    change brings.

    sources --from FILE: Another framework's configuration (phalanx read): find what to change in it, and what each
        change brings; or an observed.json. Repeat it for files that belong together.
    tries --try LINE: Search nothing: price the file with each of these changes alone, such as 'fp8, zero=1,
        seq=32768, gpus=256, chip=b200'; + joins changes. No plan is written.
    --tokens 300B: Tokens of the whole training; by default the file's own.
    """
    from phalanx.answers import observed
    from phalanx.answers.configurations.improve import improvement_of
    from phalanx.answers.search.wishes import Wishes
    from phalanx.frameworks.reading.source import split_function

    if gone := next((str(path) for path in sources if not split_function(path)[0].exists()), ""):
        raise InputError("file", gone, "no such file")
    source, *more = sources
    query = replace(query, files=tuple(more))
    if tries is not None:
        from phalanx.answers.configurations.tries import try_changes

        output.show(try_changes(replace(query, source=source), tries, rates, tokens))
        return
    require_writable("--out", out)
    if (seen := observed.observation_of(Query(source))) is not None:
        for name, value in (("tokens", tokens), ("rates", rates)):
            if value is not None:
                reason = "is of a configuration, and this is an observed program"
                raise InputError(name, value, reason, "leave it out")
        better = observed.improve(seen, query, Wishes(headroom=headroom))
        if better.better is not None:
            better.better.save(out)
            announce(f"plan: {out}")
        output.show(better)
        return
    answer = improvement_of(source, query, headroom, tokens, rates)
    if answer.plan is not None:
        from phalanx.spec.files import plan as plans

        plans.write(answer.plan, out)
        announce(f"plan: {out}")
    output.show(answer)


plan = forms(
    "Find the fastest strategy for a job on its cluster, or for a model on a cluster that need not exist here.",
    _form,
    model=plan_model,
    job=plan_job,
    improve=improve,
)
