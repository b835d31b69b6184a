"""`phalanx explain` and `phalanx lint`: where a strategy's time and memory go, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phalanx.cli.observed import observation_in, show_lint, show_price
from phalanx.cli.options import Batch, Cluster, Gpus, Json, Model, OptionalStack, Plan, Seq, StrategyLine
from phalanx.cli.terminal import FAILED, console, exit_on_error, print_json

if TYPE_CHECKING:
    from phalanx.plan.explain.analytic import AnalyticSubject
    from phalanx.plan.explain.exact import ExactExplanation, ExactSubject
    from phalanx.plan.explain.lint import LintSubject as Lintable


def explain(
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    profile: OptionalStack = None,
    as_json: Json = False,
) -> None:
    """Show where a strategy's time and memory go, what to change first, and why its neighbours are no better.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    with exit_on_error():
        if (seen := observation_in(plan)) is not None:
            show_price(seen, cluster, as_json, collectives=True)
            return
        _require_only_a_plan(plan, {"--model": model, "--cluster": cluster, "--batch": batch, "--seq": seq})
        exact_subject = _exact_subject(plan, strategy, gpus, profile)
        if exact_subject is not None:
            from phalanx.plan.explain.exact import explain_exactly

            _explain_exact(explain_exactly(exact_subject), as_json)
            return

        x = subject(plan, strategy, model, cluster, gpus, batch, seq, profile)

        from phalanx.plan.explain.explanation import as_json as to_json

        if as_json:
            print_json(to_json(x))
            return

        from phalanx.report.explain import tables
        from phalanx.report.style import seconds

        out = console()
        out.print(f"{x.strategy}: {seconds(x.seconds)} a step, MFU {x.mfu:.1%}", highlight=False, soft_wrap=True)
        for table in tables(x):
            out.print(table)


def _explain_exact(exact: ExactExplanation, as_json: bool) -> None:
    """Print the exact price of a strategy on our own runtime."""
    from phalanx.plan.explain.exact import as_json as to_json
    from phalanx.report.explain import exact_tables
    from phalanx.report.style import seconds

    if as_json:
        print_json(to_json(exact))
        return
    out = console()
    out.print(f"{exact.chosen.as_requested}: {seconds(exact.chosen.seconds)} a step", highlight=False, soft_wrap=True)
    for table in exact_tables(exact):
        out.print(table)


def _exact_subject(path: Path | None, line: str | None, gpus: int | None, profile: str | None) -> ExactSubject | None:
    """Price the strategy of a plan exactly, if it plans a job on a measured machine; else return None.

    `line` replaces the plan's strategy. Raises InputError.
    """
    from phalanx.plan.explain.exact import subject_of_plan
    from phalanx.plan.search.column_pricing import published
    from phalanx.spec.files import plan as plans
    from phalanx.spec.files.job_file import make_strategy

    if path is None or profile is not None:
        return None
    saved = plans.read(path / "plan.json" if path.is_dir() else path)
    return None if published(saved.cluster) else subject_of_plan(saved, make_strategy(line) if line else None, gpus)


def lint(
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    profile: OptionalStack = None,
    as_json: Json = False,
) -> None:
    """Find anti-patterns in a strategy, with numbers and what to do about each; exit code 1 if there are any.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy; or an observed.json, of which it finds
    those of the program, in seconds too with --cluster.
    """
    with exit_on_error():
        if (seen := observation_in(plan)) is not None:
            others = {"--model": model, "--strategy": strategy, "--gpus": gpus, "--batch": batch, "--seq": seq}
            show_lint(seen, cluster, {**others, "--stack": profile}, as_json)
            return
        _require_only_a_plan(plan, {"--model": model, "--cluster": cluster, "--batch": batch, "--seq": seq})
        from dataclasses import asdict

        from phalanx.plan.explain.lint import lint as findings_of

        x: Lintable = _exact_subject(plan, strategy, gpus, profile) or subject(
            plan, strategy, model, cluster, gpus, batch, seq, profile
        )
        findings = findings_of(x)
        if as_json:
            print_json({"strategy": str(x.strategy), "findings": [asdict(f) for f in findings]})
        else:
            for f in findings:
                print(f"{f.name}: {f.problem}; {f.remedy}")
            count = f"{len(findings)} finding{'s' * (len(findings) > 1)}" if findings else "nothing found"
            print(f"{x.strategy}: {count}")
        if findings:
            raise typer.Exit(FAILED)


def _require_only_a_plan(plan: Path | None, others: dict[str, object]) -> None:
    """Refuse options whose values a plan already has. Raises InputError."""
    from phalanx.spec.errors import InputError

    for name, value in others.items():
        if plan is not None and value is not None:
            raise InputError(name, value, "is already set by the plan.json", "leave it out, or make a new plan")


def subject(
    plan: Path | None,
    line: str | None,
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    seq: int | None,
    stack: str | None,
) -> AnalyticSubject:
    """Return the strategy to examine with its pricing, from a plan or from the options. Raises InputError."""
    from dataclasses import replace

    from phalanx.plan import question
    from phalanx.plan.explain.analytic import AnalyticSubject
    from phalanx.spec.errors import InputError
    from phalanx.spec.files import plan as plans
    from phalanx.spec.files.job_file import make_strategy

    _require_only_a_plan(plan, {"--model": model, "--cluster": cluster, "--batch": batch, "--seq": seq})
    if plan is not None:
        saved = plans.read(plan / "plan.json" if plan.is_dir() else plan)
        chosen = make_strategy(line) if line else saved.strategy
        assert chosen is not None
        if gpus is not None:
            question.require_counts(("--gpus", gpus))
        name = stack or str(saved.choices.get("stack", "phalanx"))
        return AnalyticSubject(question.pricing_of_plan(saved, name), chosen, gpus or saved.strategy.world)
    options = {
        "--model": model,
        "--cluster": cluster,
        "--gpus": gpus,
        "--batch": batch,
        "--seq": seq,
        "--strategy": line,
    }
    missing = [name for name, value in options.items() if value is None]
    if missing:
        raise InputError(missing[0], None, "is missing", "name a plan.json, or all of " + ", ".join(options))
    spec, _ = question.model_named(str(model))
    pricing = question.pricing_by_gpus(
        spec, question.cluster_named(str(cluster)), batch or 0, seq or 0, stack or "megatron-core"
    )
    chosen = make_strategy(str(line))
    assert chosen is not None
    return AnalyticSubject(pricing, replace(chosen), gpus or 0)
