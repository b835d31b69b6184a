"""Pipelines of a module whose children run one after the other, an nn.Sequential: chunks of it by a list of cuts.

Of n children, the cuts a < b < ... make the chunks [0, a), [a, b), ... [.., n), dealt out to the pipeline ranks as
the schedule says (schedule/pipeline/schedules.py); runtime/model_parallel/pipeline.py runs them. Every rank begins
with the whole module and keeps the children of its own chunks; the others move to the meta device, which has shapes
and no memory. There a copy of the whole module is run once for every new shape of input, so that all ranks know the
shapes of the stream before the first message."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.model_parallel.pipeline import Pipeline
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.schedules import facts_of
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.strategy.spec import Strategy

Loss = Callable[[Any, Any], Tensor]
"""(output of the module, target) -> the loss of a micro-batch, ()."""
_MUST = "must have children that run one after the other, as nn.Sequential's do"


def cut_children(module: nn.Module, cuts: Sequence[int | str] | None, s: Strategy) -> tuple[tuple[str, ...], ...]:
    """Return the names of the children of each chunk. Raises InputError for a module, a schedule or cuts that do not
    make the chunks of the strategy, for a chunk that trains nothing, and for a trained parameter of two chunks."""
    # Refuse modules, schedules and options that cannot be cut.
    if type(module).forward is not nn.Sequential.forward:
        remedy = "write it as nn.Sequential(embedding, *blocks, head)"
        raise InputError("module", type(module).__name__, f"{_MUST}: pp={s.pp} cuts between them", remedy)
    for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        raise InputError("module", name, "is outside the children, and would be on no stage", "put it into a child")
    if facts_of(s.schedule).split_backward:
        reason = "defers gradients of weights inside layers, which `phalanx train` does for a model that it knows"
        raise InputError("strategy.schedule", s.schedule, reason, "use 1f1b, interleaved, gpipe or naive")
    if s.layers != "auto":
        raise InputError("strategy.layers", s.layers, "counts blocks of a decoder", "say cuts=[...] instead")
    names, count = list(module._modules), len(stages.rank_of(s))
    if len(names) < count:
        reason = f"makes {count} chunks, and the module has {len(names)} children"
        raise InputError("strategy.pp", s.pp, reason, "use fewer")
    if cuts is None or isinstance(cuts, str) or len(cuts) != count - 1:
        what = None if cuts is None else cuts if isinstance(cuts, str) else list(cuts)
        remedy = f"for example cuts={_balanced(module, count)}, which balances parameters"
        reason = (
            f"pp={s.pp} makes {count} chunks of {len(names)} children: say with which each after the first begins"
        )
        raise InputError("cuts", what, reason, remedy)
    # The chunks between the cuts.
    at = [0, *(_place(cut, names) for cut in cuts), len(names)]
    for low, high in pairwise(at):
        if low >= high:
            raise InputError("cuts", list(cuts), f"must ascend within 1 to {len(names) - 1}: no chunk is empty")
    chunks = tuple(tuple(names[low:high]) for low, high in pairwise(at))
    _require_apart(module, chunks, s)
    return chunks


def _place(cut: int | str, names: list[str]) -> int:
    """Return the index of the child with which a chunk begins, given its number or its name."""
    if isinstance(cut, int) and not isinstance(cut, bool):
        return cut
    if cut not in names:
        raise InputError("cuts", cut, "is not the number or the name of a child", nearest(str(cut), names))
    return names.index(cut)


def _balanced(module: nn.Module, count: int) -> list[int]:
    """Return cuts into `count` chunks of about equally many parameters, at least one child in each."""
    sizes = [sum(p.numel() for p in child.parameters()) for child in module.children()]
    total, so_far, cuts = sum(sizes), 0, [0]
    for i, size in enumerate(sizes):
        due = so_far + size / 2 > total * len(cuts) / count or len(sizes) - i == count - len(cuts)
        if i and len(cuts) < count and due:
            cuts.append(i)
        so_far += size
    return cuts[1:]


def _require_apart(module: nn.Module, chunks: tuple[tuple[str, ...], ...], s: Strategy) -> None:
    """Require that each chunk has trained parameters, and shares none with another chunk."""
    user: dict[int, tuple[int, str]] = {}
    for number, names in enumerate(chunks):
        trained = 0
        for child in names:
            for name, p in module.get_submodule(child).named_parameters():
                if not p.requires_grad:
                    continue
                trained += 1
                full = f"{child}.{name}"
                other, first = user.setdefault(id(p), (number, full))
                if other != number:
                    reason = (
                        f"is the same parameter as {first} in chunk {other}, and chunk {number} is cut off from it"
                    )
                    raise InputError("cuts", full, reason, "cut so that both are in one chunk, or untie them")
                if sharding_of(s).parameters and first.partition(".")[0] != child:
                    reason = f"is the same parameter as {first}: in a pipeline, zero=3 gathers each child by itself"
                    raise InputError("strategy.zero", 3, f"{full} {reason}", "use zero=2, or untie them")
        if not trained:
            reason = f"chunk {number} ({', '.join(names)}) has no parameter that is trained"
            raise InputError("cuts", None, reason, "move the cut")


def without_memory(module: nn.Module, trained: Collection[int], dtype: torch.dtype) -> nn.Module:
    """Return a copy of a module on the meta device, with the parameters of the ids `trained` in type `dtype`."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        like = torch.empty_like(p, device="meta", dtype=dtype if id(p) in trained else p.dtype)
        memo[id(p)] = nn.Parameter(like, p.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def keep_children(module: nn.Module, names: Collection[str]) -> nn.Sequential:
    """Return a Sequential of these children under their names; the module's other children move to the meta
    device."""
    kept = nn.Sequential()
    for name, child in module._modules.items():
        if child is not None and name in names:
            kept.add_module(name, child)
    own = {id(m) for m in kept.modules()}
    for child in module.children():
        if id(child) not in own:
            child.to("meta")
    return kept


class ModuleStages:
    """This rank's chunks of a module, and the pipelines that run them: one for each number of micro-batches and shape
    of their input. `children`: this rank's, by name; `skeleton`: the whole module, on the meta device."""

    def __init__(
        self,
        comm: Comm,
        strategy: Strategy,
        chunks: tuple[tuple[str, ...], ...],
        children: Mapping[str, nn.Module],
        skeleton: nn.Module,
        engine: DataParallel,
        dtype: torch.dtype,
    ) -> None:
        self.comm, self.strategy, self.chunks, self.children = comm, strategy, chunks, children
        self._skeleton, self._engine, self._dtype = skeleton, engine, dtype
        self._inner = LayerComm(comm)
        self._shapes: dict[tuple[torch.Size, torch.dtype], list[tuple[int, ...]]] = {}
        self._pipelines: dict[tuple[int, tuple[tuple[int, ...], ...]], Pipeline] = {}
        self._loss: Loss | None = None

    def step(self, micro_batches: Sequence[tuple[Tensor, Any]], loss: Loss, share: float) -> Tensor:
        """Run all passes of a step, with gradients multiplied by `share`. Returns the sum of the losses, (), fp64,
        the same on all ranks of the pipeline."""
        return self._summed(lambda: self._pipeline(micro_batches).step(micro_batches, share), loss)

    def require(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> None:
        """Raise InputError unless a step can run these micro-batches."""
        inputs = {(tuple(x.shape), x.dtype) for x, _ in micro_batches}
        if len(inputs) != 1:
            seen = ", ".join(str(shape) for shape, _ in sorted(inputs, key=str))
            raise InputError("micro_batches", None, f"must have one shape of input in a pipeline, not {seen}")
        refusal = facts_of(self.strategy.schedule).refusal(self.strategy.pp, len(micro_batches))
        if refusal:
            raise InputError("micro_batches", len(micro_batches), *refusal)
        self._pipeline(micro_batches)

    def evaluate(self, x: Tensor, target: Any, loss: Loss) -> Tensor:
        """Run one batch forward. Returns its loss, (), fp64, the same on all ranks of the pipeline."""
        batch, shapes = (x, target), self.shapes(x)
        pipeline = next(iter(self._pipelines.values()), None) or self._pipeline([batch] * self.strategy.pp)
        return self._summed(lambda: pipeline.evaluate(batch, shapes), loss)

    def _summed(self, run: Callable[[], Tensor], loss: Loss) -> Tensor:
        self._loss = loss
        try:
            total = run()
        finally:
            self._loss = None
        self.comm.all_reduce(total, "pp", unit="metrics", phase="opt").wait()  # 0 on ranks without the last chunk
        return total

    def _pipeline(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> Pipeline:
        shapes, count = self.shapes(micro_batches[0][0]), len(micro_batches)
        key = (count, tuple(shapes))
        if key not in self._pipelines:
            place = self.comm.mesh.place(self.comm.world.rank)["pp"]
            schedule = stages.schedule(self.strategy, count)
            args = (schedule, place, shapes, self._dtype, self._engine, self._run, None)
            self._pipelines[key] = Pipeline(self.comm, self._inner, *args)
        return self._pipelines[key]

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shape of the stream after each chunk but the last, for the input x. Raises InputError for a
        child whose output is not one tensor of the compute type, or depends on more than the input's shape."""
        key = (x.shape, x.dtype)
        if key not in self._shapes:
            stream: Any = torch.empty_like(x, device="meta")
            stream_shapes = []
            for names in self.chunks[:-1]:
                for name in names:
                    try:
                        # Tensors that a child makes without a device are made there too.
                        with torch.no_grad(), torch.device("meta"):
                            stream = self._skeleton._modules[name](stream)  # type: ignore[misc]
                    except Exception as error:
                        reason = f"cannot run on the meta device, which has shapes and no values: {error}"
                        raise InputError("module", name, reason.splitlines()[0]) from error
                if not isinstance(stream, Tensor) or stream.dtype != self._dtype:
                    what = stream.dtype if isinstance(stream, Tensor) else type(stream).__name__
                    reason = f"ends a chunk with {what}; between chunks travels one tensor of {self._dtype}"
                    raise InputError("cuts", names[-1], reason, "cut elsewhere")
                stream_shapes.append(tuple(stream.shape))
            self._shapes[key] = stream_shapes
        return self._shapes[key]

    def _run(self, batch: tuple[Tensor, Any], x: Tensor | None, chunk: int) -> Tensor:
        """Run a micro-batch through this rank's chunk number `chunk`. Returns the stream, or from the last chunk of
        the model the loss."""
        mine = stages.rank_of(self.strategy)
        place = self.comm.mesh.place(self.comm.world.rank)["pp"]
        number = [c for c, rank in enumerate(mine) if rank == place][chunk]
        out: Any = batch[0] if x is None else x
        for name in self.chunks[number]:
            out = self.children[name](out)
        if number < len(self.chunks) - 1:
            return out  # type: ignore[no-any-return]
        assert self._loss is not None
        loss = self._loss(out, batch[1])
        if not isinstance(loss, Tensor) or loss.dim():
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError("loss", None, f"returns {what}, and must return a scalar", "take its mean or sum")
        return loss
