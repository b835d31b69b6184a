"""Mistakes in nanotron's YAML that it finds late."""

from __future__ import annotations

from phalanx.frameworks.configuration import Config, Configuration
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.mistakes import Found, Lint, inner_axes, inner_ranks

KEYS = key_table("nanotron")


def _mesh(c: Config, x: Configuration) -> Found:
    """Degrees that do not fill the world, which nanotron states whole."""
    s, world = x.layout, x.layout.world
    if x.kind == "nanotron" and world and s.dp and s.dp * inner_ranks(s) != world:
        shown = f"dp {s.dp} x {inner_axes(s)} = {s.dp * inner_ranks(s)}"
        yield "parallelism", f"{shown}, and there are {world} ranks", "dp to fill them"


def _few_micro_batches(c: Config, x: Configuration) -> Found:
    """Fewer micro-batches than 1F1B has stages."""
    pp, n = x.layout.pp or 1, x.layout.accumulation
    if x.kind == "nanotron" and n and n < pp - 1:
        reason = f"{n} micro-batches, and 1F1B of {pp} stages needs at least {pp - 1}"
        yield KEYS["accumulation"], reason, f"at least {pp}"


LINTS = (
    Lint("mesh-vs-world", "huggingface/nanotron#250", _mesh),
    Lint("micro-batches-vs-pipeline", "huggingface/nanotron#347", _few_micro_batches),
)
