"""The data-parallel engine: gradients in flat buckets, reduced while the backward pass runs; zero 0 to 3.

`zero` says what is sharded, over dp_shard and cp, and when it is gathered. Experts have buckets of their own,
sharded over edp, the ranks that hold the same experts. Communication of a step, in phases:

    forward, backward   zero 3: units' parameters, all-gather just ahead of their use (zero3.py)
    backward            zero 0: all-reduce of every full bucket, once a step
                        zero 1: reduce-scatter of every full bucket, once a step
                        zero 2, 3: the same in every micro-batch
    end of backward     replicas of the shards (HSDP): all-reduce of each shard over dp_replicate, once a step
    optimizer           zero 1, 2: all-gather of the parameters, awaited where the next forward pass needs them

Buckets are issued in a fixed order, never in order of readiness, so that all ranks issue the same sequence.
References: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; Rajbhandari et
al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.runtime.autograd.deferred_weight_grads import GroupedProduct, Product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.comm.transport import Call, same_place
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket, Piece, square, write_gradient
from phalanx.runtime.data_parallel.compression import CompressedReduction, Compressor, compressor
from phalanx.runtime.data_parallel.compression.over import reduction_axes
from phalanx.runtime.data_parallel.zero3 import SHARED, ParameterGatherer
from phalanx.schedule.gradients.buckets import Bucket, slot_sizes, slots
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.spec.job import Precision
from phalanx.spec.strategy.spec import Strategy

Draw = Callable[[Piece], Tensor]
Watch = Callable[[str, Tensor | None, list[tuple[Tensor, Tensor]]], None]


def _call(hook: weakref.WeakMethod[Callable[[str, nn.Parameter], None]], name: str, p: nn.Parameter) -> None:
    method = hook()
    if method is not None:
        method(name, p)


def _release(parameters: list[nn.Parameter]) -> None:
    """Make layers return full gradients to autograd again, when their engine is gone."""
    for p in parameters:
        p.__dict__.pop("gradient_rows", None)
        p.__dict__.pop("gradient_products", None)
        p.__dict__.pop("in_8_bits", None)


class DataParallel:
    """Sums the gradients of a module's parameters over the data axis. The caller divides by the token count.

    Between `begin` and `finish` the caller announces each backward pass by `backward`, and its end by `settle`; hooks
    take the gradients between. After `finish`, gradients are sums over all micro-batches and replicas: unsharded with
    zero=0, else this rank's `pieces`. `units`: modules whose parameters ZeRO-3 gathers at once, in forward order.
    `chunks`: for each chunk of a pipeline rank, the buckets that its backward passes fill, in order; by default one
    chunk fills all. `slot_plan`: (buffer of each bucket, elements of each buffer) for gradients in flight under
    ZeRO-2 and 3.
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
        slot_plan: tuple[list[int], list[int]] | None = None,
    ) -> None:
        self.comm, self.sharding, self.module, self.strategy = comm, sharding_of(strategy), module, strategy
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.buckets = [FlatBucket(b, strategy, comm.index(b.axis(strategy))) for b in buckets]
        self._chunks = [[self.buckets[i] for i in own] for own in chunks or (range(len(self.buckets)),)]
        self._now = self._chunks[0]  # buckets that the current backward pass fills
        self._bucket_of = {p.fqn: b for b in self.buckets for p in b.bucket.parameters}
        c = strategy.compressor
        # A compressor reads gradients in the accumulate type and decides itself what travels.
        self._reduce = DTYPES[precision.accumulate_dtype if c else precision.reduce_dtype]
        self._last, self._open, self._micro_batch, self._next = False, False, 0, 0
        self._deferring = False  # weight gradients are deferred: hooks ignore gradients
        self._under_way: list[FlatBucket] = []  # issued, not complete
        self._across: list[FlatBucket] = []  # complete, being reduced over the replicas of the shard
        self.watch: Watch | None = None  # receives each gradient, and its rows, before the reduction
        self.unscale = 1.0  # factor on gradients before compression: residuals must outlive a loss scale
        self._allocate(precision, slot_plan)
        self.compressor: Compressor | None = None
        if c is not None:
            self.compressor = compressor(
                c, reduction_axes(strategy, comm.mesh), self.buckets, comm, DTYPES[precision.accumulate_dtype]
            )
        self.gathered = None
        if self.sharding.parameters:
            keep = self.sharding.keeps_gathered
            begins: weakref.WeakMethod[Callable[[Callable[[str], bool]], None]] = weakref.WeakMethod(
                self._issue_before
            )
            self.gathered = ParameterGatherer(
                module, units, self.buckets, comm, strategy.prefetch, keep, begins, precision
            )
        elif self.sharding.state:
            self._await_parameters_in(units)
        # Python cannot see that a parameter holds its hook: a strong reference back would never be collected.
        hook: weakref.WeakMethod[Callable[[str, nn.Parameter], None]] = weakref.WeakMethod(self._hook)
        for name, p in self.parameters.items():
            # Gradient rows or products that a layer delivers alongside, or in place of, a dense gradient
            # (nn/functional.py).
            p.gradient_rows = []  # type: ignore[attr-defined]
            p.gradient_products = []  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(partial(_call, hook, name))
        weakref.finalize(self, _release, list(self.parameters.values())).atexit = False

    def _allocate(self, precision: Precision, slot_plan: tuple[list[int], list[int]] | None) -> None:
        buffer, compute, master = self.comm.buffer, DTYPES[precision.compute], DTYPES[precision.master_dtype]
        accumulate = DTYPES[precision.accumulate_dtype]
        # Gradients, weights and masters of each bucket.
        for b in self.buckets:
            if self.sharding.reduces_each:
                b.shard = buffer(b.part, accumulate)
            else:
                b.gradients = buffer(b.padded, accumulate)
                b.sent = b.gradients if self._reduce == accumulate else buffer(b.padded, self._reduce)
                b.shard = b.own(b.gradients) if self.sharding.state else b.gradients
            if self.sharding.updates_gather:
                b.weights = buffer(b.padded, compute)
                for name, view in b.views(b.weights).items():
                    self.parameters[name].data = view
                b.master = b.own(b.weights) if master == compute else buffer(b.part, master)
            elif self.sharding.parameters:
                b.master = buffer(b.part, master)
        self._views = {
            name: v for b in self.buckets if b.gradients is not None for name, v in b.views(b.gradients).items()
        }
        # Buffers for gradients in flight, used in turn.
        self._slot_of: dict[str, int] = {}
        self._slots: dict[int, tuple[Tensor, FlatBucket | None]] = {}
        if self.sharding.reduces_each:
            sizes = [b.padded for b in self.buckets]
            turns, largest = slot_plan or (slots(sizes), slot_sizes(sizes))
            self._slot_of = {b.name: s for b, s in zip(self.buckets, turns, strict=True)}
            self._slots = {s: (buffer(n, self._reduce), None) for s, n in enumerate(largest) if n}

    def _await_parameters_in(self, units: dict[str, nn.Module]) -> None:
        """Make each unit's forward pass wait for the buckets that hold its parameters (zero 1, 2)."""
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
        """Wait until the parameters of these names are gathered."""
        for name in names:
            bucket = self._bucket_of[name]
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def pieces(self) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Yield (piece, master, gradient) for each piece that this rank updates with zero >= 1; flat tensors."""
        for b in self.buckets:
            for piece in b.pieces():
                yield piece, piece.of(b.master), piece.of(b.shard)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) of every parameter, unsharded: views with zero=0; else gathered, all ranks
        together."""
        for b in self.buckets:
            yield from b.views(self.gather_bucket(b, b.shard) if self.sharding.state else b.shard).items()

    def gather_bucket(self, b: FlatBucket, shard: Tensor) -> Tensor:
        """Gather a bucket's flat buffer from all ranks' shards of it. Used outside of steps, so not recorded."""
        ranks = self.comm.ranks(b.axis)
        flat = shard.new_empty(shard.numel() * len(ranks))
        self.comm.start(Call("all_gather", ranks, self.comm.index(b.axis), shard.contiguous(), flat)).wait()
        return flat

    def start(self, draw: Draw | None) -> None:
        """Set the parameters, all ranks together: with zero >= 1 each rank fills its pieces from `draw`; with zero=0
        the first rank of the axis broadcasts its own. Buffers are broadcast."""
        if not self.sharding.state:
            for name, p in self.parameters.items():
                self.comm.broadcast(p.detach(), self._bucket_of[name].axis)
        elif draw is not None:
            for piece, master, _ in self.pieces():
                master.copy_(draw(piece))
            self.updated()
        for tensor in self.module.buffers():
            self.comm.broadcast(tensor, self.comm.mesh.gradient_axis)

    def updated(self) -> None:
        """Publish updated masters: zero 1 and 2 start to gather the parameters, first needed first; zero 3 releases
        gathered parameters, and rounds those it gathers in 8 bits."""
        if self.gathered is not None:
            self.gathered.updated()
        if not self.sharding.updates_gather:
            return
        for b in reversed(self.buckets):
            own = b.own(b.weights)
            if not same_place(own, b.master):
                own.copy_(b.master)
            b.gathering = self.comm.all_gather(b.weights, own, b.axis, unit=b.name, phase="opt")

    def begin(self) -> None:
        """Start a step: discard the gradients of the last one."""
        for b in self.buckets:
            b.touched.clear()
            b.left = sum(b in own for own in self._chunks)
            if b.gradients is not None:
                b.gradients[b.bucket.numel :].zero_()
            else:
                b.shard.zero_()
        for p in self.parameters.values():
            p.grad = None
            p.gradient_rows.clear()  # type: ignore[attr-defined]
            p.gradient_products.clear()  # type: ignore[attr-defined]
        self._micro_batch, self._open = -1, False

    def forward(self, micro_batch: int) -> None:
        """Announce a forward pass."""
        if self.gathered is not None:
            self.gathered.micro_batch(micro_batch)

    def backward(self, micro_batch: int, last: bool, chunk: int = 0) -> None:
        """Announce the backward pass of a micro-batch through a chunk; `last`: the chunk's last one of the step."""
        self._micro_batch, self._last, self._open = micro_batch, last, True
        self._now, self._next = self._chunks[chunk], 0
        for b in self._now:
            b.missing = len(b.bucket.parameters)
            b.arrived.clear()
        if self.gathered is not None:
            self.gathered.micro_batch(micro_batch)

    def defer_weights(self, micro_batch: int) -> None:
        """Announce a backward pass that defers the gradients of weights; `backward` and a `take` for each weight
        follow later."""
        self._deferring = True
        if self.gathered is not None:
            self.gathered.micro_batch(micro_batch)

    def end_deferral(self) -> None:
        """End a pass that defers the gradients of weights."""
        self._deferring = False

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        if self._deferring:
            return
        if not self._open:
            raise RuntimeError(
                f"{name} got a gradient in a backward pass that was not announced to the engine: "
                "of a parallelized module call model.backward(loss), not loss.backward(); around passes that train "
                "another one through it, as a generator, call model.requires_grad_(False) and then (True)"
            )
        rows, products = parameter.gradient_rows, parameter.gradient_products  # type: ignore[attr-defined]
        self.take(name, products.pop() if products else parameter.grad, rows)
        rows.clear()
        parameter.grad = None

    def take(
        self, name: str, grad: Tensor | Product | GroupedProduct | None, rows: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Take a parameter's gradient of this micro-batch: a dense part, if any, and (index, values) of rows."""
        bucket = self._bucket_of[name]
        if self.watch is not None:
            grad = grad.compute() if isinstance(grad, Product | GroupedProduct) else grad
            self.watch(name, grad, rows)
        whole = not self.sharding.reduces_each
        place = self._views[name] if whole else self._view(bucket, name)
        write_gradient(place, grad, rows, add=whole and name in bucket.touched)
        bucket.touched.add(name)
        self.grad_ready(name)

    def _view(self, bucket: FlatBucket, name: str) -> Tensor:
        """Return the place of a parameter's gradient in its bucket's buffer; attach one if the bucket has none."""
        if bucket.sent is None:
            slot = self._slot_of[bucket.name]
            memory, user = self._slots[slot]
            if user is not None and user.handle is not None:
                self._complete(user)
                user = None
            if user is None:
                self._slots[slot] = (memory, bucket)
            else:  # the slot's user is still filling: other buckets overtake it
                memory = self.comm.buffer(bucket.padded, self._reduce)
            bucket.attach(memory[: bucket.padded])
        return bucket.places[name]

    def grad_ready(self, name: str) -> None:
        """Mark a parameter's gradient of this micro-batch as complete, and issue full buckets. Raises RuntimeError if
        it is marked twice."""
        if not (self._last or self.sharding.reduces_each):
            return
        bucket = self._bucket_of[name]
        if bucket not in self._now:  # another chunk completes this bucket
            return
        if name in bucket.arrived:
            raise RuntimeError(f"the gradient of {name} came twice in one backward pass (reentrant checkpointing?)")
        if not bucket.missing:
            raise RuntimeError(f"the gradient of {name} came after its bucket was reduced without it")
        bucket.arrived.add(name)
        bucket.missing -= 1
        while self._next < len(self._now) and self._now[self._next].missing == 0:
            self._issue()

    def _issue_before(self, waits: Callable[[str], bool]) -> None:
        """Issue the buckets that come next and whose units do not wait for a backward pass, as one begins (zero 3).
        Parameters still without a gradient on this rank will get none; other ranks may issue these buckets
        earlier, but always before they gather the next unit, like this rank. What units share waits for them all."""
        while self._open and self._next < len(self._now):
            unit = self._now[self._next].bucket.unit
            if unit == SHARED or waits(unit):
                break
            self._issue()

    def _issue(self) -> None:
        b = self._now[self._next]
        # Zeros for parameters without a gradient.
        b.missing = 0
        b.left -= self._last
        if self.sharding.reduces_each:
            for earlier in self._under_way[-1:]:
                self._complete(earlier)
            for p in b.bucket.parameters:
                if p.fqn not in b.arrived:
                    self._view(b, p.fqn).zero_()
            if self.gathered is not None:
                self.gathered.release(b.name)
        else:
            for p in b.bucket.parameters:
                if p.fqn not in b.touched:
                    self._views[p.fqn].zero_()
        # Cast to the reduced type.
        assert b.sent is not None
        if b.gradients is not None and b.sent is not b.gradients:
            b.sent.copy_(b.gradients)
        # Start the reduction.
        if self.compressor is not None:
            if self.unscale != 1.0:
                b.sent.mul_(self.unscale)
            for earlier in self._under_way:
                if isinstance(earlier.handle, CompressedReduction):
                    earlier.handle.advance()
            b.handle = CompressedReduction(self.compressor.reduce(b, self._micro_batch))
        elif not self.sharding.state:
            b.handle = self.comm.all_reduce(b.sent, b.axis, unit=b.name, phase="B", micro_batch=self._micro_batch)
        else:
            b.handle = self.comm.reduce_scatter(
                b.own(b.sent), b.sent, b.axis, unit=b.name, phase="B", micro_batch=self._micro_batch
            )
        self._next += 1
        self._under_way.append(b)

    def _complete(self, b: FlatBucket) -> None:
        """Wait for a bucket's reduction and accumulate the result in its shard."""
        if b.handle is None:
            return
        b.handle.wait()
        b.handle = None
        self._under_way.remove(b)
        # Unsharded: the sum stays in place.
        assert b.sent is not None
        if not self.sharding.state:
            if b.sent is not b.gradients:
                b.shard.copy_(b.sent)
            return
        # Sharded: accumulate this rank's shard, and free the buffer for the next bucket.
        own = b.own(b.sent)
        if self.sharding.reduces_each:
            b.shard.add_(own)
            b.sent = None
            slot = self._slot_of[b.name]
            if self._slots[slot][1] is b:
                self._slots[slot] = (self._slots[slot][0], None)
        elif not same_place(own, b.shard):
            b.shard.copy_(own)
        # At its last reduction of the step, the shard is reduced over its replicas (HSDP).
        if b.left or not b.across_replicas:
            return
        self._across.append(b)
        if self.compressor is not None:
            b.across = CompressedReduction(self.compressor.across(b, self._micro_batch))
        else:
            b.across = self.comm.all_reduce(
                b.shard, "dp_replicate", unit=b.name, phase="B", micro_batch=self._micro_batch
            )

    def settle(self) -> None:
        """End a backward pass: issue the remaining buckets, with zeros for parameters without a gradient. ZeRO 2 and
        3 wait for the reductions before anything is gathered again, since ranks may differ in which gradients
        arrived."""
        if self._open and (self._last or self.sharding.reduces_each):
            while self._next < len(self._now):
                self._issue()
        if self.sharding.reduces_each:
            self._complete_all()
        self._open = False

    def _complete_all(self) -> None:
        for b in list(self._under_way):
            self._complete(b)

    def finish(self) -> None:
        """End the last backward pass of a step: gradients are complete. Also wait for parameters unused by any
        forward pass: the update writes to memory that their all-gather uses."""
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
        """Return the squared 2-norm of the gradients, (), fp64: complete with zero=0, else this rank's share of the
        sum over the world."""
        squares = [square(b.shard) for b in self.buckets]
        return torch.stack(squares).sum() / (self.strategy.dp_replicate if self.sharding.state else 1)

    def scale(self, factor: float) -> None:
        """Multiply every gradient by a factor."""
        if factor != 1.0:
            torch._foreach_mul_([b.shard for b in self.buckets], factor)

    def scale_by(self, factor: Tensor) -> None:
        """Multiply every gradient by a factor, (), on the device, without synchronising with the host."""
        shards = [b.shard for b in self.buckets]
        for dtype in dict.fromkeys(shard.dtype for shard in shards):
            torch._foreach_mul_([shard for shard in shards if shard.dtype == dtype], factor.to(dtype))
