"""How a model is spread over the ranks of a strategy: each parallelism is one function, applied in this order.

    split      pipeline stage, then tensor, context and expert parallelism: which part of every layer this rank has
    place      that part on the device, with its buffers; the initial weights of ZeRO-0
    recompute  blocks whose activations the backward pass computes again
    shard      the data-parallel engine: gradients in buckets, sharded as `zero` says; the initial weights of
               ZeRO-1 to 3
    pipeline   the executor of the schedule, over the rank's chunks
    optimizer  over the masters that this rank updates

Random draws belong to `place` and `shard`; collectives to `shard` alone, which broadcasts or gathers what all ranks
start from.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.nn.decoder import Decoder
from phalanx.nn.init import Initial, create, fill_buffers, initial_source, restrict_to_rank
from phalanx.nn.optimizers import KERNELS
from phalanx.nn.weight_source import Weights
from phalanx.runtime.autograd import recompute
from phalanx.runtime.autograd.deferred_weight_grads import DeferredGradients
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.runtime.data_parallel.shared_gradients import SharedGradients
from phalanx.runtime.data_parallel.whole_matrices import WholeMatrices
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.pipeline import Pipeline, RunChunk
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.schedule.gradients.buckets import chunk_buckets, reduction_slots
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layers.routing import depends_on_other_tokens
from phalanx.schedule.layout import Layout, RankView
from phalanx.schedule.pipeline.actions import PipelineSchedule, last_weight_grad_at, splits
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, Parameter, parameters
from phalanx.spec.number_formats import NumberFormat
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Layers:
    """This rank's part of every layer. `tp`, `cp`, `ep`: the parallelisms inside layers, None where a strategy (or a
    dense model) has none; `tokens`: which tokens of a micro-batch this rank routes."""

    view: RankView
    inner: LayerComm
    tp: TensorParallel | None
    cp: ContextParallel | None
    ep: ExpertParallel | None
    tokens: SequenceTokens


@dataclass(frozen=True)
class ParallelDecoder:
    """One rank's part of a model, ready to train.

    `weights`: the model's parameters at ZeRO-0, else empty. `masters` and `gradients`: the tensors that the optimizer
    updates and reads, by parameter name; unsharded at ZeRO-0, else this rank's flat piece of each. `copies`: None if
    no two ranks of a replica hold the same parameter."""

    layers: Layers
    model: Decoder
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    engine: DataParallel
    copies: SharedGradients | None
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer


def parallelize_decoder(
    spec: ModelSpec,
    job: Job,
    strategy: Strategy,
    comm: Comm,
    run: RunChunk,
    seed: int,
    weights: Weights | None = None,
    schedule: PipelineSchedule | None = None,
    balanced: bool = False,
) -> ParallelDecoder:
    """Spread a model over the ranks of `comm`; all ranks together. It starts from `weights`, or from values drawn
    from `seed`. `run`: the forward pass of a micro-batch through one chunk; `schedule`: replaces the strategy's
    pipeline schedule; `balanced`: experts are chosen in turn."""
    view = Layout(spec, job, strategy).rank_view(comm.world.rank)
    schedule = schedule or view.layout.schedule

    # Split: this rank's stage of the model, and its part of every layer.
    layers = split_layers(view, comm, balanced)
    initial_values = restrict_to_rank(initial_source(spec, seed, weights), view.split)

    # Place it on the device; at ZeRO-0 with its weights.
    model = place(layers, weights)
    sharding = sharding_of(strategy)
    unsharded, masters = ({}, {}) if sharding.state else place_weights(model, view, initial_values)

    model.recompute(strategy.recompute_of, layers.inner)

    # Shard gradients, and from ZeRO-1 on masters and weights, over buckets.
    engine = shard(model, view, comm, schedule, initial_values)
    gradients = {} if sharding.state else dict(engine.gradients())
    for piece, master, gradient in engine.pieces() if sharding.state else ():
        masters[piece.parameter.fqn], gradients[piece.parameter.fqn] = master, gradient
    copies = SharedGradients(engine, view.split) if strategy.pp > 1 or not view.split.unsplit else None

    pipeline = make_pipeline(model, layers, schedule, engine, run)

    starts = {piece.parameter.fqn: piece.start for piece, _, _ in engine.pieces()} if sharding.state else {}
    whole = WholeMatrices(view, comm, starts)
    optimizer = make_optimizer(job.optimizer, masters, parameters(view.local), whole)
    return ParallelDecoder(layers, model, unsharded, masters, gradients, engine, copies, pipeline, optimizer)


def split_layers(view: RankView, comm: Comm, balanced: bool) -> Layers:
    """Split this rank's pipeline stage of a model over tp, cp, ep and etp."""
    inner, strategy, experts = LayerComm(comm), view.strategy, view.local.experts
    tp = TensorParallel(inner, view.split, view.job.precision.gathers_narrow) if strategy.tp > 1 else None
    cp = ContextParallel(inner, view.context, not view.job.separate) if strategy.cp > 1 else None
    ep = ExpertParallel(inner, experts, strategy.ep, strategy.etp, balanced) if experts else None
    return Layers(view, inner, tp, cp, ep, SequenceTokens(inner, tp, view.context))


