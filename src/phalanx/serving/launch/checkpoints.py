"""Where the weights of named models are published, for launch lines."""

import tomllib
from pathlib import Path

from phalanx.serving.cost.checkpoint import published_weights
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError
from phalanx.spec.model.presets import published

_PUBLISHED: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Names of presets -> Hugging Face names."""


def weights_of(plan: ServingPlan) -> tuple[str, str]:
    """Return (the weights to load, a note for the user or an empty one).

    The weights are a preset's published ones, or the folder of the plan's config.json. Raises InputError for a name
    that a command line would read as an option.
    """
    name = plan.model_name
    if name.startswith("-"):
        raise InputError("model_name", name, "would be read as an option", "name a preset, or the config.json's path")
    where = _PUBLISHED.get(name, name.removesuffix("/config.json") if name.endswith("config.json") else name)
    if plan.weights in ("int4", "nvfp4", "mxfp4") and plan.weights != published_weights(name):
        return where, f"{plan.weights} needs a checkpoint that was quantised so: put its name for {where}"
    if name not in _PUBLISHED and published(name) is None and not name.endswith("config.json"):
        return where, f"{name} has no published weights that are known here: put your checkpoint's folder for it"
    return where, ""


def quantised_on_load(plan: ServingPlan) -> bool:
    """Whether the engine quantises 16-bit weights to fp8 while it loads them."""
    return plan.weights == "fp8" != published_weights(plan.model_name)
