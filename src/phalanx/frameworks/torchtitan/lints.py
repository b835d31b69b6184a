"""Mistakes in torchtitan's configuration that it finds late, or not at all."""

from __future__ import annotations

from phalanx.frameworks.configuration import Config, Configuration, Keys, count
from phalanx.frameworks.mistakes import Found, Lint, inner_axes, inner_ranks


def _mesh(c: Config, x: Configuration) -> Found:
    """Degrees that do not fill the world."""
    s, world = x.layout, x.layout.world
    if x.kind == "torchtitan" and world and s.dp and s.dp * inner_ranks(s) != world:
        shown = f"data parallel {s.dp} x {inner_axes(s)} = {s.dp * inner_ranks(s)}"
        yield "parallelism", f"{shown}, and there are {world} ranks", "shard degree -1"


def _expert_mesh(c: Config, x: Configuration) -> Found:
    s = x.layout
    if x.kind == "torchtitan" and s.ep and s.shard:
        whole = s.shard * (s.cp or 1) * (s.tp or 1)
        if whole % s.ep:
            yield "expert_parallel_degree", f"{s.ep} does not divide dp_shard x cp x tp = {whole}", "a divisor of it"


def _few_micro_batches(c: Config, x: Configuration) -> Found:
    """Fewer micro-batches than stages."""
    pp = x.layout.pp or 1
    name = "pipeline_parallel_microbatches"
    few = count(Keys(c).first((f"parallelism.{name}", f"experimental.{name}"), ""))
    if x.kind == "torchtitan" and few and few < pp:
        yield name, f"{few}, fewer than the {pp} stages: the schedule hangs", f"at least {pp}"


LINTS = (
    Lint("mesh-vs-world", "pytorch/torchtitan#1184", _mesh),
    Lint("expert-mesh", "pytorch/torchtitan#4258", _expert_mesh),
    Lint("micro-batches-vs-pipeline", "pytorch/torchtitan#775", _few_micro_batches),
)
