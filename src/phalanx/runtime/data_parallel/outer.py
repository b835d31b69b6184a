"""Replicas that take steps alone (strategy.local), and the update that brings them together: local SGD and DiLoCo.

A replica steps H times on gradients of its own tokens; nothing moves between replicas. At the end of the H-th step

    d_r  = before - after             the change of replica r's parameters, the gradient of the outer optimizer
    d    = mean of d_r over r         one all-reduce over dp_local for each bucket
    m    = momentum x m + d
    new  = before - lr x (d + momentum x m)        Nesterov's; before - lr x m without

and all replicas go on from `new`. The optimizer state of each replica stays its own. The changes lie in the memory of
the gradients, which the inner optimizer has just used, so a synchronisation allocates nothing.

References: Stich 2019, "Local SGD Converges Fast and Communicates Little"; Douillard et al. 2023, "DiLoCo:
Distributed Low-Communication Training of Language Models", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.optimizers import OuterOptimizer

OUTER = "outer"
"""Name of the outer optimizer in terms and checkpoints."""


class OuterUpdate:
    """The outer optimizer over a rank's masters. `gradients`: views of the engine's shards, one for each master."""

    def __init__(
        self,
        engine: DataParallel,
        masters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rule: OuterOptimizer,
    ) -> None:
        self.engine, self.masters, self.gradients, self.rule = engine, masters, gradients, rule
        self.before = {name: master.detach().clone() for name, master in masters.items()}
        self.momentum = {name: torch.zeros_like(t) for name, t in self.before.items()} if rule.momentum else {}

    @torch.no_grad()
    def synchronise(self) -> None:
        """Set the masters of all replicas to the outer optimizer's update; all replicas together."""
        comm = self.engine.comm
        for name, master in self.masters.items():
            torch.sub(self.before[name], master, out=self.gradients[name])
        handles = [
            comm.all_reduce(b.shard, "dp_local", unit=b.name, phase="opt")
            for b in self.engine.buckets
            if b.shard is not None
        ]
        for handle in handles:
            handle.wait()
        lr, decay, replicas = self.rule.lr, self.rule.momentum, comm.size("dp_local")
        for name, master in self.masters.items():
            before, change = self.before[name], self.gradients[name].div_(replicas)
            if decay:
                momentum = self.momentum[name].mul_(decay).add_(change)
                before.add_(momentum, alpha=-lr * decay if self.rule.nesterov else -lr)
            if not decay or self.rule.nesterov:
                before.add_(change, alpha=-lr)
            master.copy_(before)

    @torch.no_grad()
    def loaded(self) -> None:
        """Start from the masters of a checkpoint, which was written after a synchronisation."""
        for name, before in self.before.items():
            before.copy_(self.masters[name])
