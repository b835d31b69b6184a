"""`phalanx cluster simulate`: jobs on a shared cluster, over time."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.output import require_savable, save_pictures
from phalanx.cli.terminal import announce, console, print_json
from phalanx.cli.unread import require_only


@command
def simulate(
    line: typer.Context,
    trace: Path,
    on: str,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes of a preset.")] = None,
    leaf: int | None = None,
    oversubscription: Annotated[
        float, typer.Option(min=1.0, help="GPUs of a leaf that share one uplink to the others.")
    ] = 1.0,
    policy: list[str] | None = None,
    placement: list[str] | None = None,
    elastic: bool = False,
    preempt: bool = False,
    restart_s: float = 60.0,
    skip_bad: bool = False,
    save: list[Path] | None = None,
    json: bool = False,
) -> None:
    """Replay a trace of jobs under scheduling policies: queueing, completion, use, and what fragmentation costs.

    phalanx cluster simulate --trace jobs.csv --cluster 60x8 --policy fifo --policy easy

    --trace JOBS.csv: Jobs, plain or .xz: submit, gpus and duration; or plan and steps. Also priority, limit, widths,
        min_gpus.
    on --cluster NAME|FILE.toml|60x8: A preset, a TOML file, or nodes x GPUs, as 60x8,20x2.
    --leaf NODES: Nodes under each leaf switch.
    --policy: fifo, easy, conservative, smallest or las; may be repeated. By default all.
    --placement: first-fit, best-fit, topology or scatter; may be repeated. By default best-fit.
    --elastic: Let jobs with widths start narrower, give up GPUs for who waits, and widen when nobody does.
    --preempt: Let jobs of higher priority stop jobs of lower ones.
    --restart-s: Seconds that stopping and starting a job again costs.
    --skip-bad: Leave out bad rows of the trace, and count them.
    --save FILE.html|svg|png: Also write it, as the ending of each file says: a page that needs nothing else, a
        picture (png by chromium).
    """
    from phalanx.report.style import counted
    from phalanx.shared_cluster.simulation.outcome import outcome
    from phalanx.shared_cluster.simulation.replay import cluster_of, default_policies, policies_of, read_trace, run

    if policy and "las" not in policy and not elastic and not preempt:
        others = [str(p.name) for p in line.command.params if p.name != "restart_s"]
        reason = f"is not read under {' and '.join(dict.fromkeys(policy))}, where no job is stopped"
        require_only(line, *others, reason=reason, remedy="add --preempt, --elastic or --policy las")
    require_savable(save)
    rules = placement or ["best-fit"]
    policies_of(policy or [], rules, elastic, restart_s, preempt)  # before a long trace is read
    shared = cluster_of(on, nodes, leaf)
    jobs, speed_of = read_trace(trace, shared, oversubscription, skip_bad)
    names = policy or [p for p in default_policies(jobs, elastic) if not (preempt and p == "conservative")]
    chosen = policies_of(names, rules, elastic, restart_s, preempt)
    if jobs.skipped:
        row, reason = jobs.skipped[0]
        announce(f"{counted(len(jobs.skipped), 'bad row')} skipped; the first, row {row}: {reason}")
    histories = []
    for each in chosen:
        start = time.perf_counter()
        histories.append(run(jobs, shared, each, speed_of))
        announce(f"{each.title}: {counted(len(jobs.jobs), 'job')} in {time.perf_counter() - start:.1f} s")
    outcomes = [outcome(history) for history in histories]
    if save:
        from phalanx.shared_cluster.simulation.outcome import picture

        save_pictures([picture(histories, shared.title)], save)
    if json:
        print_json({"cluster": shared.title, "skipped": len(jobs.skipped), "policies": [asdict(o) for o in outcomes]})
        return

    from phalanx.report.pictures import grids
    from phalanx.shared_cluster.simulation.outcome import ROWS, tables, use

    out = console()
    out.print(f"{counted(len(jobs.jobs), 'job')} on {shared.title}", highlight=False)
    for table in tables(outcomes):
        out.print(table)
    if len(histories) == 1:
        shares = use(histories[0], max(10, out.width - 14), ROWS)
        print("\n".join(grids.heat_text(shares, out.width)))
