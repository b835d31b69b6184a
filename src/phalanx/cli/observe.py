"""`phalanx observe`: what any torch program does in a training step, at any world size, without its GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from phalanx.cli.command import command_with_progress
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import require_torch, require_writable


@command_with_progress
def observe(
    output: Annotated[Display, "json", "save", "assertions"],
    command: list[str],
    world: int = 1,
    ranks: str = "classes",
    mesh: str | None = None,
    node: int = 8,
    step: int = 2,
    every_micro_batch: bool = False,
    out: Path | None = None,
) -> None:
    """Run a program as one rank of each kind, on fake tensors, and show what one training step does.

    command -- python train.py ARGS: The program, as you would start one rank of it: a script, or -m MODULE.
    --world: Number of ranks of the fake world.
    --ranks classes|all|0,8: Ranks to observe; `classes` finds one of each kind.
    --mesh pp=8,dp=8: Names of the mesh axes, outermost first, for a program that makes its groups without a
        DeviceMesh.
    --node: Ranks of a node, as LOCAL_WORLD_SIZE and GPUs say.
    --step: Which step to record; the first initialises lazily.
    --every-micro-batch: Also run a pipeline's micro-batches that repeat others.
    --out observed.json: Also write the observation to a file.
    """
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
