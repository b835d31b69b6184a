"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Job = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]


OptionalJob = Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]


JobOrPlan = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml|plan.json", help="A job, or a plan of one.", show_default=False)
]


Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.FIELD=VALUE", help="Override a field; may be repeated.")
]


StrategyLine = Annotated[
    str | None, typer.Option("--strategy", metavar="LINE", help="A strategy such as dp=2,micro_batch=4.")
]


Plan = Annotated[Path | None, typer.Argument(metavar="PLAN.json", help="As `phalanx plan` wrote it.")]


Model = Annotated[str | None, typer.Option("--model", metavar="NAME|config.json", help="Without a plan: a model,")]


Cluster = Annotated[str | None, typer.Option("--cluster", metavar="NAME|FILE.toml", help="a cluster,")]


Gpus = Annotated[int | None, typer.Option("--gpus", help="how many GPUs,")]


Batch = Annotated[int | None, typer.Option("--batch", help="sequences in a step,")]


Seq = Annotated[int | None, typer.Option("--seq", help="tokens of each.")]


Line = Annotated[str | None, typer.Option("--strategy", metavar="LINE", help="A strategy; of a plan, another one.")]


Profile = Annotated[str | None, typer.Option("--profile", metavar="STACK", help="The software stack.")]


Csv = Annotated[bool, typer.Option("--csv", help="Print the tables as CSV, one after the other.")]


Params = Annotated[
    str | None, typer.Option("--params", metavar="25M", help="Where a number of parameters alone is known.")
]


Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the tables as well.")]
