"""Every picture by name: what it shows, the function that draws it, and the command that draws it with `--plot`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.report.gallery import collectives, hardware, memory, pipelines, scaling
from phalanx.report.pictures.figure import Picture
from phalanx.spec.errors import InputError, nearest
from phalanx.textbook.gallery import choosing, compression, data_parallel, experts, growth, layers


@dataclass(frozen=True)
class PictureEntry:
    """A picture that `phalanx learn draw` knows. The function's parameters are the options that it takes."""

    what: str
    draw: Callable[..., Picture]
    instead: str = ""
    """The command that draws the same for the user's own question, without `phalanx`."""


PICTURES: dict[str, PictureEntry] = {
    "roofline": PictureEntry(
        "Roofs of four chips with their ridges", hardware.compute_roofline, "tables roofline PLAN.json --plot FILE"
    ),
    "comm-roofline": PictureEntry("FLOP/s over FLOP per byte sent, a roof for each tier", hardware.comm_roofline),
    "staircase": PictureEntry("Bandwidth over the size of a group, tier by tier", hardware.staircase),
    "memory-hierarchy": PictureEntry("Levels of memory: what they hold, what is reached", hardware.memory_hierarchy),
    "bandwidths": PictureEntry(
        "Memory and links of all presets as bars", hardware.bandwidths, "presets clusters --plot FILE"
    ),
    "switches": PictureEntry(
        "Levels of switches: fat tree, NVSwitch", hardware.switch_levels, "presets clusters NAME --plot FILE"
    ),
    "hierarchy": PictureEntry("A cluster as levels inside levels", hardware.hierarchy),
    "parameter-bytes": PictureEntry("The bytes of a parameter, and what ZeRO leaves", memory.parameter_bytes),
    "memory-wall": PictureEntry("Memory over parameters, with lines for cards", memory.memory_wall),
    "activations": PictureEntry(
        "Activations over tp, sp and recomputation", memory.activations, "tables memory --model M --plot FILE"
    ),
    **{
        f"{name}-all-reduce": PictureEntry(
            f"All-reduce by {collectives.SAID.get(name, name)}, round by round",
            draw,
            f"collectives show {name} --plot FILE",
        )
        for name, draw in collectives.ALL_REDUCES.items()
    },
    "message-cost": PictureEntry("Cost over message size, with n* of all presets", collectives.message_cost),
    "algorithms": PictureEntry("Algorithms over size", collectives.algorithms, "collectives table --plot FILE"),
    "root-bottleneck": PictureEntry("A root as bottleneck, against a ring", collectives.root_bottleneck),
    "collectives-family": PictureEntry("How collectives are made of each other", collectives.family),
    "data-parallel-step": PictureEntry("Buckets reduced beside the backward pass", data_parallel.data_parallel_step),
    "fsdp": PictureEntry("FSDP gathers and frees, unit by unit", data_parallel.fsdp),
    "prefetch": PictureEntry("A gather ahead, and none", data_parallel.prefetch),
    "hsdp": PictureEntry(
        "Shards inside nodes, copies across", data_parallel.hsdp, "mesh --strategy LINE --cluster C --plot FILE"
    ),
    "compression": PictureEntry(
        "What compressed gradients save, over ranks", compression.compression, "tables comm --params N --top-k S"
    ),
    "partition": PictureEntry("Matrices cut by columns and rows, MLP, attention", layers.partition),
    "sequence-parallel": PictureEntry("What sp cuts by tokens, between which collectives", layers.sequence_parallel),
    "tp-efficiency": PictureEntry("Efficiency of tp over its degree, on each link", layers.tp_efficiency),
    "routing": PictureEntry(
        "Tokens to experts: chosen, taken, dropped", experts.routing, "report experts RUN --plot FILE"
    ),
    "moe-layer": PictureEntry("Dispatch and combine of a whole layer of experts", experts.moe_layer),
    "pipelines": PictureEntry("Pipeline schedules over time", pipelines.gallery, "pipeline show 1f1b --plot FILE"),
    "decision-tree": PictureEntry(
        "The tree of decisions, a job's path marked", choosing.tree, "learn cases --tree --plot FILE"
    ),
    "scaling": PictureEntry(
        "Scaling, and what each cause takes away", scaling.scaling, "tables scaling --model M ... --plot FILE"
    ),
    "fragmentation": PictureEntry(
        "The same job on whole nodes and on pieces",
        choosing.fragmentation,
        "cluster place PLAN.json --free FREE.json --plot FILE",
    ),
    "growth": PictureEntry("Sizes of models over the years; L(N)", growth.growth),
    "stack": PictureEntry("From hardware to framework", choosing.stack),
}


def options_of(name: str) -> list[str]:
    """Return the options that a picture takes."""
    return [
        f"--{key.replace('_', '-')}" for key in inspect.signature(PICTURES[name].draw).parameters if key in OPTIONS
    ]


OPTIONS = ("model", "cluster", "gpus", "batch", "seq", "ranks", "params")
"""The options that `phalanx learn draw` passes to pictures."""
_MOST = {"seq": 999_999, "ranks": 10**7, "gpus": 10**7, "batch": 10**9}
"""The largest values that are drawn."""


def picture(name: str, options: Mapping[str, Any] | None = None) -> Picture:
    """Draw a picture by name. Raises InputError for an unknown one, or for an option that it does not take."""
    if name not in PICTURES:
        raise InputError("picture", name, "is not known", nearest(name, PICTURES))
    takes = options_of(name)
    for key in options or {}:
        if f"--{key}" not in takes:
            reason = f"is nothing that {name} depends on"
            raise InputError(f"--{key}", (options or {})[key], reason, f"it takes {', '.join(takes) or 'no options'}")
    for key, most in _MOST.items():
        if (options or {}).get(key, 0) > most:
            raise InputError(f"--{key}", (options or {})[key], "is too much to draw", f"use at most {most:,}")
    return PICTURES[name].draw(**(options or {}))
