"""`phalanx predict`: the time, memory and FLOPs of a strategy on a cluster that need not exist here."""

from __future__ import annotations

from typing import Annotated

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.options import OF_A_STRATEGY
from phalanx.cli.output import Display, show_notes


@command
def predict(
    query: Annotated[Query, OF_A_STRATEGY], output: Annotated[Display, "json", "save", "strict", "assertions"]
) -> None:
    """Predict how long a step takes, how much memory it needs and where the time goes, without running anything.

    Name a plan, a run's folder, another framework's configuration with --cluster (`phalanx read`), what `phalanx
    observe --out` wrote with --cluster, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    from phalanx.answers import observed

    if (seen := observed.observation_of(query)) is not None:
        output.show(observed.price(seen, query))
        return
    from phalanx.answers.prediction import prediction_of
    from phalanx.answers.question import read

    question = read(query)
    show_notes(question.notes)
    output.show(prediction_of(question))
