"""`phalanx cluster simulate`: jobs on a shared cluster, over time."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Drawn, Json
from phalanx.cli.output import require_savable, save_pictures
from phalanx.cli.terminal import announce, console, exit_on_error, print_json
from phalanx.cli.unread import require_only


def simulate(
    line: typer.Context,
    trace: Annotated[
        Path,
        typer.Option(
            metavar="JOBS.csv",
            help="Jobs, plain or .xz: submit, gpus and duration; or plan and steps. "
            "Also priority, limit, widths, min_gpus.",
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            "--cluster", metavar="NAME|FILE.toml|60x8", help="A preset, a TOML file, or nodes x GPUs, as 60x8,20x2."
        ),
    ],
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes of a preset.")] = None,
    leaf: Annotated[int | None, typer.Option(metavar="NODES", help="Nodes under each leaf switch.")] = None,
    oversubscription: Annotated[
        float, typer.Option(min=1.0, help="GPUs of a leaf that share one uplink to the others.")
    ] = 1.0,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="fifo, easy, conservative, smallest or las; may be repeated. By default all."),
    ] = None,
    placement: Annotated[
        list[str] | None,
        typer.Option(help="first-fit, best-fit, topology or scatter; may be repeated. By default best-fit."),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Let jobs with widths start narrower, give up GPUs for who waits, and widen when nobody does.",
        ),
    ] = False,
    preempt: Annotated[
        bool, typer.Option("--preempt", help="Let jobs of higher priority stop jobs of lower ones.")
    ] = False,
    restart_s: Annotated[float, typer.Option(help="Seconds that stopping and starting a job again costs.")] = 60.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out bad rows of the trace, and count them.")
    ] = False,
    save: Drawn = None,
    as_json: Json = False,
) -> None:
    """Replay a trace of jobs under scheduling policies: queueing, completion, use, and what fragmentation costs.

    phalanx cluster simulate --trace jobs.csv --cluster 60x8 --policy fifo --policy easy
    """
    with exit_on_error():
        from phalanx.report.style import counted
        from phalanx.shared_cluster.simulation.outcome import outcome
        from phalanx.shared_cluster.simulation.replay import (
            cluster_of,
            default_policies,
            policies_of,
            read_trace,
            run,
        )

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
        if as_json:
            print_json(
                {"cluster": shared.title, "skipped": len(jobs.skipped), "policies": [asdict(o) for o in outcomes]}
            )
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
