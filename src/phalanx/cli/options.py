"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.completion import clusters, models, stacks
from phalanx.spec.number_formats import PRECISIONS

# A job file, and what is laid over it.
Job = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
OptionalJob = Annotated[
    Path | None,
    typer.Argument(
        metavar="JOB.toml",
        help="The job file; without one, give --model, --cluster, --gpus, --batch and --seq.",
        show_default=False,
    ),
]
JobOrPlan = Annotated[
    Path | None,
    typer.Argument(metavar="JOB.toml|plan.json", help="A job file, or a plan of one.", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.FIELD=VALUE", help="Override a field of the job; may be repeated."),
]

# A plan, or in its place a model, a cluster and numbers.
Source = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE...",
        help="A plan written by `phalanx plan`, a run's folder, or another framework's configuration with the files "
        "that belong to it; without one, name the model, the cluster and the rest with options.",
        show_default=False,
    ),
]
StrategyLine = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="LINE",
        help="Strategy, such as tp=8,zero=1: replaces that of a job file or a plan; dp takes the remaining GPUs. "
        "Of a search with --model: fields to keep, such as tp=8,pp=*.",
    ),
]
_MODEL = typer.Option(
    "--model",
    metavar="NAME|config.json",
    help="Model: a preset or a Hugging Face config.json.",
    autocompletion=models,
)
_CLUSTER = typer.Option(
    "--cluster",
    metavar="NAME|FILE.toml",
    help="Cluster: a preset (`phalanx presets clusters`) or a TOML file.",
    autocompletion=clusters,
)
_GPUS = typer.Option("--gpus", help="Number of GPUs.")
_BATCH = typer.Option("--batch", help="Global batch: sequences per step, over all GPUs.")
_SEQ = typer.Option("--seq", help="Sequence length in tokens.")
_STACK = typer.Option("--stack", metavar="STACK", help="Software stack whose step is priced.", autocompletion=stacks)
Model = Annotated[str | None, _MODEL]
Cluster = Annotated[str | None, _CLUSTER]
Gpus = Annotated[int | None, _GPUS]
Batch = Annotated[int | None, _BATCH]
Seq = Annotated[int | None, _SEQ]
Stack = Annotated[str, _STACK]
OptionalStack = Annotated[
    str | None,
    typer.Option(
        "--stack",
        metavar="STACK",
        help="Software stack whose step is priced; by default that of the plan, else megatron-core.",
        autocompletion=stacks,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help=f"Precision of matrix products: {', '.join(PRECISIONS)}; by default bf16, or fp16 where the device has "
        "no bf16.",
    ),
]
StackOptionsLine = Annotated[
    str | None,
    typer.Option(
        "--options",
        metavar="LINE",
        help="Options of the stack, such as first_moment=bfloat16,loss_as_layer=1 (docs/stacks.md lists them).",
    ),
]
Params = Annotated[
    str | None,
    typer.Option("--params", metavar="25M", help="Number of parameters, for tables that need no model's shape."),
]

# A run that was trained.
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as runs/quickstart.")]

# How results are printed.
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print the tables as CSV, one after the other.")]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Also write a report: one HTML file that needs nothing else."),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit with code 1 if what matters to a price is not modelled, not judged, assumed or missing.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE.svg|html|png", help="Also draw it, as SVG, as a page, or as PNG by Chromium."
    ),
]

Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITIONS",
        help="Conditions on the strategies, such as 'tp<=8, zero=1, schedule in (1f1b, interleaved)', and options of "
        "the stack, such as 'first_moment=bfloat16'.",
    ),
]

# What a parameter of type Query or Output becomes (command.py), by field.
QUERY_OPTIONS = {
    "source": Source,
    "model": Model,
    "cluster": Cluster,
    "gpus": Gpus,
    "batch": Batch,
    "seq": Seq,
    "strategy": StrategyLine,
    "stack": OptionalStack,
    "precision": Precision,
    "options": StackOptionsLine,
    "where": Where,
}
OF_A_STRATEGY = tuple(name for name in QUERY_OPTIONS if name != "where")
"""Fields of a question about one strategy."""
OUTPUT_OPTIONS = {"json": Json, "csv": Csv, "plot": Plot, "report": Report, "strict": Strict}
