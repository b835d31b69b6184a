"""What commands do with an observed.json in place of a plan: price it, tabulate what it sends, compare it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.terminal import FAILED, console, print_json
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.answers.question import Asked
    from phalanx.planning.explain.observed import PricedRank
    from phalanx.schedule.observation import Observation
    from phalanx.spec.files.plan import Plan


def observation_in(path: Path | None, line: typer.Context | None = None) -> Observation | None:
    """Return the observation that a file holds, None where it is something else. Options of a `line` that belong to a
    strategy must not be given beside it. Raises InputError."""
    from phalanx.planning.explain.observed import read

    seen = None if path is None else read(path)
    if seen is not None and line is not None:
        reason = "belongs to a strategy, not to an observed program"
        require_only(line, "plan", "source", "cluster", reason=reason)
    return seen


def show_price(o: Observation, cluster: str | None, as_json: bool, collectives: bool) -> None:
    """Print what an observed step costs on a cluster; with `collectives`, each kind of them. Raises InputError."""
    from phalanx.planning.explain.observed import priced
    from phalanx.planning.question import cluster_named
    from phalanx.report.observed_price import figures, flows
    from phalanx.spec.errors import InputError

    if cluster is None:
        raise InputError("--cluster", None, "is missing", "an observation is priced on one, such as dgx-h100")
    ranks = priced(o, cluster_named(cluster)(o.world))
    if as_json:
        print_json({"program": o.program, "cluster": cluster, "ranks": [_as_json(p) for p in ranks]})
        return
    out = console()
    out.print(f"{o.program}: {o.world} ranks of {cluster}", highlight=False, soft_wrap=True)
    out.print(figures(ranks))
    for table in flows(ranks) if collectives else ():
        out.print(table)
    print(
        "compute: matrix products and attention alone, so at least; what is hidden depends on the program's streams"
    )


def show_lint(o: Observation, cluster: str | None, as_json: bool) -> None:
    """Print what is wrong with an observed program; exit code 1 if anything is. Raises InputError."""
    from phalanx.planning.explain.observed_lint import lint
    from phalanx.planning.question import cluster_named
    from phalanx.report.observe import finding
    from phalanx.report.style import counted

    findings = lint(o, cluster_named(cluster)(o.world) if cluster else None)
    if as_json:
        print_json({"program": o.program, "findings": [asdict(f) for f in findings]})
    else:
        for f in findings:
            print(finding(f))
        print(f"{o.program}: " + (counted(len(findings), "finding") if findings else "nothing found"))
    if findings:
        raise typer.Exit(FAILED)


def show_better(o: Observation, asked: Asked, headroom: float, out: Path, as_json: bool) -> None:
    """Print what would make an observed program faster: what to change in it, with the communication that each costs,
    and with a model, a batch and a sequence length the best strategy of a stack on its ranks. Raises InputError."""
    from phalanx.planning.explain.observed import priced
    from phalanx.planning.explain.observed_lint import lint
    from phalanx.planning.question import cluster_named
    from phalanx.report.observe import finding
    from phalanx.report.observed_price import figures
    from phalanx.spec.errors import InputError

    named = {"--model": asked.model, "--batch": asked.batch, "--seq": asked.seq}
    missing = [name for name, value in named.items() if value is None]
    if 0 < len(missing) < len(named):
        raise InputError(missing[0], None, "is missing", f"name all of {', '.join(named)}, or none")
    cluster = cluster_named(str(asked.cluster))(o.world)
    findings, ranks = lint(o, cluster), priced(o, cluster)
    plan = None if missing else _searched(o, asked, headroom, out)
    if as_json:
        best = None
        if plan is not None:
            best = {"strategy": str(plan.strategy), **plan.prediction, "options": plan.options.changed()}
        rows = [_as_json(p) for p in ranks]
        shown = [asdict(f) for f in findings]
        print_json({"program": o.program, "now": rows, "findings": shown, "better": best})
        return
    screen = console()
    screen.print(figures(ranks))
    for f in findings:
        print(finding(f))
    if not findings:
        print("nothing found in the program itself")
    if plan is None:
        print("with --model, --batch and --seq the strategies of its ranks are searched too")
        return
    from phalanx.report.style import seconds, size

    mesh = ", ".join(f"{axis}={n}" for axis, n in o.axes.items()) or "no named axis"
    p = plan.prediction
    screen.print(
        f"the program's mesh: {mesh}; better under {p['stack']}: {plan.strategy}: "
        f"{seconds(p['step_time_s'])} a step, MFU {p['mfu']:.1%}, {size(p['memory_bytes'])} a GPU, "
        "by fitted formulas (the program's own figures above are bounds)",
        highlight=False,
        soft_wrap=True,
    )


def _searched(o: Observation, asked: Asked, headroom: float, out: Path) -> Plan:
    """Search the strategies of a stack (by default FSDP2 by hand) on a program's ranks, and write the best as a plan.
    Raises InputError."""
    from dataclasses import replace

    from phalanx.answers.priced_plan import plan_of
    from phalanx.answers.question import read
    from phalanx.cli.terminal import announce, require_writable
    from phalanx.planning.search.planner import answer
    from phalanx.spec.files import plan as plans

    require_writable("--out", out)
    question = read(replace(asked, stack=asked.stack or "fsdp2"), True)
    a = answer(lambda n: replace(question.pricing_on(n), headroom=headroom), o.world)
    plan = plan_of(a.pricing, a.to_run.priced, a.to_run.run, a.to_run.mfu, str(asked.cluster), question.precision)
    plans.write(plan, out)
    announce(f"plan: {out}")
    return plan


def _as_json(p: PricedRank) -> dict[str, Any]:
    return {
        "rank": p.rank.rank,
        "flops": p.flops,
        "compute_s": p.compute_s,
        "communication_s": p.communication_s,
        "step_s": {"all_hidden": max(p.compute_s, p.communication_s), "none_hidden": p.compute_s + p.communication_s},
        "peak_bytes": p.rank.peak,
        "usable_bytes": p.usable,
        "fits": p.fits,
        "collectives": [asdict(f) for f in p.flows],
    }


def show_differences(o: Observation, plan: Path, as_json: bool) -> None:
    """Print where an observed program's step differs from a plan; exit code 1 if it does. Raises InputError."""
    from phalanx.planning.explain.observed_against_plan import compare as differences_of
    from phalanx.report.observed_price import differences
    from phalanx.spec.files import plan as plans

    differing = differences_of(o, plans.read(plan / "plan.json" if plan.is_dir() else plan))
    if as_json:
        print_json([{**asdict(d), "differs": d.differs} for d in differing])
    else:
        console().print(differences(differing))
    if any(d.differs for d in differing):
        raise typer.Exit(FAILED)
