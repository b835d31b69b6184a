"""`phalanx tables scaling`: strong and weak scaling, batch, network, devices; and the days of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms, given
from phalanx.cli.options import Stack
from phalanx.cli.output import Display

Gpus = Annotated[
    str, typer.Option("--gpus", metavar="N|N,N,...", help="GPUs; of one number also four halvings of it.")
]


def _form(words: Sequence[str]) -> str:
    return "params" if given(words, "--params") else "model"


scaling = forms(
    "Tabulate strong and weak scaling, efficiency by batch size, and the effect of the network and the device.",
    {
        "model": Form(
            f"{__name__}:of_model", "Of a --model on a --cluster: the best strategy of each number of GPUs."
        ),
        "params": Form(f"{__name__}:of_params", "Days to train a number of --params, by 6 N FLOP a token."),
    },
    _form,
)


@command
def of_model(
    model: Annotated[str, typer.Option("--model", metavar="NAME|config.json", help="Model.")],
    gpus: Gpus,
    batch: Annotated[int, typer.Option("--batch", help="Global batch: sequences per step, over all GPUs.")],
    seq: Annotated[int, typer.Option("--seq", help="Sequence length in tokens.")],
    output: Annotated[Display, "json", "save"],
    cluster: Annotated[str, typer.Option("--cluster", metavar="NAME|FILE.toml", help="Cluster.")] = "dgx-h100",
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="v100,a100,h100", help="Also compare these devices, on the largest number of GPUs."
        ),
    ] = None,
    stack: Stack = "megatron-core",
) -> None:
    """Tabulate strong and weak scaling, efficiency by batch size, and the effect of the network and the device."""
    from phalanx.answers.tables import scaling as scaling_tables

    output.show(scaling_tables(model, cluster, gpus, batch, seq, stack, devices), subject="scaling")


@command
def of_params(
    params: Annotated[str, typer.Option("--params", metavar="25M", help="Number of parameters.")],
    tokens: Annotated[str, typer.Option("--tokens", metavar="300B", help="Tokens to train on.")],
    output: Annotated[Display, "json", "save"],
    rate: Annotated[float, typer.Option("--tflops", help="TFLOP/s that each GPU reaches.")] = 150.0,
    gpus: Gpus = "1,1024",
) -> None:
    """Tabulate the days of a training by number of GPUs."""
    from phalanx.answers.tables import training_days

    output.show(training_days(params, tokens, rate, gpus), subject="scaling")
