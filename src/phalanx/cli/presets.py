"""`phalanx presets`: the models and clusters that ship, and the shape of a model that a file describes."""

from __future__ import annotations

from typing import Annotated

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
def of_models(output: Annotated[Display, "json"], name: str | None = None) -> None:
    """List the model presets, or show one model's shape and parameters.

    name NAME|PATH: Show this model alone: a preset, a Hugging Face config.json, or a folder that holds one.
    """
    from phalanx.answers.presets import model, models

    if name is None:
        output.show(models())
        return
    shape = model(name)
    show_notes(shape.notes)
    output.show(shape)


@command
def of_clusters(output: Annotated[Display, "json", "save"], name: str | None = None, nodes: int = 32) -> None:
    """List the cluster presets: devices, dense FLOP/s, bandwidth of links in one direction.

    name: Show this preset alone, with its sources.
    --nodes: Number of nodes.
    """
    from phalanx.answers.presets import clusters

    output.show(clusters(name, nodes))
