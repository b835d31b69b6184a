"""`phalanx tables scaling`: strong and weak scaling, batch, network, devices; and the days of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms, given
from phalanx.cli.output import Display

OPTIONS = """
--gpus N|N,N,...: GPUs; of one number also four halvings of it.
"""


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
    model: str,
    gpus: str,
    batch: int,
    seq: int,
    output: Annotated[Display, "json", "save"],
    cluster: str = "dgx-h100",
    devices: str | None = None,
    stack: str = "megatron-core",
) -> None:
    """Tabulate strong and weak scaling, efficiency by batch size, and the effect of the network and the device.

    --model NAME|config.json: Model.
    --cluster NAME|FILE.toml: Cluster.
    --devices v100,a100,h100: Also compare these devices, on the largest number of GPUs.
    --stack STACK: Software stack whose step is priced.
    """
    from phalanx.answers.tables import scaling as scaling_tables

    output.show(scaling_tables(model, cluster, gpus, batch, seq, stack, devices), subject="scaling")


@command
def of_params(
    params: str, tokens: str, output: Annotated[Display, "json", "save"], rate: float = 150.0, gpus: str = "1,1024"
) -> None:
    """Tabulate the days of a training by number of GPUs.

    --params 25M: Number of parameters.
    --tokens 300B: Tokens to train on.
    rate --tflops: TFLOP/s that each GPU reaches.
    """
    from phalanx.answers.tables import training_days

    output.show(training_days(params, tokens, rate, gpus), subject="scaling")
