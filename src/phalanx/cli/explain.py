"""`phalanx explain` and `phalanx lint`: what a plan's strategy spends, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phalanx.cli.options import Batch, Cluster, Gpus, Line, Model, Plan, Profile, Seq
from phalanx.cli.terminal import FAILED, Json, console, mistakes, print_json

if TYPE_CHECKING:
    from phalanx.plan.explain.analytic import Subject
    from phalanx.plan.explain.exact import Examined, Own
    from phalanx.plan.explain.lint import Examined as Whatever


def explain(
    plan: Plan = None,
    strategy: Line = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Where a strategy's time and memory go, what to change first, and why not its neighbours."""
    with mistakes():
        _require_only_a_plan(plan, {"--model": model, "--cluster": cluster, "--batch": batch, "--seq": seq})
        examined = _of_our_own(plan, strategy, gpus, profile)
        if examined is not None:
            from phalanx.plan.explain.exact import own

            _explain_own(own(examined), as_json)
            return

        x = subject(plan, strategy, model, cluster, gpus, batch, seq, profile)

        from phalanx.plan.explain.explanation import as_json as everything

        if as_json:
            print_json(everything(x))
            return

        from phalanx.report.explain import tables
        from phalanx.report.style import seconds

        out = console()
        out.print(f"{x.strategy}: {seconds(x.seconds)} a step, MFU {x.mfu:.1%}", highlight=False, soft_wrap=True)
        for table in tables(x):
            out.print(table)


def _explain_own(found: Own, as_json: bool) -> None:
    from phalanx.plan.explain.exact import as_json as everything
    from phalanx.report.explain import of_our_own
    from phalanx.report.style import seconds

    if as_json:
        print_json(everything(found))
        return
    out = console()
    out.print(f"{found.chosen.asked}: {seconds(found.chosen.seconds)} a step", highlight=False, soft_wrap=True)
    for table in of_our_own(found):
        out.print(table)


def _of_our_own(path: Path | None, line: str | None, gpus: int | None, profile: str | None) -> Examined | None:
    """The strategy of a plan of a job whose machine was measured, priced exactly; None where it is another plan."""
    from phalanx.plan.explain.exact import examined
    from phalanx.plan.search.column_pricing import published
    from phalanx.spec.files import plan as plans
    from phalanx.spec.files.job_file import make_strategy

    if path is None or profile is not None:
        return None
    given = plans.read(path / "plan.json" if path.is_dir() else path)
    return None if published(given.cluster) else examined(given, make_strategy(line) if line else None, gpus)


def lint(
    plan: Plan = None,
    strategy: Line = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Find anti-patterns in a strategy, with numbers and mends; exit code 1 where there are any."""
    with mistakes():
        _require_only_a_plan(plan, {"--model": model, "--cluster": cluster, "--batch": batch, "--seq": seq})
        from dataclasses import asdict

        from phalanx.plan.explain.lint import lint as found_in

        x: Whatever = _of_our_own(plan, strategy, gpus, profile) or subject(
            plan, strategy, model, cluster, gpus, batch, seq, profile
        )
        found = found_in(x)
        if as_json:
            print_json({"strategy": str(x.strategy), "findings": [asdict(f) for f in found]})
        else:
            for f in found:
                print(f"{f.name}: {f.said}; {f.mend}")
            count = f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "nothing found"
            print(f"{x.strategy}: {count}")
        if found:
            raise typer.Exit(FAILED)


def _require_only_a_plan(plan: Path | None, others: dict[str, object]) -> None:
    """Refuse what a plan, where there is one, says already. Raises InputError."""
    from phalanx.spec.errors import InputError

    for name, given in others.items():
        if plan is not None and given is not None:
            raise InputError(name, given, "a plan.json has its own", "leave it out, or plan anew")


def subject(
    plan: Path | None,
    line: str | None,
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    seq: int | None,
    stack: str | None,
) -> Subject:
    """What a plan, or names and numbers, ask about. Raises InputError."""
    from dataclasses import replace

    from phalanx.plan import question
    from phalanx.plan.explain.analytic import Subject
    from phalanx.spec.errors import InputError
    from phalanx.spec.files import plan as plans
    from phalanx.spec.files.job_file import make_strategy

    _require_only_a_plan(plan, {"--model": model, "--cluster": cluster, "--batch": batch, "--seq": seq})
    if plan is not None:
        given = plans.read(plan / "plan.json" if plan.is_dir() else plan)
        chosen = make_strategy(line) if line else given.strategy
        assert chosen is not None
        if gpus is not None:
            question.require_counts(("--gpus", gpus))
        name = stack or str(given.choices.get("stack", "phalanx"))
        return Subject(question.of_plan(given, name), chosen, gpus or given.strategy.world)
    asked = {
        "--model": model,
        "--cluster": cluster,
        "--gpus": gpus,
        "--batch": batch,
        "--seq": seq,
        "--strategy": line,
    }
    missing = [name for name, value in asked.items() if value is None]
    if missing:
        raise InputError(missing[0], None, "is missing", "name a plan.json, or all of " + ", ".join(asked))
    spec, _ = question.model_named(str(model))
    larger = question.asked(
        spec, question.cluster_named(str(cluster)), batch or 0, seq or 0, stack or "megatron-core"
    )
    chosen = make_strategy(str(line))
    assert chosen is not None
    return Subject(larger, replace(chosen), gpus or 0)
