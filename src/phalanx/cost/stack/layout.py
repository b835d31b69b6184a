"""What of a job and a strategy the price of a step depends on, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.stack.columns import Column
from phalanx.cost.stack.shape import Shape
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.strategy import Strategy

FORMATS = ("bfloat16", "float8", "float8-mx", "float4")
"""Number formats of matrix products; of `float8` one scale serves a tensor, of `-mx` 32 elements."""


@dataclass(frozen=True)
class Layout:
    """One rank's share of a step. `shards`: ranks over which ZeRO shards; `format`: index into FORMATS;
    `activation_bytes` of one element; `full`, `selective`: shares of the blocks whose forward pass, or whose core
    of attention, is repeated."""

    tp: Column
    sp: Column
    pp: Column
    virtual: Column
    dp: Column
    cp: Column
    ulysses: Column
    ep: Column
    etp: Column
    zero: Column
    shards: Column
    micro_batch: Column
    micro_batches: Column
    seq: Column
    full: Column
    selective: Column
    format: Column
    activation_bytes: Column
    gathers_once: Column
    stages_inside: Column = 0.0
    """1: stages on neighbouring nodes, replicas outermost (order=dp/pp/cp/tp); else the other way round."""
    in_flight: Column = 0.0
    """Micro-batches whose activations a first pipeline rank holds at once, where its schedule is neither 1f1b nor
    interleaved; 0: as those do."""
    in_flight_last: Column = 1.0
    """The same of the last pipeline rank."""
    frozen: Column = 0.0
    """1: weights have no gradients (adapters are trained beside them)."""

    @property
    def tokens(self) -> Column:
        """Of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.cp

    @property
    def world(self) -> Column:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def stage_stride(self) -> Column:
        """From a rank to the same one of the next stage."""
        return self.world / self.pp / np.where(self.stages_inside > 0, self.dp, 1)

    @property
    def data_stride(self) -> Column:
        """From a rank to the next one with the same part of the model."""
        return self.tp * np.where(self.stages_inside > 0, self.pp, 1)

    @property
    def expert_stride(self) -> Column:
        """From a rank to the one with the next experts: ep x etp takes the innermost ranks first, and those beyond
        cp x tp lie where the data axis does."""
        beyond = (np.asarray(self.stages_inside) > 0) & (np.asarray(self.ep * self.etp) > self.cp * self.tp)
        return self.etp * np.where(beyond, self.pp, 1)

    @property
    def step_tokens(self) -> Column:
        """Of all ranks."""
        return self.micro_batch * self.micro_batches * self.dp * self.seq


@dataclass(frozen=True)
class Stages:
    """Blocks of pipeline ranks: the most that one has, and the last one's, which has the head as well."""

    most: Column
    last: Column


def stages(shape: Shape, layout: Layout, balanced: Column) -> Stages:
    """By numbers of blocks, or by work: then the head counts as many blocks as it has times their parameters."""
    chunk = np.ceil(shape.layers / (layout.pp * layout.virtual))
    most = np.minimum(chunk * layout.virtual, np.ceil(shape.layers / layout.pp) + (layout.virtual - 1))
    last = np.floor(shape.layers / layout.pp)
    head = shape.vocab * shape.hidden / np.maximum(shape.block_params, 1)
    each = (shape.layers + head) / layout.pp
    ends = np.maximum(shape.layers - np.ceil((layout.pp - 1) * each - 1e-9), 0)
    apart = (np.asarray(balanced) > 0) & (np.asarray(layout.pp) > 1)
    return Stages(np.where(apart, np.minimum(np.ceil(each - 1e-9), shape.layers), most), np.where(apart, ends, last))


def layout(s: Strategy, job: Job, layers: int, number_format: str = "bfloat16") -> Layout:
    """The Layout of one strategy."""
    full = sum(s.recompute_of(i) == "full" for i in range(layers)) / layers
    selective = sum(s.recompute_of(i) == "selective" for i in range(layers)) / layers
    return Layout(
        tp=s.tp,
        sp=float(s.sp),
        pp=s.pp,
        virtual=s.virtual,
        dp=s.dp,
        cp=s.cp,
        ulysses=s.ulysses,
        ep=s.ep,
        etp=s.etp,
        zero=s.zero if s.shards > 1 else 0,
        shards=s.shards,
        micro_batch=s.micro_batch,
        micro_batches=s.accumulation(job),
        seq=job.seq,
        full=full,
        selective=selective,
        format=FORMATS.index(number_format),
        activation_bytes=DTYPE_BYTES[job.precision.compute],
        gathers_once=float(s.gathers_once),
        stages_inside=float(s.order.index("dp") < s.order.index("pp")),
    )
