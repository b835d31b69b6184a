"""What commands do with an observed.json in place of a plan: price it, tabulate what it sends, compare it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.terminal import FAILED, console, print_json

if TYPE_CHECKING:
    from phalanx.plan.explain.observed import PricedRank
    from phalanx.schedule.observation import Observation


def observation_in(path: Path | None) -> Observation | None:
    """Return the observation that a file holds, None where it is something else. Raises InputError."""
    from phalanx.plan.explain.observed import read

    return None if path is None else read(path)


def show_price(o: Observation, cluster: str | None, as_json: bool, collectives: bool) -> None:
    """Print what an observed step costs on a cluster; with `collectives`, each kind of them. Raises InputError."""
    from phalanx.plan.explain.observed import priced
    from phalanx.plan.question import cluster_named
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


def show_lint(o: Observation, cluster: str | None, others: dict[str, object], as_json: bool) -> None:
    """Print what is wrong with an observed program; exit code 1 if anything is. `others`: options that belong to a
    strategy and must not be given. Raises InputError."""
    from phalanx.plan.explain.observed_lint import lint
    from phalanx.plan.question import cluster_named
    from phalanx.report.observe import finding
    from phalanx.report.style import counted
    from phalanx.spec.errors import InputError

    for name, value in others.items():
        if value is not None:
            raise InputError(name, value, "belongs to a strategy, not to an observed program", "leave it out")
    findings = lint(o, cluster_named(cluster)(o.world) if cluster else None)
    if as_json:
        print_json({"program": o.program, "findings": [asdict(f) for f in findings]})
    else:
        for f in findings:
            print(finding(f))
        print(f"{o.program}: " + (counted(len(findings), "finding") if findings else "nothing found"))
    if findings:
        raise typer.Exit(FAILED)


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
    from phalanx.plan.explain.observed_against_plan import compare as differences_of
    from phalanx.report.observed_price import differences
    from phalanx.spec.files import plan as plans

    found = differences_of(o, plans.read(plan / "plan.json" if plan.is_dir() else plan))
    if as_json:
        print_json([{**asdict(d), "differs": d.differs} for d in found])
    else:
        console().print(differences(found))
    if any(d.differs for d in found):
        raise typer.Exit(FAILED)
