"""Distribution of a step's tokens over the experts of every layer.

The counts of all ranks are summed with the metrics. They move the balance biases, and a bad balance is a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.nn.decoder import Decoder
from phalanx.spec.model.spec import ModelSpec, expert_layers

BUSY = 3.0
"""Load of a layer's busiest expert, in multiples of the mean, that is worth a warning."""
DROPPED = 0.1
"""Share of dropped choices that is worth a warning."""
OVER = 20
"""Steps that a warning covers."""


@dataclass(frozen=True)
class LayerLoad:
    """The expert load of a layer in one step: tokens that chose each expert, choices dropped for lack of capacity,
    and the auxiliary losses, per token."""

    block: int
    chosen: tuple[int, ...]
    dropped: int
    balance_loss: float
    z_loss: float

    @property
    def busiest(self) -> float:
        """The load of the busiest expert over the mean load."""
        return max(self.chosen) * len(self.chosen) / max(1, sum(self.chosen))


class Loads:
    """Counts the expert loads of a model on one rank, which may hold some of the layers."""

    def __init__(self, spec: ModelSpec, model: Decoder) -> None:
        assert spec.experts is not None
        self.spec, self.model, self.experts = spec, model, spec.experts
        self.blocks = expert_layers(spec)
        self.size = len(self.blocks) * (self.experts.count + 3)
        if model.ep is not None:
            held = [i for i in self.blocks if str(i) in model.blocks]
            device = next(model.parameters()).device
            zeros = torch.zeros(len(held), self.experts.count + 3, dtype=torch.float64, device=device)
            model.ep.loads = dict(zip(held, zeros, strict=True))

    def begin(self) -> None:
        """Begin a step, whose forward passes are counted."""
        if self.model.ep is not None:
            for load in self.model.ep.loads.values():
                load.zero_()
            self.model.ep.counting = True

    def end(self, into: Tensor) -> None:
        """End the counting, and add this rank's counts to `into`, (size,) zeros."""
        ep = self.model.ep
        assert ep is not None
        ep.counting = False
        rows = into.view(len(self.blocks), self.experts.count + 3)
        for i, block in enumerate(self.blocks):
            if block in ep.loads:
                rows[i] = ep.loads[block]

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        """Move the balance biases against the load that all ranks counted together, (size,): the same on every rank
        (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy")."""
        rate = self.experts.balance_bias
        if rate is None:
            return
        for i, block in enumerate(self.blocks):
            if str(block) in self.model.blocks:
                load = counts.view(len(self.blocks), -1)[i, : self.experts.count]
                bias = self.model.get_buffer(f"blocks.{block}.mlp.balance")
                bias.add_((load.mean() - load).sign_().to(bias.dtype), alpha=rate)

    def read(self, counts: Sequence[float], tokens: int) -> tuple[LayerLoad, ...]:
        """Convert the counts of all ranks, (size,), to a LayerLoad for each layer; losses are per token."""
        n, width = self.experts.count, self.experts.count + 3
        return tuple(
            LayerLoad(block, tuple(map(int, row[:n])), int(row[n]), row[n + 1] / tokens, row[n + 2] / tokens)
            for block, row in zip(
                self.blocks, (counts[i : i + width] for i in range(0, self.size, width)), strict=True
            )
        )


def summary(loads: Sequence[LayerLoad]) -> dict[str, Any]:
    """Return the fields of a metrics.jsonl line: the busiest expert of any layer over the mean, the share of dropped
    choices, the losses, and the tokens that chose each expert, by layer."""
    chosen = sum(sum(load.chosen) for load in loads)
    return {
        "expert_busiest": max(load.busiest for load in loads),
        "expert_dropped": sum(load.dropped for load in loads) / max(1, chosen),
        "balance_loss": sum(load.balance_loss for load in loads),
        "z_loss": sum(load.z_loss for load in loads),
        "expert_tokens": {load.block: load.chosen for load in loads},
    }


class LoadWatch:
    """Warns of bad expert loads, at most once in `OVER` steps."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._steps: list[Sequence[LayerLoad]] = []

    def step(self, loads: Sequence[LayerLoad]) -> str:
        """Take the loads of a step. Returns the warning that is due, or ""."""
        self._steps.append(loads)
        if len(self._steps) < OVER:
            return ""
        layers, self._steps = list(zip(*self._steps, strict=True)), []
        worst = max(map(_summed_load, layers), key=lambda load: load.busiest)
        chosen = sum(sum(load.chosen) for load in map(_summed_load, layers))
        dropped = sum(_summed_load(layer).dropped for layer in layers) / max(1, chosen)
        warnings = []
        if worst.busiest > BUSY:
            idle = sum(n == 0 for n in worst.chosen)
            at = worst.chosen.index(max(worst.chosen))
            unused = f", {idle} of {len(worst.chosen)} are not chosen at all" if idle else ""
            warnings.append(f"expert {at} of block {worst.block} has {worst.busiest:.1f} times the mean load{unused}")
        if dropped > DROPPED:
            warnings.append(f"{dropped:.0%} of all choices were dropped, capacity = {self._spec.experts.capacity:g}")  # type: ignore[union-attr]
        if not warnings:
            return ""
        return f"experts, last {OVER} steps: {'; '.join(warnings)}; {self._remedy()}"

    def _remedy(self) -> str:
        """Return the setting that would even out the loads."""
        x = self._spec.experts
        assert x is not None
        if x.balance_bias is not None:
            return f"raise model.experts.balance_bias = {x.balance_bias:g}"
        return (
            f"raise model.experts.balance_loss = {x.balance_loss:g}" if x.balance_loss else "set balance_loss = 0.01"
        )


def _summed_load(steps: Sequence[LayerLoad]) -> LayerLoad:
    """Add up a layer's loads over several steps; auxiliary losses are left out."""
    chosen = tuple(map(sum, zip(*(load.chosen for load in steps), strict=True)))
    return LayerLoad(steps[0].block, chosen, sum(load.dropped for load in steps), 0.0, 0.0)
