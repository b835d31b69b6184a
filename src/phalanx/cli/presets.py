"""`phalanx presets`: the models and clusters that ship, and the shape of a model that a file describes."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display, show_notes

presets = forms(
    "List the models and clusters that ship, or show one.",
    {
        "models": Form(f"{__name__}:of_models", "List the model presets, or show one model."),
        "clusters": Form(f"{__name__}:of_clusters", "List the cluster presets, or show one."),
    },
)


@command
def of_models(
    output: Annotated[Display, "json"],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|PATH",
            help="Show this model alone: a preset, a Hugging Face config.json, or a folder that holds one.",
        ),
    ] = None,
) -> None:
    """List the model presets, or show one model's shape and parameters."""
    from phalanx.answers.presets import model, models

    if name is None:
        output.show(models())
        return
    shape = model(name)
    show_notes(shape.notes)
    output.show(shape)


@command
def of_clusters(
    output: Annotated[Display, "json", "save"],
    name: Annotated[
        str | None, typer.Argument(help="Show this preset alone, with its sources.", show_default=False)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 32,
) -> None:
    """List the cluster presets: devices, dense FLOP/s, bandwidth of links in one direction."""
    from phalanx.answers.presets import clusters

    output.show(clusters(name, nodes))
