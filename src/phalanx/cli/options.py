"""Options and arguments that several commands share, and what a shell completes after --model, --cluster and --stack:
the names that ship, or nothing, so that files follow. Tables are imported only when a shell asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from phalanx.spec.number_formats import PRECISIONS


def complete_model(incomplete: str) -> list[str]:
    """Return the presets of models that begin so."""
    from phalanx.spec.model.presets import PRESETS

    return _starting(incomplete, PRESETS)


def complete_cluster(incomplete: str) -> list[str]:
    """Return the presets of clusters that begin so."""
    from phalanx.spec.cluster.presets import PRESETS

    return _starting(incomplete, PRESETS)


def complete_stack(incomplete: str) -> list[str]:
    """Return the software stacks that begin so."""
    from phalanx.frameworks.registry import STACKS

    return _starting(incomplete, STACKS)


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


# A job file, and what is laid over it.
Job = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
JobOrPlan = Annotated[
    Path | None,
    typer.Argument(metavar="JOB.toml|plan.json", help="A job file, or a plan of one.", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.FIELD=VALUE", help="Override a field of the job; may be repeated."),
]
SetModel = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="model.FIELD=VALUE",
        help="Change a field of the model, e.g. model.max_seq=32768; repeatable.",
    ),
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
    autocompletion=complete_model,
)
_CLUSTER = typer.Option(
    "--cluster",
    metavar="NAME|FILE.toml",
    help="Cluster: a preset (`phalanx presets clusters`) or a TOML file.",
    autocompletion=complete_cluster,
)
_GPUS = typer.Option("--gpus", help="Number of GPUs.")
_BATCH = typer.Option("--batch", help="Global batch: sequences per step, over all GPUs.")
_SEQ = typer.Option("--seq", help="Sequence length in tokens.")
_STACK = typer.Option(
    "--stack", metavar="STACK", help="Software stack whose step is priced.", autocompletion=complete_stack
)
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
        autocompletion=complete_stack,
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
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit with code 1 if what matters to a price is not modelled, not judged, assumed or missing.",
    ),
]
Assertions = Annotated[
    str | None,
    typer.Option(
        "--assert",
        metavar="LINE",
        help="Exit with code 1 unless these hold of the answer, such as 'memory<75GiB, step<20s, mfu>0.4, fits': "
        "fields of --json, with or without their unit.",
    ),
]
_SAVE = "also write it, as the ending of each FILE says: a page that needs nothing else, a picture (PNG by Chromium)"
Save = Annotated[
    list[Path] | None,
    typer.Option(
        "--save", metavar="FILE.html|svg|png|csv", help=f"{_SAVE.capitalize()}, or its tables; csv alone prints them."
    ),
]
Drawn = Annotated[
    list[Path] | None, typer.Option("--save", metavar="FILE.html|svg|png", help=f"{_SAVE.capitalize()}.")
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

Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration", metavar="FILE.toml", help="Factors of your own machines, as `phalanx calibrate` wrote them."
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
    "calibration": Calibration,
    "changes": SetModel,
}
OF_A_STRATEGY = tuple(name for name in QUERY_OPTIONS if name != "where")
"""Fields of a question about one strategy."""
OUTPUT_OPTIONS = {"json": Json, "save": Save, "strict": Strict, "assertions": Assertions}
