"""Data, tensor and pipeline parallelism for any torch.nn.Module: the engine of `phalanx train` in a few lines of your
loop.

    model = phalanx.parallelize(module, "zero=2")
    optimizer = model.attach(torch.optim.AdamW(model.parameters(), lr=3e-4))
    for batch in loader:                                  # the micro-batches of a step, this rank's share
        for i, (x, y) in enumerate(batch):
            model.backward(loss(model(x), y), last=i == len(batch) - 1)
        model.clip(1.0)
        optimizer.step()

The inner loop is `model.step(batch, loss)`, which is also how a pipeline runs. Start it by torchrun or srun, or as a
single process. All ranks have the same module, and run its units in the same order.
"""

import atexit
import copy
import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from phalanx.runtime.any_module.batch_norm import synchronise_batch_norms
from phalanx.runtime.any_module.first_pass import draw_constants, has_values
from phalanx.runtime.any_module.first_step import REQUEST, FirstStep, require_comparable
from phalanx.runtime.any_module.parallel import Parallel
from phalanx.runtime.any_module.stages import cut_children, keep_children, without_memory
from phalanx.runtime.any_module.state import Buffers
from phalanx.runtime.any_module.tensor_plan import published_plan, split_layers
from phalanx.runtime.any_module.units import common_dtype, find_units, recompute_units, require_spreadable
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.schedule.pipeline.stages import rank_of, require_chunks
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def parallelize(
    module: nn.Module,
    strategy: str | Strategy = "",
    *,
    precision: Precision | None = None,
    units: Sequence[nn.Module] | None = None,
    average: bool = True,
    transport: Literal["native", "p2p", "shm"] = "native",
    buffers: Buffers = "rank 0",
    tp_plan: Mapping[str, str] | Literal["published"] | None = None,
    cuts: Sequence[int | str] | None = None,
    compare_first: bool | Literal["step"] = True,
    timeout_s: float = 300.0,
) -> Parallel:
    """Train a module data-parallel, and tensor-parallel by a plan of names or as a pipeline by a list of cuts, over
    the ranks of this run; all ranks together.

    strategy    one line, as on the command line: "zero=3", "dp=8,zero=2,shard=4,compression=int8"; dp defaults to the
                number of ranks; recompute=full keeps the inputs of units alone
    precision   number types; by default they follow from the type of the module's parameters
    units       modules that ZeRO-3 gathers at once and that ZeRO-1 and 2 wait for, in forward order: by default the
                members of the module's outermost ModuleLists and Sequentials. Units do not nest, and a unit's
                parameters are used in its own forward pass alone; what several share is gathered for the whole pass
    average     gradients are averaged over the replicas, as by DistributedDataParallel; else summed
    transport   of all collectives: torch's own, sends and receives, or shared memory (ranks of one host)
    buffers     at the end of a step they are copied from rank 0, or floating-point ones are averaged over all ranks;
                "synchronise": every BatchNorm takes its statistics over all replicas' batches (batch_norm.py)
    tp_plan     with tp > 1, which layers are split and how (tensor_plan.py): {"layers.*.up": "colwise", ...};
                "published", the default, takes that of a Hugging Face model. All tp ranks of a replica get the same
                batch; the module must derive its number of heads from the layers' outputs
    cuts        with pp > 1, of an nn.Sequential: the numbers or names of the children with which each chunk after the
                first begins (stages.py). All pp ranks of a replica get the same batch, by `model.step(batch, loss)`

    compare_first
                with tp > 1, run the first batch through the whole module too, forward and backward, and refuse a plan
                that makes outputs or gradients others (first_pass.py). Until then each rank holds the module thrice.
                "step": with any strategy, compare the first step with one process, gradient by gradient, on all
                replicas' batches, which rank 0 runs alone (first_step.py)

    Parameters and buffers are copied from rank 0. Frozen parameters are not sharded. A parameter that gets a
    gradient on some ranks only has one of zeros on the others. ZeRO-3 has no double backward, and allows activation
    checkpointing inside a unit, not around it. Raises InputError.
    """
    world = _world(timeout_s)
    options = (precision, units, average, transport, buffers, tp_plan, cuts, compare_first)
    return spread(world, module, strategy, *options)