def place(layers: Layers, weights: Weights | None) -> Decoder:
    """Create the model on the device: parameters allocated (at ZeRO-3 they get memory while they are gathered) and
    not yet filled, buffers filled, from `weights` where it has them. Tensors that a first forward pass would create
    and keep are created now, so that every step has the same memory."""
    view, device = layers.view, layers.inner.comm.world.device
    local, job, strategy = view.local, view.job, view.strategy
    model = create(
        local,
        DTYPES[job.precision.compute],
        device,
        parameters=not sharding_of(strategy).parameters,
        tp=layers.tp,
        cp=layers.cp,
        ep=layers.ep,
        tokens=layers.tokens,
    )
    if (operands := job.precision.operands) is not None:
        narrow_products(model.blocks, operands, but=("router",))
    if hasattr(model, "head"):
        model.head.masked = job.batch_rows == 3
    if not job.separate:
        model.prepare(job.seq)
    if local.experts and depends_on_other_tokens(local.experts, strategy):
        layers.tokens.prepare((strategy.micro_batch, view.context.tokens), device)
    if weights is not None:
        fill_buffers(model, weights)
    return model


@torch.no_grad()
def place_weights(
    model: Decoder, view: RankView, initial_values: Initial
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fill the parameters of an unsharded model (ZeRO-0). Returns (weights, masters) by name: a master is the weight
    itself where it has the compute type."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    masters = {}
    precision = view.job.precision
    master_dtype, separate = DTYPES[precision.master_dtype], precision.master_dtype != precision.compute
    for p in parameters(view.local):
        weight, values = weights[p.fqn], initial_values(p, 0, p.numel).view(p.shape)
        weight.copy_(values)
        masters[p.fqn] = values.to(weight.device, master_dtype, copy=True) if separate else weight
    return weights, masters


def shard(
    model: Decoder, view: RankView, comm: Comm, schedule: PipelineSchedule, initial_values: Initial
) -> DataParallel:
    """Create the data-parallel engine over the rank's buckets and set its parameters: at ZeRO-1 to 3 each rank fills
    its own shards from `initial_values`; at ZeRO-0 the first rank's weights are broadcast."""
    strategy, cut = view.strategy, view.buckets
    # This rank's chunks by their place on it, in the order in which their gradients become complete.
    completed = [view.chunk_indices.index(chunk) for chunk in last_weight_grad_at(schedule.actions[view.place])]
    engine = DataParallel(
        model,
        cut,
        view.job.precision,
        comm,
        strategy,
        model.units(),
        chunk_buckets(cut, view.stage, completed, sharding_of(strategy).reduces_each),
        reduction_slots(view.stage, cut, strategy),
    )
    engine.start(lambda piece: initial_values(piece.parameter, piece.start, piece.stop))
    return engine


def make_pipeline(
    model: Decoder, layers: Layers, schedule: PipelineSchedule, engine: DataParallel, run: RunChunk
) -> Pipeline:
    """Create the executor of this rank's actions; without a pipeline it runs micro-batches in sequence. Layers can
    defer weight gradients in a pipeline, and wherever `schedule` splits backward passes."""
    view = layers.view
    defers = view.strategy.pp > 1 or splits(schedule)
    return Pipeline(
        layers.inner.comm,
        layers.inner,
        schedule,
        view.place,
        [view.stream_shape] * (schedule.chunks - 1),
        DTYPES[view.job.precision.compute],
        engine,
        run,
        DeferredGradients(model.units(), layers.inner, splits(schedule)) if defers else None,
    )


def make_optimizer(
    s: Optimizer, masters: dict[str, Tensor], held: Sequence[Parameter], whole: WholeMatrices | None = None
) -> torch.optim.Optimizer:
    """Create the optimizer of a job over this rank's masters of the parameters `held`. Matrices and embeddings decay,
    vectors do not. `whole`: the exchange of matrices, for an optimizer that needs whole ones.

    State is allocated here and not in the first step, so that a checkpoint can fill it and every step has the same
    memory. Gradients of another type than the masters' are cast at the update.
    """
    by_kind: dict[tuple[bool, bool], list[str]] = {}
    for p in held:
        if p.fqn in masters:
            hidden = s.row.whole and p.matrices > 0
            decays = len(p.shape) > 1 and p.role != "index"  # which learns nothing, so it must not shrink
            by_kind.setdefault((hidden, decays), []).append(p.fqn)
    groups: list[dict[str, Any]] = [
        {
            "params": [masters[name] for name in names],
            "fqns": names,
            "matrices": hidden,
            "weight_decay": s.weight_decay if decays else 0.0,
        }
        for (hidden, decays), names in by_kind.items()
    ] or [{"params": [], "fqns": [], "matrices": False}]  # at ZeRO-1 to 3 a rank may hold nothing but padding
    optimizer = KERNELS[s.name](groups, s, whole)
    for group in groups:
        rule = s.row.matrices if group["matrices"] else s.row.others
        for master in group["params"]:
            state = optimizer.state[master]
            if rule.counts_steps:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            for name in rule.held(s.first_decay):
                state[name] = torch.zeros_like(master, requires_grad=False)
    return optimizer


class NarrowLinear(nn.Linear):
    """A linear layer whose products are of the format `operands`."""

    operands: NumberFormat

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return recompute.linear(self, x)


def narrow_products(blocks: nn.Module, operands: NumberFormat, but: Collection[str] = ()) -> None:
    """Make the modules in `blocks` multiply in a narrow format: linear layers, except those named in `but`, and
    modules with a field `operands`. Parameters and their names stay."""
    for name, layer in blocks.named_modules():
        if type(layer) is nn.Linear and name.rpartition(".")[2] not in but:
            layer.__class__ = NarrowLinear
            cast(NarrowLinear, layer).operands = operands
        elif hasattr(layer, "operands"):
            layer.operands = operands
