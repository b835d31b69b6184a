"""The data-parallel engine: gradients in flat buckets, reduced while the backward pass runs; ZeRO stages 0 to 3.

The stage says what is sharded, over dp_shard and cp, and when it is gathered. Experts that several ranks share are
sharded over all that hold the same ones, edp; they have buckets of their own. Communication of a step, in phases:
    forward, backward   stage 3: units' parameters, all-gather just ahead of their use (gathered.py)
    backward            stage 0: all-reduce of every full bucket, once a step
                        stage 1: reduce-scatter of every full bucket, once a step
                        stages 2, 3: the same in every micro-batch
    end of backward     replicas of the shards (HSDP): all-reduce of each shard over dp_replicate, once a step
    optimizer           stages 1, 2: all-gather of the parameters, awaited where the next forward pass needs them

Buckets are issued in their fixed order, never in order of readiness, so that every rank issues alike.
References: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; Rajbhandari et
al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.runtime.autograd.deferred_weight_grads import Grouped, Product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.comm.transport import Call, same_place
from phalanx.runtime.data_parallel.bucket_buffers import Flat, Piece, put, square
from phalanx.runtime.data_parallel.compression import Compressor, Underway, compressor
from phalanx.runtime.data_parallel.zero3 import SHARED, Gathered
from phalanx.schedule.gradients.buckets import Bucket, slot_sizes, slots
from phalanx.spec.job import Precision
from phalanx.spec.strategy.spec import Strategy

Draw = Callable[[Piece], Tensor]
Watch = Callable[[str, Tensor | None, list[tuple[Tensor, Tensor]]], None]


def _call(hook: weakref.WeakMethod[Callable[[str, nn.Parameter], None]], name: str, p: nn.Parameter) -> None:
    method = hook()
    if method is not None:
        method(name, p)


def _release(parameters: list[nn.Parameter]) -> None:
    """The engine is gone: layers give whole gradients again."""
    for p in parameters:
        p.__dict__.pop("rows_beside", None)
        p.__dict__.pop("products_beside", None)


class DataParallel:
    """Sums the gradients of a module's parameters over the data axis. The caller divides by the token count.

    Between `begin` and `finish` each backward pass is announced by `backward`, and its end by `settle`; a plain one
    calls `grad_ready` through hooks. After `finish`, gradients are sums over all micro-batches and replicas: whole at
    stage 0, else this rank's `pieces`. `units`: the modules that gather at once at stage 3, in forward order.
    `chunks`: of a pipeline rank, the buckets that the backward passes of each chunk fill, in order; else all do.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: tuple[Bucket, ...],
        precision: Precision,
        comm: Comm,
        strategy: Strategy,
        units: dict[str, nn.Module],
        chunks: Sequence[Sequence[int]] | None = None,
        lent: tuple[list[int], list[int]] | None = None,
    ) -> None:
        self.comm, self.zero, self.module, self.strategy = comm, strategy.effective_zero, module, strategy
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.buckets = [Flat(b, strategy, comm.index(b.axis(strategy))) for b in buckets]
        self._chunks = [[self.buckets[i] for i in own] for own in chunks or (range(len(self.buckets)),)]
        self._now = self._chunks[0]  # what the backward pass that runs fills
        self._bucket_of = {p.fqn: b for b in self.buckets for p in b.bucket.parameters}
        c = strategy.compressor
        # Codes are made from whole gradients: what travels is the compressor's affair.
        self._reduce = DTYPES[precision.accumulate_dtype if c else precision.reduce_dtype]
        self._last, self._open, self._micro_batch, self._next = False, False, 0, 0
        self._aside = False  # gradients of inputs alone are computed: hooks have nothing to say
        self._under_way: list[Flat] = []  # issued, and not complete
        self._across: list[Flat] = []  # complete, and on their way over the replicas
        self.watch: Watch | None = None  # is shown each gradient, and the rows beside it, before it is reduced
        self.unscale = 1.0  # on gradients before they are compressed: what is kept back must outlive a loss scale
        self._allocate(precision, lent)
        self.compressor: Compressor | None = None
        if c is not None:
            self.compressor = compressor(c, strategy, self.buckets, comm, DTYPES[precision.accumulate_dtype])
        self.gathered = None
        if self.zero == 3:
            keep = strategy.gathers_once
            begins = weakref.WeakMethod(self._issue_before)
            self.gathered = Gathered(module, units, self.buckets, comm, strategy.prefetch, keep, begins)
        elif self.zero:
            self._await_parameters_in(units)
        # The parameter holds its hook outside Python's sight: a strong reference back would never be collected.
        hook = weakref.WeakMethod(self._hook)
        for name, p in self.parameters.items():
            # Rows of a gradient that a layer adds beside the dense one, or in its place (nn/functions.py).
            p.rows_beside = []  # type: ignore[attr-defined]
            p.products_beside = []  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(partial(_call, hook, name))
        weakref.finalize(self, _release, list(self.parameters.values())).atexit = False

    def _allocate(self, precision: Precision, lent: tuple[list[int], list[int]] | None) -> None:
        buffer, compute, master = self.comm.buffer, DTYPES[precision.compute], DTYPES[precision.master_dtype]
        accumulate = DTYPES[precision.accumulate_dtype]
        for b in self.buckets:
            if self.zero <= 1:
                b.whole = buffer(b.padded, accumulate)
                b.sent = b.whole if self._reduce == accumulate else buffer(b.padded, self._reduce)
                b.shard = b.own(b.whole) if self.zero else b.whole
            else:
                b.shard = buffer(b.part, accumulate)
            if self.zero in (1, 2):
                b.weights = buffer(b.padded, compute)
                for name, view in b.views(b.weights).items():
                    self.parameters[name].data = view
                b.master = b.own(b.weights) if master == compute else buffer(b.part, master)
            elif self.zero == 3:
                b.master = buffer(b.part, master)
        self._views = {name: v for b in self.buckets if b.whole is not None for name, v in b.views(b.whole).items()}
        self._slot_of: dict[str, int] = {}
        self._lent: dict[int, tuple[Tensor, Flat | None]] = {}
        if self.zero >= 2:
            sizes = [b.padded for b in self.buckets]
            turns, largest = lent or (slots(sizes), slot_sizes(sizes))
            self._slot_of = {b.name: s for b, s in zip(self.buckets, turns, strict=True)}
            self._lent = {s: (buffer(n, self._reduce), None) for s, n in enumerate(largest) if n}

    def _await_parameters_in(self, units: dict[str, nn.Module]) -> None:
        """Stages 1, 2: a unit's forward pass waits for the buckets that hold its parameters."""
        this = weakref.ref(self)

        def wait(needed: list[str], *_: object) -> None:
            engine = this()
            if engine is not None:
                engine.wait_parameters(needed)

        inside = {id(p) for unit in units.values() for p in unit.parameters()}
        for unit in units.values():
            mine = {id(p) for p in unit.parameters()}
            unit.register_forward_pre_hook(partial(wait, [n for n, p in self.parameters.items() if id(p) in mine]))
        rest = [n for n, p in self.parameters.items() if id(p) not in inside]
        self.module.register_forward_pre_hook(partial(wait, rest))

    def wait_parameters(self, names: list[str]) -> None:
        """That the parameters of these names are gathered."""
        for name in names:
            bucket = self._bucket_of[name]
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def pieces(self) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """(piece, master, gradient) of what this rank updates, stages 1 to 3."""
        for b in self.buckets:
            assert b.master is not None
            assert b.shard is not None
            for piece in b.pieces():
                yield piece, piece.of(b.master), piece.of(b.shard)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of every parameter, whole: views at stage 0, gathered by all ranks together else."""
        for b in self.buckets:
            assert b.shard is not None
            yield from b.views(b.shard if self.zero == 0 else self.whole(b, b.shard)).items()

    def whole(self, b: Flat, shard: Tensor) -> Tensor:
        """A bucket's flat buffer from all ranks' parts of it. Outside of a step: not recorded."""
        ranks = self.comm.ranks(b.axis)
        flat = shard.new_empty(shard.numel() * len(ranks))
        self.comm.start(Call("all_gather", ranks, self.comm.index(b.axis), shard.contiguous(), flat)).wait()
        return flat

    def start(self, draw: Draw | None) -> None:
        """Set the parameters: stages 1 to 3 from `draw`, piece by piece; at stage 0 the axis's first rank's are
        everybody's."""
        if self.zero == 0:
            for name, p in self.parameters.items():
                self.comm.broadcast(p.detach(), self._bucket_of[name].axis)
        elif draw is not None:
            for piece, master, _ in self.pieces():
                master.copy_(draw(piece))
            self.updated()
        for tensor in self.module.buffers():
            self.comm.broadcast(tensor, self.comm.mesh.gradient_axis)

    def updated(self) -> None:
        """The masters have changed: stages 1 and 2 send the parameters round, those needed first first; at stage 3
        what is whole is so no more."""
        if self.gathered is not None:
            self.gathered.end_of_step()
        if self.zero not in (1, 2):
            return
        for b in reversed(self.buckets):
            assert b.weights is not None
            assert b.master is not None
            own = b.own(b.weights)
            if not same_place(own, b.master):
                own.copy_(b.master)
            b.gathering = self.comm.all_gather(b.weights, own, b.axis, unit=b.name, phase="opt")

    def begin(self) -> None:
        """Start a step: nothing has arrived, nothing is issued."""
        for b in self.buckets:
            b.touched.clear()
            b.left = sum(b in own for own in self._chunks)
            if b.whole is not None:
                b.whole[b.bucket.numel :].zero_()
            elif b.shard is not None:
                b.shard.zero_()
        for p in self.parameters.values():
            p.grad = None
            p.rows_beside.clear()  # type: ignore[attr-defined]
            p.products_beside.clear()  # type: ignore[attr-defined]
        self._micro_batch, self._open = -1, False

    def forward(self, micro_batch: int) -> None:
        """Announce a forward pass."""
        if self.gathered is not None:
            self.gathered.micro_batch(micro_batch)

    def backward(self, micro_batch: int, last: bool, chunk: int = 0) -> None:
        """Announce the backward pass of a micro-batch through a chunk, its `last` one of the step or not."""
        self._micro_batch, self._last, self._open = micro_batch, last, True
        self._now, self._next = self._chunks[chunk], 0
        for b in self._now:
            b.missing = len(b.bucket.parameters)
            b.arrived.clear()
        if self.gathered is not None:
            self.gathered.micro_batch(micro_batch)

    def inputs(self, micro_batch: int) -> None:
        """Announce a backward pass that leaves the gradients of weights for later: `backward`, and `take` of each."""
        self._aside = True
        if self.gathered is not None:
            self.gathered.micro_batch(micro_batch)

    def inputs_over(self) -> None:
        """That pass is over."""
        self._aside = False

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        if self._aside:
            return
        if not self._open:
            raise RuntimeError(f"{name} got a gradient in a backward pass that the engine was not told of")
        rows, products = parameter.rows_beside, parameter.products_beside  # type: ignore[attr-defined]
        self.take(name, products.pop() if products else parameter.grad, rows)
        rows.clear()
        parameter.grad = None

    def take(self, name: str, grad: Tensor | Product | Grouped | None, rows: list[tuple[Tensor, Tensor]]) -> None:
        """A parameter's gradient of this micro-batch: a dense part, if there is one, and rows of it."""
        bucket = self._bucket_of[name]
        if self.watch is not None:
            grad = grad.made() if isinstance(grad, Product | Grouped) else grad
            self.watch(name, grad, rows)
        place = self._views[name] if self.zero <= 1 else self._view(bucket, name)
        put(place, grad, rows, add=self.zero <= 1 and name in bucket.touched)
        bucket.touched.add(name)
        self.grad_ready(name)

    def _view(self, bucket: Flat, name: str) -> Tensor:
        """Where a parameter's gradient goes in the memory that is lent to its bucket."""
        if bucket.sent is None:
            slot = self._slot_of[bucket.name]
            memory, user = self._lent[slot]
            if user is not None and user.handle is not None:
                self._complete(user)
                user = None
            if user is None:
                self._lent[slot] = (memory, bucket)
            else:  # it fills still, out of turn: a bucket that others overtake
                memory = self.comm.buffer(bucket.padded, self._reduce)
            bucket.lend(memory[: bucket.padded])
        return bucket.places[name]

    def grad_ready(self, name: str) -> None:
        """A parameter's gradient of this micro-batch is complete. Raises RuntimeError where it is so twice."""
        if not self._last and self.zero <= 1:
            return
        bucket = self._bucket_of[name]
        if bucket not in self._now:  # of several chunks, another of which is the last to finish
            return
        if name in bucket.arrived:
            raise RuntimeError(f"the gradient of {name} came twice in one backward pass (reentrant checkpointing?)")
        bucket.arrived.add(name)
        bucket.missing -= 1
        while self._next < len(self._now) and self._now[self._next].missing == 0:
            self._issue()

    def _issue_before(self, name: str) -> None:
        """Stage 3: a unit's backward pass begins, so those issued before it have had theirs. What has no gradient on
        this rank gets none; others may have had it earlier, but before the next gathering too."""
        order = [b.bucket.unit for b in self._now]
        before = order.index(name) if name in order else 0
        if before and order[before - 1] == SHARED:  # which this unit uses
            before -= 1
        while self._open and self._next < before:
            self._issue()

    def _issue(self) -> None:
        b = self._now[self._next]
        b.left -= self._last
        if self.zero <= 1:
            for p in b.bucket.parameters:
                if p.fqn not in b.touched:
                    self._views[p.fqn].zero_()
        else:
            for earlier in self._under_way[-1:]:
                self._complete(earlier)
            for p in b.bucket.parameters:
                if p.fqn not in b.arrived:
                    self._view(b, p.fqn).zero_()
            if self.gathered is not None:
                self.gathered.release(b.name)
        assert b.sent is not None
        if b.whole is not None and b.sent is not b.whole:
            b.sent.copy_(b.whole)
        if self.compressor is not None:
            if self.unscale != 1.0:
                b.sent.mul_(self.unscale)
            for earlier in self._under_way:
                if isinstance(earlier.handle, Underway):
                    earlier.handle.advance()
            b.handle = Underway(self.compressor.reduce(b, self._micro_batch))
        elif self.zero == 0:
            b.handle = self.comm.all_reduce(b.sent, b.axis, unit=b.name, phase="B", micro_batch=self._micro_batch)
        else:
            b.handle = self.comm.reduce_scatter(
                b.own(b.sent), b.sent, b.axis, unit=b.name, phase="B", micro_batch=self._micro_batch
            )
        self._next += 1
        self._under_way.append(b)

    def _complete(self, b: Flat) -> None:
        """Wait for a bucket's reduction, and put the result where it is accumulated."""
        if b.handle is None:
            return
        b.handle.wait()
        b.handle = None
        self._under_way.remove(b)
        assert b.sent is not None
        assert b.shard is not None
        if self.zero == 0:
            if b.sent is not b.whole:
                b.shard.copy_(b.sent)
            return
        own = b.own(b.sent)
        if self.zero >= 2:
            b.shard.add_(own)
            b.sent = None
            slot = self._slot_of[b.name]
            if self._lent[slot][1] is b:
                self._lent[slot] = (self._lent[slot][0], None)
        elif not same_place(own, b.shard):
            b.shard.copy_(own)
        if b.left or not b.across_replicas:
            return
        self._across.append(b)
        if self.compressor is not None:
            b.across = Underway(self.compressor.across(b, self._micro_batch))
        else:
            b.across = self.comm.all_reduce(
                b.shard, "dp_replicate", unit=b.name, phase="B", micro_batch=self._micro_batch
            )

    def settle(self) -> None:
        """A backward pass is over: reduce what is left, parameters without a gradient among it. Stages 2, 3: wait for
        it, before anything is gathered again: which gradients came is another on each rank."""
        if self._open and (self._last or self.zero >= 2):
            while self._next < len(self._now):
                self._issue()
        if self.zero >= 2:
            self._complete_all()
        self._open = False

    def _complete_all(self) -> None:
        for b in list(self._under_way):
            self._complete(b)

    def finish(self) -> None:
        """The end of the last backward pass: gradients are complete. Weights that no forward pass has waited for are
        here, for the update writes where they are sent from, and the next ones arrive where they do."""
        self.settle()
        self._complete_all()
        self.wait_parameters(list(self.parameters))
        for b in self._across:
            assert b.across is not None
            b.across.wait()
            b.across = None
        self._across.clear()
        if self.gathered is not None:
            self.gathered.end_of_step()

    def norm_square(self) -> Tensor:
        """The square of the 2-norm of this rank's gradients, fp64: whole at stage 0, else its share of the sum over
        the world."""
        squares = [square(b.shard) for b in self.buckets if b.shard is not None]
        return torch.stack(squares).sum() / (self.strategy.dp_replicate if self.zero else 1)

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        if factor != 1.0:
            torch._foreach_mul_([b.shard for b in self.buckets], factor)