def spread(
    world: World,
    module: nn.Module,
    strategy: str | Strategy = "",
    precision: Precision | None = None,
    units: Sequence[nn.Module] | None = None,
    average: bool = True,
    transport: Literal["native", "p2p", "shm"] = "native",
    buffers: Buffers = "rank 0",
    tp_plan: Mapping[str, str] | Literal["published"] | None = None,
    cuts: Sequence[int | str] | None = None,
    compare_first: bool | Literal["step"] = True,
) -> Parallel:
    """Parallelize a module in a world that has already been joined; arguments as for `parallelize`."""
    # Refuse before anything is sent or changed.
    if not isinstance(module, nn.Module):
        raise InputError("module", type(module).__name__, "is not a torch.nn.Module", "wrap the model itself")
    s = _strategy(strategy, world)
    if buffers not in get_args(Buffers):
        raise InputError("buffers", buffers, "is not a choice", "use 'rank 0', 'average' or 'synchronise'")
    if tp_plan is not None and s.tp == 1:
        raise InputError("tp_plan", None, "splits layers over the tp ranks, and tp is 1", "use a strategy with tp=2")
    require_spreadable(module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    precision = precision or Precision(common_dtype(trained))  # type: ignore[arg-type]
    if precision.compute == "float16":
        raise InputError(
            "precision.compute", "float16", "needs a loss scale, which only `phalanx train` has", "use bfloat16"
        )
    require_runnable(s, Job(s.dp, 1, precision))
    plan: Mapping[str, str] = {}
    if s.tp > 1:  # refused before anything is sent
        plan = published_plan(module) if tp_plan is None or tp_plan == "published" else tp_plan
    chunks = cut_children(module, cuts, s) if s.pp > 1 else ()
    if s.pp > 1 and units is not None:
        raise InputError("units", None, "are the children of the module in a pipeline", "leave them out")
    if s.pp == 1 and cuts is not None:
        raise InputError("cuts", list(cuts), "cut a module into stages, and pp is 1", "use a strategy with pp=2")
    # All ranks start from rank 0's parameters and buffers.
    module.to(world.device)
    choices = [Choice(op, world.size, 0, transport) for op in _OPS] if transport != "native" else []
    comm = Comm(world, mesh(s), choices)
    if REQUEST in os.environ:  # the program ends with its first step
        draw_constants(module)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.contiguous()
            comm.broadcast(tensor.data, "world")
    compare_first = compare_first if has_values(module) else False
    first_step = None
    if compare_first == "step" or REQUEST in os.environ:
        require_comparable(s, buffers)
        whole = copy.deepcopy(module) if world.rank == 0 else None
        first_step = FirstStep(whole, trained, DTYPES[precision.compute])
    # Without a pipeline: the whole module, or its part of each split layer.
    if s.pp == 1:
        if buffers == "synchronise":
            synchronise_batch_norms(module, comm)
        unsplit = copy.deepcopy(module) if s.tp > 1 and compare_first else None
        split = split_layers(module, plan, comm) if s.tp > 1 else {}
        kept, of_units = None if unsplit is None else (unsplit, plan), find_units(module, units)
        if s.recompute == "full":
            recompute_units(of_units)
        return Parallel(module, s, precision, comm, of_units, average, buffers, split, None, kept, first_step)
    # In a pipeline: this rank's children, and the whole module without memory for its shapes.
    skeleton = without_memory(module, {id(p) for p in trained.values()}, DTYPES[precision.compute])
    place = mesh(s).place(world.rank)["pp"]
    own = [name for names, rank in zip(chunks, rank_of(s), strict=True) if rank == place for name in names]
    stage = keep_children(module, own)
    stage.train(module.training)
    if buffers == "synchronise":
        synchronise_batch_norms(stage, comm)
    of_units = find_units(stage, None)
    if s.recompute == "full":
        recompute_units(of_units)
    return Parallel(stage, s, precision, comm, of_units, average, buffers, None, (chunks, skeleton), None, first_step)


def _world(timeout_s: float) -> World:
    """Join the ranks of this run, unless the caller already has."""
    if not dist.is_initialized():
        world = external_world() or ALONE
        worlds.join(world, timeout_s)
        if world.size > 1:
            atexit.register(worlds.leave)
        return world
    given = external_world()
    rank, size = dist.get_rank(), dist.get_world_size()
    return given if given and given.size == size else World(rank, size, rank, size)


def _strategy(strategy: str | Strategy, world: World) -> Strategy:
    """Return a strategy that the engine can run in this world. Raises InputError."""
    # dp defaults to the remaining ranks.
    if isinstance(strategy, str):
        table = parse(strategy)
        sizes = [n for name in ("tp", "pp") if isinstance(n := table.get(name, 1), int) and n > 0]
        parsed = make_strategy({"dp": max(world.size // math.prod(sizes), 1), **table})
        assert parsed is not None
        strategy = parsed
    # Fields that need knowledge of the model.
    train = "`phalanx train` does for a model that it knows"
    for name, alone, why, remedy in (
        ("cp", 1, f"splits sequences inside attention, which {train}", "use dp, tp or pp"),
        ("sp", False, f"splits the residual stream between layers, which {train}", "leave sp out"),
        ("ep", 1, f"sends tokens to experts, which {train}", "use dp, tp or pp"),
        ("etp", 1, f"splits experts, which {train}", "use dp, tp or pp"),
        ("micro_batch", 1, "is what your loop hands to the model", "leave it out"),
    ):
        if getattr(strategy, name) != alone:
            raise InputError(f"strategy.{name}", getattr(strategy, name), why, remedy)
    if strategy.recompute not in ("none", "full"):
        reason = f"chooses among layers, which {train}"
        raise InputError("strategy.recompute", strategy.recompute, reason, "use recompute=full, of whole units")
    if strategy.tp > 1 and strategy.pp > 1:
        reason = "with tp > 1 is what `phalanx train` does for a model that it knows"
        raise InputError("strategy.pp", strategy.pp, reason, "use dp and pp, or dp and tp")
    require_chunks(strategy)
    if strategy.tp > 1 and strategy.compression != "none":
        reason = "compresses gradients of whole layers, and tp splits them"
        raise InputError("strategy.compression", strategy.compression, reason, "leave one of them out")
    # The number of ranks.
    if strategy.world != world.size:
        compared = REQUEST in os.environ  # `phalanx parity` started the ranks
        how = f"--ranks {strategy.world}" if compared else f"torchrun --nproc-per-node {strategy.world} SCRIPT"
        start = f"start as many: {how}"
        fits = world.size % (strategy.world // strategy.dp) == 0  # with another dp
        remedy = f"leave dp out, or {start}" if fits else start
        raise InputError(
            "strategy", str(strategy), f"is for {strategy.world} ranks, but there are {world.size}", remedy
        )
    return strategy
