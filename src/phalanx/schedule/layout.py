"""A model laid out over ranks: what all ranks share (Layout), and what one of them has and does (RankView).

Prices, the expansion into events, the trainer and `verify` all start from a RankView. Its properties are derived
once:

    Layout     model, job, strategy -> mesh, chunks of the model, pipeline schedule
    RankView   layout, place        -> stage (its units), local model (its part of each), buckets, actions, passes
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from phalanx.schedule.event import Phase
from phalanx.schedule.gradients.buckets import Bucket, buckets
from phalanx.schedule.gradients.whole_matrices import Exchange, exchanges
from phalanx.schedule.layers.collectives import summed_elements
from phalanx.schedule.layers.context import Context
from phalanx.schedule.layers.routing import ExpertTraffic, expert_traffic
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.spec.job import Job
from phalanx.spec.model.blocks.lowering import architecture, block_of, has_recurrence
from phalanx.spec.model.blocks.operators import Attend, Router
from phalanx.spec.model.spec import ModelSpec, StageSpec, chunks, units
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Recompute, Strategy
from phalanx.spec.strategy.split import Split


@dataclass(frozen=True)
class Layout:
    """A model, a job and a strategy together, and all that ranks share as a consequence."""

    model: ModelSpec
    job: Job
    strategy: Strategy

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of all ranks."""
        return mesh(self.strategy)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step, of each data-parallel replica."""
        return self.strategy.accumulation(self.job)

    @cached_property
    def chunks(self) -> tuple[tuple[str, ...], ...]:
        """The units of each chunk, in the order of the model."""
        return stages.chunks(self.model, self.strategy)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each chunk, in the order of the model."""
        return stages.rank_of(self.strategy)

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The actions of all pipeline ranks, sends and receives included."""
        return stages.schedule(self.strategy, self.micro_batches)

    def stage_view(self, place: int = 0) -> RankView:
        """The view of pipeline rank `place`, of the shard with most elements: no rank there holds more memory."""
        return RankView(self, place)

    def stage_views(self) -> tuple[RankView, ...]:
        """The views of all pipeline ranks, in order."""
        return tuple(map(self.stage_view, range(self.strategy.pp)))

    def rank_view(self, rank: int) -> RankView:
        """The view of one rank, whose shard may be partly padding."""
        return RankView(self, self.mesh.place(rank)["pp"], rank)


@dataclass(frozen=True)
class RankView:
    """The part of a model that one rank of a layout has, and what it does in a step."""

    layout: Layout
    place: int = 0
    """The rank's coordinate along pp."""
    rank: int | None = None
    """The global rank; None for a stage view: the rank at this place that holds the most."""
    units: tuple[tuple[str, ...], ...] | None = None
    """Units of each chunk, if they are not those that the strategy gives: to price a part of a model."""

    @property
    def model(self) -> ModelSpec:
        """The full model."""
        return self.layout.model

    @property
    def job(self) -> Job:
        """The job."""
        return self.layout.job

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self.layout.strategy

    @property
    def mesh(self) -> Mesh:
        """The mesh of all ranks."""
        return self.layout.mesh

    @cached_property
    def representative(self) -> int:
        """The global rank; for a stage view, the first rank at this place."""
        return self.mesh.group_of(0, "pp")[self.place] if self.rank is None else self.rank

    @cached_property
    def ring_index(self) -> int | None:
        """Index in the cp ring; None for a stage view (no specific rank)."""
        return None if self.rank is None else int(self.mesh.along("ring")[self.rank])

    @cached_property
    def shard(self) -> tuple[int, int] | None:
        """Shard indices in the dense and the experts' model state; None for a stage view (no specific rank)."""
        return None if self.rank is None else (self.mesh.shard(self.rank), int(self.mesh.along("edp")[self.rank]))

    @cached_property
    def stage(self) -> ModelSpec:
        """The units of the pipeline stage, not split over tp, ep and etp."""
        if self.units is not None:
            return StageSpec.of(self.model, self.units)
        if self.strategy.pp == 1:
            return self.model
        return StageSpec.of(self.model, tuple(self.layout.chunks[chunk] for chunk in self.chunk_indices))

    @cached_property
    def chunk_indices(self) -> tuple[int, ...]:
        """The indices of its chunks in the model."""
        return tuple(chunk for chunk, place in enumerate(self.layout.rank_of) if place == self.place)

    @cached_property
    def chunks(self) -> tuple[tuple[str, ...], ...]:
        """The units of each of its chunks."""
        return chunks(self.stage)

    @cached_property
    def unit_classes(self) -> dict[str, tuple[str, ...]]:
        """The units of the stage by class, in forward order: the units of a class have equal passes."""
        return unit_classes(self.stage, self.strategy)

    @cached_property
    def class_of(self) -> dict[str, str]:
        """The class of each of its units."""
        return {unit: name for name, members in self.unit_classes.items() for unit in members}

    @cached_property
    def split(self) -> Split:
        """Split of the stage over tp, ep and etp, at the rank's coordinates (0 for a stage view)."""
        if self.rank is None:
            return Split.of(self.stage, self.strategy)
        at = (int(self.mesh.along(axis)[self.rank]) for axis in ("tp", "ep", "etp"))
        return Split.of(self.stage, self.strategy, *at)

    @property
    def local(self) -> ModelSpec:
        """The rank's part of every layer of its stage."""
        return self.split.local

    @cached_property
    def context(self) -> Context:
        """The rank's part of every sequence."""
        index = 0 if self.rank is None else self.mesh.place(self.rank)["cp"]
        return Context(self.job.seq, self.strategy.ring, self.strategy.ulysses, index, has_recurrence(self.model))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch whose activations the rank holds; with sequence parallelism, its tp ranks
        together."""
        return self.strategy.micro_batch * self.context.tokens

    @cached_property
    def _routed(self) -> dict[Router, ExpertTraffic]:
        """Traffic of one micro-batch through every kind of experts, in perfect balance."""
        operands = self.job.precision.operands
        multiple = operands.multiple if operands else 1
        routes = (route for block in architecture(self.model).kinds for route in block.all(Router))
        return {x: expert_traffic(x, self.strategy, self.tokens, self.representative, multiple) for x in routes}

    def rows_of(self, unit: str) -> ExpertTraffic | None:
        """Return the traffic of one micro-batch through a unit's experts, in perfect balance; None if it has none."""
        route = block_of(self.model, unit).first(Router) if unit.startswith("blocks") else None
        return None if route is None else self._routed[route]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The rank's gradient buckets, in the order of the backward pass."""
        return buckets(self.local, self.job, self.strategy)

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The elements of each bucket's flat buffer, padding included."""
        return tuple(bucket.padded(self.strategy) for bucket in self.buckets)

    @cached_property
    def summed_elements(self) -> int:
        """Elements of the buffer in which tp ranks sum partial gradients."""
        return summed_elements(self.split, self.buckets, self.strategy)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of matrices for an optimizer that updates whole matrices; for a stage view, of the rank that
        sends most."""
        rule = self.job.optimizer.row.matrices
        of_rank = exchanges(self.buckets, self.split, self.strategy, self.mesh, self.representative, rule)
        return tuple(of_rank if self.rank is not None else (x.fullest() for x in of_rank))

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The rank's actions in a step, sends and receives included."""
        return tuple(self.layout.schedule.actions[self.place])

    @cached_property
    def stream_shape(self) -> tuple[int, ...]:
        """The shape of the activation that travels from chunk to chunk."""
        return stages.stream(self.model, self.job, self.strategy)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backward passes run as separate actions for gradients of inputs (I) and of weights (W)."""
        return stages.splits_backward(self.strategy)

    @cached_property
    def passes(self) -> dict[tuple[Phase, str], int]:
        """Passes of a step by (phase, unit class), summed over the units of the class."""
        phases: tuple[Phase, ...] = ("F", "B", "I", "W")
        if not self.splits_backward:  # every unit runs F and B once per micro-batch
            return {
                (phase, name): len(members) * (self.layout.micro_batches if phase in "FB" else 0)
                for name, members in self.unit_classes.items()
                for phase in phases
            }
        counts: Counter[tuple[str, int]] = Counter((action.kind, action.chunk) for action in self.actions)
        passes: dict[tuple[Phase, str], int] = {(phase, name): 0 for name in self.unit_classes for phase in phases}
        for chunk, members in zip(self.chunk_indices, self.chunks, strict=True):
            for unit in members:
                for phase in phases:
                    passes[phase, self.class_of[unit]] += counts[phase, chunk]
        return passes


def unit_classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    """Return the units of each class, in forward order: `embed`, `head`, and classes of `blocks` that differ in their
    sublayers or in what they recompute."""
    classes: dict[str, tuple[str, ...]] = {}
    for unit in units(spec):
        name = unit_class(spec, s, unit)
        classes[name] = (*classes.get(name, ()), unit)
    return classes


def unit_class(spec: ModelSpec, s: Strategy, unit: str) -> str:
    """Return the class of a unit, which names its terms."""
    kind, _, index = unit.partition(".")
    repeat, words = repeat_of(s, unit), _kind_words(spec)[int(index)] if kind == "blocks" else ()
    return ", ".join((kind, *words, *((repeat,) if repeat != "none" else ())))


@lru_cache(maxsize=256)
def _kind_words(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return for every block the words that distinguish its kind from the model's others: "dense" if others have
    experts, "window" if others have no window; if that is not enough, its sublayers."""
    blocks = architecture(spec).blocks
    kinds = list({id(block): block for block in blocks}.values())
    routed = [block.first(Router) is not None for block in kinds]
    windows = [any(op.window for op in block.all(Attend)) for block in kinds]
    words = [
        ("dense",) * (not has_experts and any(routed)) + ("window",) * (has_window and not all(windows))
        for has_experts, has_window in zip(routed, windows, strict=True)
    ]
    if len(set(words)) < len(kinds):
        words = [(block.label,) for block in kinds]
    if len(set(words)) < len(kinds):
        words = [(f"{i}. {block.label}",) for i, block in enumerate(kinds, start=1)]
    by_id = {id(block): of_kind for block, of_kind in zip(kinds, words, strict=True)}
    return tuple(by_id[id(block)] for block in blocks)


def repeat_of(s: Strategy, unit: str) -> Recompute:
    """Return the part of a unit's forward pass that its backward pass recomputes."""
    kind, _, index = unit.partition(".")
    return s.recompute_of(int(index)) if kind == "blocks" else "none"
