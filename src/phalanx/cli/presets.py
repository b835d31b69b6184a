"""`phalanx presets`: the models and clusters that ship, and the shape of a model that a file describes."""

from phalanx.cli.command import command
from phalanx.cli.forms import forms
from phalanx.cli.output import Printed, Saved


@command
def of_models(output: Printed, name: str | None = None) -> None:
    """List the model presets, or show one model's shape and parameters.

    name NAME|PATH: Show this model alone: a preset, a config.json, its folder, or TOML.
    """
    from phalanx.answers.presets import model, models

    output.show(models() if name is None else model(name))


@command
def of_clusters(output: Saved, name: str | None = None, nodes: int | None = None) -> None:
    """List the cluster presets: devices, dense FLOP/s, bandwidth of links in one direction.

    name NAME|FILE.toml: Show this preset alone, or the cluster of a file, with its sources.
    --nodes: Number of nodes of a preset; default 32.
    """
    from phalanx.answers.presets import clusters

    output.show(clusters(name, nodes))


presets = forms("List the models and clusters that ship, or show one.", models=of_models, clusters=of_clusters)
