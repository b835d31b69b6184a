"""`phalanx presets`: the models and clusters that ship."""

from __future__ import annotations

from phalanx.cli.forms import Form, forms

presets = forms(
    "List the models and clusters that ship, or show one.",
    {
        "models": Form("phalanx.cli.models:models", "List the model presets, or show one model."),
        "clusters": Form("phalanx.cli.clusters:clusters", "List the cluster presets, or show one."),
    },
)
