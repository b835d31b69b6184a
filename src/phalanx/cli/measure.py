"""`phalanx measure`: measure this machine, or under torchrun the whole cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import Json, Plot
from phalanx.cli.terminal import (
    announce,
    console,
    exit_on_error,
    print_json,
    require_drawing,
    require_torch,
    require_writable,
)
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.spec.cluster.spec import ClusterSpec


def measure(
    line: typer.Context,
    ranks: Annotated[int | None, typer.Option(help="Number of local ranks; by default one per GPU or core.")] = None,
    dtype: Annotated[str, typer.Option(help="Type that kernels compute in: float32, bfloat16, ...")] = "float32",
    threads: Annotated[int, typer.Option(help="Number of threads per rank.")] = 1,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Measure this machine at fewer sizes in fewer rounds: in seconds, not a minute, and less exactly.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Write the measured cluster to this file; under torchrun the default is cluster.toml.",
        ),
    ] = None,
    plot: Plot = None,
    nccl_tests: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Measure nothing: read this output of nccl-tests; may be repeated."),
    ] = None,
    preset: Annotated[str, typer.Option(help="Cluster preset that the --nccl-tests were run on.")] = "dgx-h100",
    op: Annotated[
        str, typer.Option(help="Operation that --nccl-tests measured, for files that do not name it.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure kernel rates, links and collectives of this machine, or under torchrun of all hosts.

    `train` and `plan` use the result: on this machine by itself, elsewhere as cluster.file.
    """
    from dataclasses import asdict

    from phalanx.answers.measure import from_nccl_tests, measure_ranks
    from phalanx.answers.measure import measure as measure_machine

    with exit_on_error():
        if nccl_tests:
            reason = "does not go with --nccl-tests, which measures nothing"
            require_only(line, "nccl_tests", "preset", "op", "out", reason=reason)
        else:
            require_only(line, "ranks", "dtype", "threads", "quick", "out", reason="is about --nccl-tests")
        require_writable("--out", out)
        require_drawing(plot)
        if nccl_tests:
            cluster = from_nccl_tests(nccl_tests, preset, op)
        else:
            require_torch()
            from phalanx.measure.steal_time import noted
            from phalanx.runtime.process.environment import external

            world = external()
            if world is None:
                cluster = measure_machine(ranks, dtype, threads, quick, announce)
            else:
                require_only(line, "dtype", "threads", "out", reason="is for this machine alone, not under torchrun")
                # The other ranks are no children of this one, and count as others.
                with noted(announce if world.rank == 0 else lambda _: None, threads):
                    measured = measure_ranks(world, dtype, threads)
                if measured is None:
                    sys.stdout.flush()
                    return
                cluster, out = measured, out or Path("cluster.toml")
        if out is not None:
            from phalanx.spec.files.cluster_toml import to_toml

            out.write_text(to_toml(cluster, f"{cluster.name}, as measured; [cluster] file = {str(out)!r} uses it"))
            announce(f"wrote {out}")
        if plot is not None:
            from phalanx.report.measure import picture
            from phalanx.report.pictures.files import write

            write([picture(cluster.collectives)], plot)
            announce(f"wrote {plot}")
        if as_json:
            print_json(asdict(cluster))
        else:
            _show(cluster)


def _show(cluster: ClusterSpec) -> None:
    from phalanx.report import measure
    from phalanx.report.measure import rates

    out = console()
    for table in rates(cluster):
        out.print(table)
    out.print(measure.links(cluster))
    if cluster.figures:
        out.print(measure.figures(cluster))
    drawn = [fit for fit in cluster.collectives if fit.op == "all_reduce" and len(fit.points) > 1]
    if drawn:
        widest = max(drawn, key=lambda fit: (fit.group_size, fit.hosts, -float(fit.seconds(2**24))))
        print("\n".join(measure.plot(widest)))
