"""`phalanx collectives`: algorithms shown step by step, proved, and compared."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.terminal import FAILED, Json, console, mistakes, print_json

collectives = typer.Typer(no_args_is_help=True, help="Collective algorithms: shown step by step, proved, compared.")
Operation = Annotated[str, typer.Option("--op", help="all_reduce, all_gather, reduce_scatter, broadcast, ...")]


@collectives.command("show")
def collectives_show(
    algorithm: Annotated[str, typer.Argument(help="ring, rabenseifner, binomial, bruck, ...")],
    op: Operation = "all_reduce",
    ranks: Annotated[int, typer.Option(help="At most 26: contributions are letters.")] = 4,
    root: Annotated[int, typer.Option(help="Of broadcast, reduce, scatter, gather.")] = 0,
) -> None:
    """Step through an algorithm: who sends which chunk to whom, and what each rank then holds."""
    from phalanx.schedule.collectives.registry import build
    from phalanx.spec.errors import InputError

    with mistakes():
        schedule = build(op, algorithm, ranks, ranks, root, tiers=_square(ranks))

        from phalanx.report.collectives import drawable, steps

        if not drawable(schedule):
            raise InputError("--ranks", ranks, "is too many to draw", "use at most 26")
        out = console()
        for title, table in steps(schedule):
            out.print(title, highlight=False)
            out.print(table)


@collectives.command("prove")
def collectives_prove(
    max_ranks: Annotated[int, typer.Option(help="Worlds of 1 to this many ranks.")] = 33,
    as_json: Json = False,
) -> None:
    """Prove every algorithm: each rank ends with each contribution exactly once, and nothing deadlocks."""
    from phalanx.schedule.collectives.prove_all import sweep
    from phalanx.spec.errors import InputError

    with mistakes():
        if max_ranks < 1:
            raise InputError("--max-ranks", max_ranks, "must be at least 1")
        found = list(sweep(max_ranks))
        refused = [line for line in found if line is not None]
        if as_json:
            print_json({"schedules": len(found), "refused": refused, "passed": not refused})
        else:
            for line in refused:
                print(line)
            print(f"{len(found) - len(refused)} of {len(found)} schedules proved, 1 to {max_ranks} ranks")
        if refused:
            raise typer.Exit(FAILED)


@collectives.command("table")
def collectives_table(
    op: Operation = "all_reduce",
    size: Annotated[
        str, typer.Option("--bytes", help="Of the buffer, such as 100MB or 64KiB; a barrier has none.")
    ] = "100MB",
    ranks: Annotated[int, typer.Option(help="Ranks of the group.")] = 8,
    cluster: Annotated[
        str, typer.Option(help="A preset (`phalanx clusters`), a cluster's TOML file, or local: measured here.")
    ] = "dgx-h100",
    as_json: Json = False,
) -> None:
    """Compare all algorithms of an operation on a cluster: rounds, bytes, time, distance from the bound."""
    from dataclasses import asdict
    from pathlib import Path

    with mistakes():
        from phalanx.plan.tables.collectives import compare
        from phalanx.spec.byte_sizes import parse_bytes
        from phalanx.spec.cluster import presets as clusters
        from phalanx.spec.files import job_file

        if cluster == "local":
            _measured(op, int(parse_bytes(size)), ranks, as_json)
            return
        if cluster.endswith(".toml"):
            spec = job_file.cluster_from_toml(Path(cluster))
        else:
            spec = clusters.preset(cluster, nodes=max(1, -(-ranks // clusters.preset(cluster, 1).ranks_per_node)))
        found = compare(op, parse_bytes(size), ranks, spec)
        if as_json:
            print_json(asdict(found))
            return

        from phalanx.report.collectives import comparison, crossovers, winners

        out = console()
        what = op if op == "barrier" else f"{op} of {size}"
        out.print(comparison(found, f"{what} over {ranks} ranks of {spec.name}"))
        if found.winners:
            out.print("fastest, by size of the buffer:", highlight=False)
        for line in winners(found):
            out.print(f"  {line}", highlight=False)
        for line in crossovers(found):
            out.print(line, highlight=False)


def _measured(op: str, size: int, ranks: int, as_json: bool) -> None:
    """What was measured between local ranks: every transport and algorithm, and which serves which size."""
    from phalanx.cli.terminal import announce
    from phalanx.commands import measure
    from phalanx.report.collectives import choices, measured

    fits, chosen = measure.local_collectives(op, ranks, announce)
    if as_json:
        from dataclasses import asdict

        rows = [{"way": fit.way, "seconds": float(fit.seconds(size)), **asdict(fit)} for fit in fits]
        print_json({"rows": rows, "choices": [asdict(c) for c in chosen]})
        return

    out = console()
    out.print(measured(fits, size, f"{op} of {size:,} bytes over {ranks} ranks of this machine"))
    out.print("auto takes, by size of the buffer:", highlight=False)
    for line in choices(chosen):
        out.print(f"  {line}", highlight=False)


def _square(p: int) -> tuple[int, ...]:
    """Two tiers for a picture of the hierarchical algorithm."""
    inner = next(d for d in range(2, p + 1) if p % d == 0) if p > 1 else 1
    return (inner, p // inner)
