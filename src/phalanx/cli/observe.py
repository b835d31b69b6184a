"""`phalanx observe`: what any torch program does in a training step, at any world size, without its GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command_with_progress
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import require_torch, require_writable


@command_with_progress
def observe(
    output: Annotated[Display, "json", "save", "assertions"],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- python train.py ARGS",
            help="The program, as you would start one rank of it: a script, or -m MODULE.",
            show_default=False,
        ),
    ],
    world: Annotated[int, typer.Option("--world", help="Number of ranks of the fake world.")] = 1,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks", metavar="classes|all|0,8", help="Ranks to observe; `classes` finds one of each kind."
        ),
    ] = "classes",
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="pp=8,dp=8",
            help="Names of the mesh axes, outermost first, for a program that makes its groups without a DeviceMesh.",
        ),
    ] = None,
    node: Annotated[int, typer.Option("--node", help="Ranks of a node, as LOCAL_WORLD_SIZE and GPUs say.")] = 8,
    step: Annotated[int, typer.Option("--step", help="Which step to record; the first initialises lazily.")] = 2,
    every_micro_batch: Annotated[
        bool,
        typer.Option("--every-micro-batch", help="Also run a pipeline's micro-batches that repeat others."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="observed.json", help="Also write the observation to a file.")
    ] = None,
) -> None:
    """Run a program as one rank of each kind, on fake tensors, and show what one training step does."""
    require_torch()
    require_writable("--out", out)
    from phalanx.answers.encode import plain
    from phalanx.answers.observe import observe as run
    from phalanx.answers.observe import program, request
    from phalanx.spec.files.plan import write_json

    result = run(program(command), request(world, ranks, mesh, node, step, every_micro_batch))
    if out is not None:
        write_json(out, plain(result))
    if not output.json:
        show_notes(tuple(dict.fromkeys(n for r in result.ranks for n in r.notes)))
    output.show(result)
