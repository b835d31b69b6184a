"""`phalanx pipeline`: draw, compare, prove and write pipeline schedules."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display
from phalanx.cli.terminal import FAILED

OPTIONS = """
--ranks: Number of pipeline ranks.
--micro-batches: Number of micro-batches per step.
--virtual: Chunks per rank of the interleaved schedule; 2 by default.
--costs: Times of F (forward), I (input gradient) and W (weight gradients) of a rank, over all its chunks.
--transfer: Time of a message from one rank to the next, in the unit of --costs.
"""


pipeline = forms(
    "Draw, compare and prove pipeline schedules, or write them as CSV.",
    {
        "show": Form(f"{__name__}:show", "Draw schedules over time, on one scale."),
        "table": Form(f"{__name__}:table", "Compare the memory and the bubble of all schedules."),
        "prove": Form(f"{__name__}:prove", "Prove schedules: every pass once, after what it needs, no deadlock."),
        "csv": Form(f"{__name__}:csv", "Print a schedule as the CSV that torch.distributed.pipelining loads."),
    },
)


@command
def show(
    output: Annotated[Display, "json", "save"],
    names: list[str],
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    costs: str = "1,1,1",
    transfer: float = 0.0,
) -> None:
    """Draw schedules over time, on one scale, with their bubble and live activations.

    Of a run, draw its traced step as measured and as predicted. A drawing that is wider than the terminal, or than
    COLUMNS says, goes on in panels.

    names: Schedules (1f1b, gpipe, interleaved, zb-v, ...), CSV files, or folders of runs.
    """
    from phalanx.answers.pipeline import draw

    output.show(draw(names, ranks, micro_batches, virtual, costs, transfer))


@command
def table(
    output: Annotated[Display, "json"],
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    costs: str = "1,1,1",
    transfer: float = 0.0,
) -> None:
    """Compare the memory and the bubble of all schedules."""
    from phalanx.answers.pipeline import compare

    output.show(compare(ranks, micro_batches, virtual, costs, transfer))


@command
def prove(
    output: Annotated[Display, "json"],
    names: list[str] | None = None,
    ranks: int = 4,
    micro_batches: int = 8,
    virtual: int | None = None,
    slots: bool = False,
) -> None:
    """Prove schedules: every pass runs once and after what it needs, with no deadlock even if sends block.

    names: Schedules or CSV files; by default all schedules.
    --slots: Read the cells of CSV files as time slots: no pass may come before what it needs.
    """
    from phalanx.answers.pipeline import prove as prove_all

    answer = prove_all(names or (), ranks, micro_batches, virtual, slots)
    output.show(answer)
    if not answer.passed:
        raise typer.Exit(FAILED)


@command
def csv(name: str, ranks: int = 4, micro_batches: int = 8, virtual: int | None = None, sends: bool = False) -> None:
    """Print a schedule as the CSV that torch.distributed.pipelining and torchtitan load: a line per rank.

    name: Schedule: 1f1b, gpipe, interleaved, zb-v, ...
    --sends: Include sends and receives.
    """
    from phalanx.answers.pipeline import schedule_named
    from phalanx.schedule.pipeline.proof import prove as prove_one
    from phalanx.schedule.pipeline.simulate import insert_sends, strip_sends
    from phalanx.schedule.pipeline.torch_csv import to_csv

    schedule = schedule_named(name, ranks, micro_batches, virtual)
    prove_one(schedule)
    bare = strip_sends(schedule)
    print(to_csv(insert_sends(bare) if sends else bare), end="")
