"""`phalanx tables`: the tables of a textbook, for any model, cluster and strategy."""

from __future__ import annotations

from phalanx.cli.forms import Form, forms

tables = forms(
    "Tabulate memory, communication, rooflines or scaling.",
    {
        "memory": Form("phalanx.cli.memory:memory", "Memory of state and activations."),
        "comm": Form("phalanx.cli.comm:comm", "What each mesh axis sends, and what is hidden."),
        "roofline": Form("phalanx.cli.roofline:roofline", "Ridge points and the intensity of operators."),
        "scaling": Form("phalanx.cli.scaling:scaling", "Strong and weak scaling; days of a training."),
    },
)
