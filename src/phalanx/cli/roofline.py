"""`phalanx tables roofline`: what bounds a model, and what its communication is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms, given
from phalanx.cli.options import OF_A_STRATEGY
from phalanx.cli.output import Display, show_notes


def _form(words: Sequence[str]) -> str:
    if given(words, "--params"):
        return "params"
    return "chips" if words[0] in ("--json", "--save") and not given(words, "--model") else "strategy"


roofline = forms(
    "Tabulate ridge points of the known chips, and the intensity of operators and of communication.",
    {
        "chips": Form(f"{__name__}:of_chips", "Ridge points of the known chips and links."),
        "strategy": Form(f"{__name__}:of_strategy", "Each operator of a plan, or of a strategy, on the roofline."),
        "params": Form(f"{__name__}:of_params", "FLOP per byte sent of a number of --params, by batch."),
    },
    _form,
    default="chips",
)


@command
def of_chips(output: Annotated[Display, "json", "save"]) -> None:
    """Tabulate the FLOP per byte at which memory and links keep up with each known chip."""
    from phalanx.answers.tables import ridge_points

    output.show(ridge_points(), subject="roofline")


@command
def of_strategy(query: Annotated[Query, OF_A_STRATEGY], output: Annotated[Display, "json", "save"]) -> None:
    """Tabulate ridge points, and the intensity of each operator of a strategy in training and in decoding.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    from phalanx.answers.question import read
    from phalanx.answers.tables import roofline_of

    tables = roofline_of(read(query))
    show_notes(tables.notes)
    output.show(tables, subject="roofline")


@command
def of_params(
    params: str, output: Annotated[Display, "json", "save"], cluster: str = "dgx-h100", seq: int = 2048
) -> None:
    """Tabulate the FLOP per byte sent by batch size, over the links inside a node and those between nodes.

    --params 25M: Number of parameters.
    --cluster NAME|FILE.toml: Cluster.
    """
    from phalanx.answers.tables import communication_intensity

    output.show(communication_intensity(params, cluster, seq), subject="roofline")
