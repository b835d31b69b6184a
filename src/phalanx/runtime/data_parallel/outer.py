"""Replicas that take steps alone (strategy.local), and the update that brings them together: local SGD and DiLoCo.

A replica steps H times on gradients of its own tokens; nothing moves between replicas. At the end of the H-th step

    d_r  = before - after             the change of replica r's parameters, the gradient of the outer optimizer
    d    = mean of d_r over r         one all-reduce over dp_local for each bucket; compressed, what its compressor
                                      sends, and a residual of each replica
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

from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression import compressor
from phalanx.runtime.data_parallel.compression.over import Over
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.data_parallel.logical_state import REPLICA
from phalanx.schedule.gradients.compression import outer_reduction
from phalanx.spec.optimizers import OuterOptimizer


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
        self.replica = engine.comm.index("dp_local")
        self.compressor, self._changes = None, list[FlatBucket]()
        self.residual: dict[str, Tensor] = {}
        c = engine.strategy.outer_compressor
        if c is not None:
            alone, cut = outer_reduction([b.bucket for b in engine.buckets], engine.strategy)
            self._changes = [FlatBucket(b, alone, engine.comm.index("dp_local")) for b in cut]
            for change, b in zip(self._changes, engine.buckets, strict=True):
                change.sent = b.shard
            dtype = next(b.sent.dtype for b in self._changes if b.sent is not None)
            self.compressor = compressor(c, Over("dp_local", phase="opt"), self._changes, engine.comm, dtype)
            for change, b in zip(self._changes, engine.buckets, strict=True):
                for kept in self.compressor.kept(change)[:1]:
                    pieces = {piece.parameter.fqn: piece.of(kept) for piece in b.pieces()}
                    self.residual |= pieces if engine.sharding.state else b.views(kept)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Set the masters of all replicas to the outer optimizer's update; all replicas together."""
        comm = self.engine.comm
        for name, master in self.masters.items():
            torch.sub(self.before[name], master, out=self.gradients[name])
        self._reduce()
        lr, decay, replicas = self.rule.lr, self.rule.momentum, comm.size("dp_local")
        for name, master in self.masters.items():
            before, change = self.before[name], self.gradients[name].div_(replicas)
            if decay:
                momentum = self.momentum[name].mul_(decay).add_(change)
                before.add_(momentum, alpha=-lr * decay if self.rule.nesterov else -lr)
            if not decay or self.rule.nesterov:
                before.add_(change, alpha=-lr)
            master.copy_(before)

    def _reduce(self) -> None:
        """Sum the changes over the replicas, in place."""
        if self.compressor is None:
            shards = [(b.name, b.shard) for b in self.engine.buckets if b.shard is not None]
            reduce = self.engine.comm.all_reduce
            for handle in [reduce(shard, "dp_local", unit=name, phase="opt") for name, shard in shards]:
                handle.wait()
            return
        for change in self._changes:
            for handle in self.compressor.reduce(change, None):
                handle.wait()
            self.compressor.settle(change)

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """What checkpoints hold, by prefix and parameter, live (logical_state.py)."""
        return {"outer": self.momentum, f"{REPLICA}{self.replica}.residual": self.residual}

    @torch.no_grad()
    def loaded(self, step: int) -> None:
        """Start from the masters of the checkpoint of `step`, which was written after a synchronisation."""
        if self.compressor is not None:
            self.compressor.draws = step // self.engine.strategy.local * len(self._changes)
        for name, before in self.before.items():
            before.copy_(self.masters[name])
