"""`phalanx validate`: compare predictions, and the choices that they lead to, with published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display
from phalanx.cli.terminal import announce

OPTIONS = """
--runs FILE.csv: Your own measured runs, in the columns of the published ones that ship with Phalanx.
--rows FAMILY: Show this source family only, row by row, published and predicted.
"""


validate = forms(
    "Predict every published run that is fully specified, and show how far off the predictions are.",
    {
        "times": Form(f"{__name__}:of_times", "Step times and memory of published runs."),
        "choices": Form(f"{__name__}:of_choices", "The order of strategies, and the recipes that experts tuned."),
        "kernels": Form(f"{__name__}:of_kernels", "Kernels that were measured alone on eight chips."),
    },
    lambda _: "times",
    default="times",
)


@command
def of_times(output: Annotated[Display, "json"], runs: Path | None = None, rows: str | None = None) -> None:
    """Predict every published run that is fully specified, and show how far off the predictions are."""
    from phalanx.answers.validate import prediction_scores

    output.show(prediction_scores(runs, rows))


@command
def of_choices(output: Annotated[Display, "json"], runs: Path | None = None, rows: str | None = None) -> None:
    """Score choices: the order of strategies that were measured for one question, and the best predicted strategy
    against those that experts tuned. Searches every recipe: some minutes."""
    from phalanx.answers.validate import choice_scores

    output.show(choice_scores(runs, rows, announce))


@command
def of_kernels(output: Annotated[Display, "json"]) -> None:
    """Score the kernel model: products, attention, experts and all-reduces in a node that were measured alone on
    eight chips, also by constants fitted without the chip."""
    from phalanx.answers.validate import kernel_scores

    output.show(kernel_scores())
