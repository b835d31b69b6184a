"""The oracle of replicas that take steps alone: one process that brings whole replicas together by torch's own SGD.

Compressed changes it sums as the replicas do, bucket by bucket and shard by shard: a compressor for each replica,
whose collectives meet in memory.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from phalanx.runtime.comm.transport import DONE, Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression import Compressor, compressor
from phalanx.runtime.data_parallel.compression.over import ReductionAxes
from phalanx.schedule.gradients.buckets import buckets, fragment
from phalanx.schedule.gradients.compression import outer_reduction
from phalanx.spec.model.spec import parameters
from phalanx.spec.optimizers import OuterOptimizer
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training


class OuterOracle:
    """The outer optimizer over whole replicas in one process. `strategy`: the ranks' own."""

    def __init__(self, replicas: list[Training], rule: OuterOptimizer, strategy: Strategy) -> None:
        self.replicas, self.rule, self.local = replicas, rule, strategy.local
        spec = replicas[0].spec
        self.fragments = {p.fqn: fragment(p, spec, rule.fragments) for p in parameters(spec)}
        self.sent: dict[str, Tensor] = {}
        self.before = {name: t.detach().clone() for name, t in replicas[0].masters.items()}
        nesterov = rule.nesterov and rule.momentum > 0
        self.optimizer = torch.optim.SGD(self.before.values(), rule.lr, rule.momentum, nesterov=nesterov)
        self.compressed = None
        if strategy.outer_compressor is not None:
            self.compressed = _CompressedChanges(replicas[0], strategy)

    @torch.no_grad()
    def after(self, step: int) -> dict[str, Tensor]:
        """Send and apply the changes due at the end of `step`, counted within `strategy.local`. Returns the mean
        change of each parameter that is sent and applied at once, which the ranks hold in place of its gradient."""
        sent, applied = self.rule.sent(step, self.local), self.rule.applied(step, self.local)
        if sent is not None:
            self.sent = self._mean({name: t for name, t in self.before.items() if self.fragments[name] == sent}, sent)
        if applied is None:
            return {}
        for name, before in self.before.items():
            before.grad = self.sent.get(name)
        self.optimizer.step()
        for one in self.replicas:
            for name in self.sent:
                one.masters[name].lerp_(self.before[name], 1 - self.rule.mix)
        return {} if self.rule.delay else self.sent

    def _mean(self, before: dict[str, Tensor], sent: int) -> dict[str, Tensor]:
        changes = [{name: t - one.masters[name] for name, t in before.items()} for one in self.replicas]
        total = {name: sum((c[name] for c in changes), torch.zeros_like(t)) for name, t in before.items()}
        if self.compressed is not None:
            total = self.compressed.sums(changes, sent)
        return {name: t / len(self.replicas) for name, t in total.items()}


class _CompressedChanges:
    """The compressors of every shard of every replica."""

    def __init__(self, one: Training, strategy: Strategy) -> None:
        cut, ranks = buckets(one.spec, one.job, strategy), strategy.dp_local
        alone, parts = outer_reduction(cut, strategy)
        self.whole = [FlatBucket(b, strategy, 0) for b in cut]
        dtype = next(iter(one.masters.values())).dtype
        self.shards: list[tuple[list[FlatBucket], list[Compressor], _Meeting]] = []
        assert strategy.outer_compressor is not None
        for _ in range(strategy.shards):
            meeting, flats = _Meeting(ranks), [FlatBucket(b, alone, 0) for b in parts]
            comms: list[Any] = [meeting.comm(rank) for rank in range(ranks)]
            over = ReductionAxes("dp_local")
            each = [compressor(strategy.outer_compressor, over, flats, comm, dtype) for comm in comms]
            self.shards.append((flats, each, meeting))

    def sums(self, changes: list[dict[str, Tensor]], sent: int) -> dict[str, Tensor]:
        """Return the sum of the replicas' changes of the fragment `sent` as compression passes it on."""
        result: dict[str, Tensor] = {}
        for at, b in [(at, b) for at, b in enumerate(self.whole) if b.bucket.fragment == sent]:
            flat = [torch.zeros(b.padded, dtype=next(iter(c.values())).dtype) for c in changes]
            for change, of_replica in zip(changes, flat, strict=True):
                for name, view in b.views(of_replica).items():
                    view.copy_(change[name])
            for index, (flats, each, meeting) in enumerate(self.shards):
                under_way = []
                for one, of_replica in zip(each, flat, strict=True):
                    flats[at].sent = of_replica.chunk(len(self.shards))[index]
                    under_way.append(one.reduce(flats[at], None))
                meeting.run(under_way)
                for one in each:
                    one.settle(flats[at])
            result |= b.views(flat[0])
        return result


class _Meeting:
    """Collectives of several ranks in one process: each rank's call waits until all have made theirs."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.calls = ranks, list[tuple[str, tuple[Tensor, ...]]]()

    def comm(self, rank: int) -> SimpleNamespace:
        """Return a rank's Comm, with the members that a compressor uses."""

        def call(op: str) -> Any:
            def issue(*arguments: Any, **_: Any) -> Handle:
                self.calls.append((op, tuple(a for a in arguments if isinstance(a, Tensor))))
                return DONE

            return issue

        ops = {op: call(op) for op in ("all_reduce", "all_gather", "all_to_all")}
        return SimpleNamespace(
            world=SimpleNamespace(rank=rank, device=torch.device("cpu")),
            size=lambda _: self.ranks,
            ranks=lambda _: tuple(range(self.ranks)),
            buffer=lambda n, dtype: torch.empty(n, dtype=dtype),
            **ops,
        )

    def run(self, under_way: list[Iterator[Handle]]) -> None:
        """Run the reductions of all ranks, one collective of each at a time."""
        while any([next(stages, None) is not None for stages in under_way]):
            (op, *_), calls = self.calls[0], [tensors for _, tensors in self.calls]
            self.calls.clear()
            if op == "all_reduce":
                total = torch.stack([t for (t,) in calls]).sum(0)
                for (t,) in calls:
                    t.copy_(total)
            elif op == "all_gather":
                gathered = torch.cat([own.clone() for _, own in calls])
                for out, _ in calls:
                    out.copy_(gathered)
            else:
                parts = [send.chunk(self.ranks) for _, send in calls]
                for rank, (receive, _) in enumerate(calls):
                    receive.copy_(torch.cat([of_rank[rank] for of_rank in parts]))
