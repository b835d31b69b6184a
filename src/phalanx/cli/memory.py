"""`phalanx tables memory`: bytes of a model, of its state and activations, and of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms, given
from phalanx.cli.options import OF_A_STRATEGY
from phalanx.cli.output import Display, show_notes

OPTIONS = """
policy --bytes-per-parameter: Bytes of state per parameter: 16 (weight 2, gradient 2, master and moments 12), 12, 18
    or 20.
--card: Memory of a GPU in GB.
"""


_OF_A_STEP = ("--strategy", "--cluster", "--gpus", "--batch", "--stack", "--precision", "--options")


def _form(words: Sequence[str]) -> str:
    if given(words, "--params"):
        return "params"
    return "model" if given(words, "--model") and not given(words, *_OF_A_STEP) else "strategy"


memory = forms(
    "Tabulate memory: of a strategy, or of a model's state by level of ZeRO and its activations.",
    {
        "strategy": Form(f"{__name__}:of_strategy", "What occupies the fullest rank of a plan, or of a strategy."),
        "model": Form(f"{__name__}:of_model", "A --model's state by level of ZeRO, and its activations."),
        "params": Form(f"{__name__}:of_params", "The state of a number of --params by level of ZeRO."),
    },
    _form,
)


@command
def of_strategy(query: Annotated[Query, OF_A_STRATEGY], output: Annotated[Display, "json", "save"]) -> None:
    """Tabulate what occupies the memory of a strategy's fullest rank, as `predict` and `explain` have it."""
    from phalanx.answers.question import read
    from phalanx.answers.tables import memory_of

    tables = memory_of(read(query))
    show_notes(tables.notes)
    output.show(tables, subject="memory")


@command
def of_model(
    model: str,
    output: Annotated[Display, "json", "save"],
    micro_batch: int = 1,
    seq: int | None = None,
    policy: int = 16,
    card: float = 80.0,
) -> None:
    """Tabulate a model's state by level of ZeRO, and its activations by recomputation, tp and sp.

    --model NAME|config.json: Model.
    --micro-batch: Sequences per micro-batch.
    """
    from phalanx.answers.tables import model_memory

    output.show(model_memory(model, micro_batch, seq, policy, card), subject="memory")


@command
def of_params(params: str, output: Annotated[Display, "json", "save"], policy: int = 16, card: float = 80.0) -> None:
    """Tabulate the state of a number of parameters by level of ZeRO.

    --params 25M: Number of parameters.
    """
    from phalanx.answers.tables import state_memory

    tables = state_memory(params, policy, card)
    output.show(tables, subject="memory")
    show_notes(tables.notes)
