"""`phalanx pipeline`: draw, compare, prove and write pipeline schedules."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display
from phalanx.cli.terminal import FAILED

pipeline = forms(
    "Draw, compare and prove pipeline schedules, or write them as CSV.",
    {
        "show": Form(f"{__name__}:show", "Draw schedules over time, on one scale."),
        "table": Form(f"{__name__}:table", "Compare the memory and the bubble of all schedules."),
        "prove": Form(f"{__name__}:prove", "Prove schedules: every pass once, after what it needs, no deadlock."),
        "csv": Form(f"{__name__}:csv", "Print a schedule as the CSV that torch.distributed.pipelining loads."),
    },
)
Ranks = Annotated[int, typer.Option(help="Number of pipeline ranks.")]
MicroBatches = Annotated[int, typer.Option(help="Number of micro-batches per step.")]
Virtual = Annotated[int | None, typer.Option(help="Chunks per rank of the interleaved schedule; 2 by default.")]
CostLine = Annotated[
    str,
    typer.Option(
        "--costs",
        help="Times of F (forward), I (input gradient) and W (weight gradients) of a rank, over all its chunks.",
    ),
]
Transfer = Annotated[float, typer.Option(help="Time of a message from one rank to the next, in the unit of --costs.")]


@command
def show(
    output: Annotated[Display, "json", "save"],
    names: Annotated[
        list[str],
        typer.Argument(help="Schedules (1f1b, gpipe, interleaved, zb-v, ...), CSV files, or folders of runs."),
    ],
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    costs: CostLine = "1,1,1",
    transfer: Transfer = 0.0,
) -> None:
    """Draw schedules over time, on one scale, with their bubble and live activations.

    Of a run, draw its traced step as measured and as predicted. A drawing that is wider than the terminal, or than
    COLUMNS says, goes on in panels.
    """
    from phalanx.answers.pipeline import draw

    output.show(draw(names, ranks, micro_batches, virtual, costs, transfer))


@command
def table(
    output: Annotated[Display, "json"],
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    costs: CostLine = "1,1,1",
    transfer: Transfer = 0.0,
) -> None:
    """Compare the memory and the bubble of all schedules."""
    from phalanx.answers.pipeline import compare

    output.show(compare(ranks, micro_batches, virtual, costs, transfer))


@command
def prove(
    output: Annotated[Display, "json"],
    names: Annotated[
        list[str] | None, typer.Argument(help="Schedules or CSV files; by default all schedules.")
    ] = None,
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    slots: Annotated[
        bool,
        typer.Option(
            "--slots", help="Read the cells of CSV files as time slots: no pass may come before what it needs."
        ),
    ] = False,
) -> None:
    """Prove schedules: every pass runs once and after what it needs, with no deadlock even if sends block."""
    from phalanx.answers.pipeline import prove as prove_all

    answer = prove_all(names or (), ranks, micro_batches, virtual, slots)
    output.show(answer)
    if not answer.passed:
        raise typer.Exit(FAILED)


@command
def csv(
    name: Annotated[str, typer.Argument(help="Schedule: 1f1b, gpipe, interleaved, zb-v, ...")],
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    virtual: Virtual = None,
    sends: Annotated[bool, typer.Option("--sends", help="Include sends and receives.")] = False,
) -> None:
    """Print a schedule as the CSV that torch.distributed.pipelining and torchtitan load: a line per rank."""
    from phalanx.answers.pipeline import schedule_named
    from phalanx.schedule.pipeline.proof import prove as prove_one
    from phalanx.schedule.pipeline.simulate import insert_sends, strip_sends
    from phalanx.schedule.pipeline.torch_csv import to_csv

    schedule = schedule_named(name, ranks, micro_batches, virtual)
    prove_one(schedule)
    bare = strip_sends(schedule)
    print(to_csv(insert_sends(bare) if sends else bare), end="")
