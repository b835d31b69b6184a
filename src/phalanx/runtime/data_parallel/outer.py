"""Replicas that take steps alone (strategy.local), and the update that brings them together: local SGD and DiLoCo.

A replica steps H times on gradients of its own tokens; nothing moves between replicas. At the end of the H-th step

    d_r  = before - after             the change of replica r's parameters, the gradient of the outer optimizer
    d    = mean of d_r over r         one all-reduce over dp_local for each bucket; compressed, what its compressor
                                      sends, and a residual of each replica
    m    = momentum x m + d
    new  = before - lr x (d + momentum x m)        Nesterov's; before - lr x m without

and all replicas go on from `new`. The optimizer state of each replica stays its own. The changes lie in the memory of
the gradients, which the inner optimizer has just used, so a synchronisation allocates nothing.

With `fragments`, parts of the model do so in turn, each once in H steps; `before` is then the last `new` of each.
With a `delay` of t, d is sent t steps before it is applied, and travels while replicas go on; with `mix`, a replica
goes on from new + mix x (its own parameters - new).

References: Stich 2019, "Local SGD Converges Fast and Communicates Little"; Douillard et al. 2023, "DiLoCo:
Distributed Low-Communication Training of Language Models", algorithm 1; Douillard et al. 2025, "Streaming DiLoCo with
overlapping communication: Towards a Distributed Free Lunch", algorithm 2.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression import Compressor, compressor
from phalanx.runtime.data_parallel.compression.over import ReductionAxes
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.data_parallel.logical_state import BEFORE, REPLICA
from phalanx.schedule.gradients.compression import outer_reduction
from phalanx.spec.optimizers import OuterOptimizer
from phalanx.spec.strategy.compressors import Compression


class OuterUpdate:
    """The outer optimizer over a rank's masters. `gradients`: views of the engine's shards, one for each master."""

    def __init__(
        self,
        engine: DataParallel,
        masters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rule: OuterOptimizer,
    ) -> None:
        self.engine, self.masters, self.rule = engine, masters, rule
        self.local, self.replica = engine.strategy.local, engine.comm.index("dp_local")
        self.before = {name: master.detach().clone() for name, master in masters.items()}
        self.momentum = {name: torch.zeros_like(t) for name, t in self.before.items()} if rule.momentum else {}
        self.residual: dict[str, Tensor] = {}
        self._handles: list[Handle] = []
        # Where changes lie until they are applied: (name of the bucket, shard), and views of it for each master.
        self._shards = {b.name: b.shard for b in engine.buckets}
        self.changes = dict(gradients)
        if rule.delay:
            self._set_apart()
        self.compressor: Compressor | None = None
        self._compressed: dict[str, FlatBucket] = {}
        if engine.strategy.outer_compressor is not None:
            self._compress(engine.strategy.outer_compressor)

    def _set_apart(self) -> None:
        """Give changes memory of their own, since the next steps use that of the gradients: one fragment's."""
        buckets, sizes = self.engine.buckets, [0] * self.rule.fragments
        ends = {}
        for b in buckets:
            sizes[b.bucket.fragment] += len(self._shards[b.name])
            ends[b.name] = sizes[b.bucket.fragment]
        memory = self.engine.comm.buffer(max(sizes), self._shards[buckets[0].name].dtype)
        for b in buckets:
            n = len(self._shards[b.name])
            self._shards[b.name] = memory[ends[b.name] - n : ends[b.name]]
            self.changes |= self._views(b, self._shards[b.name])

    def _views(self, b: FlatBucket, shard: Tensor) -> dict[str, Tensor]:
        """Return views of the masters' elements in a shard."""
        if self.engine.sharding.state:
            return {piece.parameter.fqn: piece.of(shard) for piece in b.pieces()}
        return b.views(shard)

    def _compress(self, c: Compression) -> None:
        strategy, comm = self.engine.strategy, self.engine.comm
        alone, cut = outer_reduction([b.bucket for b in self.engine.buckets], strategy)
        self._compressed = {b.name: FlatBucket(b, alone, self.replica) for b in cut}
        for name, flat in self._compressed.items():
            flat.sent = self._shards[name]
        dtype, over = self._shards[cut[0].name].dtype, ReductionAxes("dp_local", phase="opt")
        self.compressor = compressor(c, over, list(self._compressed.values()), comm, dtype)
        for b in self.engine.buckets:
            for kept in self.compressor.kept(self._compressed[b.name])[:1]:
                self.residual |= self._views(b, kept)

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Send and apply the changes that are due at the end of step number `step` since replicas synchronised; all
        replicas together."""
        sent, applied = self.rule.sent(step, self.local), self.rule.applied(step, self.local)
        if sent is not None:
            self._send([b for b in self.engine.buckets if b.bucket.fragment == sent])
        if applied is not None:
            self.wait()
            self._apply([b for b in self.engine.buckets if b.bucket.fragment == applied])

    def _masters_of(self, buckets: Sequence[FlatBucket]) -> list[str]:
        return [p.fqn for b in buckets for p in b.bucket.parameters if p.fqn in self.masters]

    def _send(self, buckets: Sequence[FlatBucket]) -> None:
        """Sum the changes over the replicas, in place; uncompressed, only start to, and `wait` completes it."""
        if self.compressor is not None and self.rule.delay:
            for b in buckets:  # whose padding holds what another fragment left, and would be coded with the rest
                self._shards[b.name].zero_()
        for name in self._masters_of(buckets):
            torch.sub(self.before[name], self.masters[name], out=self.changes[name])
        if self.compressor is None:
            reduce = self.engine.comm.all_reduce
            self._handles = [reduce(self._shards[b.name], "dp_local", unit=b.name, phase="opt") for b in buckets]
            return
        for b in buckets:
            for handle in self.compressor.reduce(self._compressed[b.name], None):
                handle.wait()
            self.compressor.settle(self._compressed[b.name])

    def wait(self) -> None:
        """Wait for the changes that are under way."""
        for handle in self._handles:
            handle.wait()
        self._handles = []

    def _apply(self, buckets: Sequence[FlatBucket]) -> None:
        """Set the masters of all replicas to the outer optimizer's update."""
        lr, decay, replicas = self.rule.lr, self.rule.momentum, self.engine.comm.size("dp_local")
        for name in self._masters_of(buckets):
            before, change, master = self.before[name], self.changes[name].div_(replicas), self.masters[name]
            if decay:
                momentum = self.momentum[name].mul_(decay).add_(change)
                before.add_(momentum, alpha=-lr * decay if self.rule.nesterov else -lr)
            if not decay or self.rule.nesterov:
                before.add_(change, alpha=-lr)
            if self.rule.mix:
                master.lerp_(before, 1 - self.rule.mix)
            else:
                master.copy_(before)

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors that checkpoints hold, by prefix and parameter (logical_state.py)."""
        apart = {BEFORE: self.before} if self.rule.apart else {}
        return {"outer": self.momentum, f"{REPLICA}{self.replica}.residual": self.residual, **apart}

    @torch.no_grad()
    def loaded(self, step: int) -> None:
        """Go on from the checkpoint of `step`, which was written after the last synchronisation of a period."""
        if self.compressor is not None:
            self.compressor.draws = step // self.engine.strategy.local * len(self._compressed)
        for name, before in self.before.items() if BEFORE not in self.state else ():
            before.copy_(self.masters[name])
