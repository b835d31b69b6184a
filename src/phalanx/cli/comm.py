"""`phalanx tables comm`: what a strategy sends, and what an all-reduce of gradients costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms, given
from phalanx.cli.options import OF_A_STRATEGY
from phalanx.cli.output import Display, show_notes


def _form(words: Sequence[str]) -> str:
    return "params" if given(words, "--params") else "strategy"


comm = forms(
    "Tabulate what each mesh axis of a strategy sends: payload, bytes by tier, time, and whether it is hidden.",
    {
        "strategy": Form(f"{__name__}:of_strategy", "Of a plan, a strategy, or an observed program."),
        "params": Form(f"{__name__}:of_params", "The all-reduce of the gradients of a number of --params."),
    },
    _form,
)


@command
def of_strategy(query: Annotated[Query, OF_A_STRATEGY], output: Annotated[Display, "json", "save"]) -> None:
    """Tabulate what each mesh axis of a strategy sends: payload, bytes by tier, time, and whether it is hidden.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy; or an observed.json and --cluster.
    """
    from phalanx.answers import observed
    from phalanx.answers.question import read
    from phalanx.answers.tables import traffic_of

    if (seen := observed.observation_of(query)) is not None:
        output.show(observed.price(seen, query), collectives=True)
        return
    tables = traffic_of(read(query))
    show_notes(tables.notes)
    output.show(tables, subject="comm")


@command
def of_params(
    params: str,
    output: Annotated[Display, "json", "save"],
    rate: float = 25.0,
    compute: float | None = None,
    top_k: float | None = None,
) -> None:
    """Tabulate what an all-reduce of gradients sends and takes, by number of ranks.

    --params 25M: Number of parameters.
    --rate: Bandwidth of a rank in one direction, in GB/s.
    --compute SECONDS: Compare with this many seconds of computing a step.
    --top-k SHARE: Send the largest share of gradients alone.
    """
    from phalanx.answers.tables import gradient_traffic

    tables = gradient_traffic(params, rate, compute, top_k)
    output.show(tables, subject="comm")
    show_notes(tables.notes)
