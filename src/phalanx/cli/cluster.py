"""`phalanx cluster`: jobs on a shared cluster, over time. (`phalanx clusters` lists the cluster presets.)"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import announce, console, exit_on_error, print_json, require_writable

cluster = typer.Typer(
    help="Simulate jobs on a shared cluster; `phalanx clusters` lists the presets.", no_args_is_help=True
)


@cluster.callback()
def _cluster() -> None:
    """Keep `simulate` a command of its own: Typer merges a group's only command into the group."""


@cluster.command("simulate")
def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            metavar="JOBS.csv",
            help="Jobs, plain or .xz: submit, gpus and duration; or plan and steps. Also limit, widths, min_gpus.",
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
        bool, typer.Option("--elastic", help="Let jobs with widths start narrower, and widen when nobody waits.")
    ] = False,
    restart_s: Annotated[float, typer.Option(help="Seconds that stopping and starting a job again costs.")] = 60.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out bad rows of the trace, and count them.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Also draw the nodes over time, of every policy.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace of jobs under scheduling policies: queueing, completion, use, and what fragmentation costs.

    phalanx cluster simulate --trace jobs.csv --cluster 60x8 --policy fifo --policy easy
    """
    with exit_on_error():
        from phalanx.commands.cluster import cluster_of, policies_of, read_trace, run
        from phalanx.simulate.shared_cluster.outcome import outcome
        from phalanx.simulate.shared_cluster.policy import POLICIES

        require_writable("--plot", plot)
        chosen = policies_of(
            policy or [p for p in POLICIES if not (elastic and p == "conservative")],
            placement or ["best-fit"],
            elastic,
            restart_s,
        )
        shared = cluster_of(on, nodes, leaf)
        jobs, speed_of = read_trace(trace, shared, oversubscription, skip_bad)
        if jobs.skipped:
            line, reason = jobs.skipped[0]
            announce(f"{len(jobs.skipped):,} bad rows skipped; the first, row {line}: {reason}")
        histories = []
        for each in chosen:
            start = time.perf_counter()
            histories.append(run(jobs, shared, each, speed_of))
            announce(f"{each.title}: {len(jobs.jobs):,} jobs in {time.perf_counter() - start:.1f} s")
        outcomes = [outcome(history) for history in histories]
        if plot:
            from phalanx.report.shared_cluster import svg

            plot.write_text(svg(histories, shared.title))
        if as_json:
            print_json(
                {"cluster": shared.title, "skipped": len(jobs.skipped), "policies": [asdict(o) for o in outcomes]}
            )
            return

        from phalanx.report.shared_cluster import drawn, tables

        out = console()
        out.print(f"{len(jobs.jobs):,} jobs on {shared.title}", highlight=False)
        for table in tables(outcomes):
            out.print(table)
        if len(histories) == 1:
            out.print(drawn(histories[0], out.width))
