"""The observation: what one training step of any torch program did, on one rank of each class of ranks.

Recorded by observation/ (torch); read by tables, prices and comparisons (no torch). Its events are the same Events as
a StepProgram's, so that any program is priced and compared like our own; each comes with the place in the program
where it was issued.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le, MaxLen, MinLen

from phalanx.schedule.event import Event, Phase

Amount = Annotated[int, Ge(0), Le(2**62)]
Count = Annotated[int, Ge(1), Le(10**9)]
RankIndex = Annotated[int, Ge(0), Le(10**7)]
Text = Annotated[str, MaxLen(4096)]


class Site(NamedTuple):
    """A line of a program. `file`: relative to the working folder if it lies below."""

    file: Text = ""
    line: Amount = 0
    function: Text = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


NOWHERE = Site()
STAY_GATHERED = "parameters that stay gathered"
"""Kind, of tensors, of parameters that were gathered before the step began and never freed."""


@dataclass(frozen=True, slots=True)
class ObservedEvent:
    """One event of an observed step. `module`: full name of the innermost module that was running ("" outside of
    all), or of the one whose parameters fully_shard gathers; `ranks`: global ranks of a collective's group, or both
    ends of a message; `op_name`: torch's name of the operation."""

    event: Event
    module: str = ""
    site: Site = NOWHERE
    ranks: tuple[int, ...] = ()
    op_name: str = ""


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """An operation, `call`, in which the host waited for the device `count` times in a step, or would on a GPU."""

    call: Text
    phase: Phase
    module: Text
    site: Site
    count: Count


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of device memory at a moment: a kind of tensor, and the module that it belongs to."""

    kind: Text
    module: Text
    bytes: Amount


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory that a line of the program allocated for one operation, in `count` tensors of one kind and model;
    its bytes at the step's peak, and as the fullest backward pass begins.

    `operation`: torch's name of it, or "backward of" the one whose gradient it computes; "" where the kind is enough.
    `saved_for`: the operations that keep it for their backward pass. `units`: in order.
    """

    kind: Text
    model: Text
    operation: Text
    site: Site
    saved_for: tuple[Text, ...]
    units: tuple[Text, ...]
    count: Count
    peak_bytes: Amount
    backward_bytes: Amount


@dataclass(frozen=True, slots=True)
class BackwardStart:
    """The holders of device memory at the beginning of the backward passes of some micro-batches, which are the same
    for each. `phase`: B, or I where a pipeline computes gradients of inputs separately."""

    phase: Phase
    micro_batches: Annotated[tuple[Amount, ...], MinLen(1)]
    holders: tuple[Holder, ...]

    @property
    def bytes(self) -> int:
        """The live bytes."""
        return sum(h.bytes for h in self.holders)


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """Parameters of one unit that an optimizer updates: elements on this rank, on all ranks, and their type."""

    unit: Text
    elements: Amount
    all_elements: Amount
    dtype: Text


@dataclass(frozen=True, slots=True)
class KeptStorage:
    """Bytes computed by the forward pass at `site` that only autograd still held when the step ended."""

    module: Text
    site: Site
    bytes: Amount


@dataclass(frozen=True)
class RankObservation:
    """One observed step of `rank`, which represents a class of `count` ranks; `are`: the ranks of the class.

    `step`: its number; 1, the first, includes lazy initialisation and is used only if there is no second.
    `flops`: by (phase, module). `start`: live bytes by kind when the step began. `peak`: the most live bytes of the
    device; `peak_phase`, `peak_module`: what ran then; `holders`: what was live then. `host_peak`: the most bytes in
    host memory, if the program computes on another device. `flops_by_type`: by type of the operands. `trained`: the
    parameters that got a gradient. `kept`: storage that only autograd's graph held when the step ended.
    `backward_starts`: in order. `models`: the variables of the models that the program calls, if there are several;
    names of their modules begin with them. `allocations`: the largest, by line. `notes`: calls that were answered or
    skipped.
    """

    rank: RankIndex
    count: Count
    are: Text
    step: Count
    events: tuple[ObservedEvent, ...]
    flops: dict[tuple[Phase, str], int]
    start: dict[Text, Amount]
    peak: Amount
    peak_phase: Phase
    peak_module: Text
    holders: tuple[Holder, ...]
    host_peak: Amount
    synchronisations: tuple[Synchronisation, ...]
    micro_batches: Amount
    optimizers: tuple[Text, ...]
    flops_by_type: dict[Text, Amount]
    trained: tuple[TrainedParameters, ...]
    kept: tuple[KeptStorage, ...]
    backward_starts: tuple[BackwardStart, ...] = ()
    models: tuple[Text, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    notes: tuple[Text, ...] = ()

    @property
    def communication(self) -> tuple[ObservedEvent, ...]:
        """The collectives and messages of the step, in the order in which they were issued."""
        return tuple(o for o in self.events if o.event.kind != "compute")

    @property
    def rebuilt_at(self) -> frozenset[Site]:
        """Lines at which DDP rebuilds its buckets, once, as its second step begins: the first rank sends the order of
        the gradients and the sizes of the buckets (torch 2.13, torch/csrc/distributed/c10d/reducer.cpp,
        sync_bucket_indices)."""
        ordered = Counter(
            o.site
            for o in self.communication
            if (o.event.op, o.event.phase, o.event.dtype, self.step) == ("broadcast", "F", "int32", 2)
        )
        return frozenset(site for site, n in ordered.items() if n > 1)

    def model_of(self, module: str) -> str:
        """Return the model to which a module belongs, "" if there is one model."""
        return next((m for m in self.models if module == m or module.startswith(f"{m}.")), "")

    @property
    def fullest_backward_start(self) -> BackwardStart | None:
        """The start of the backward pass that began with the most live bytes."""
        return max(self.backward_starts, key=lambda b: b.bytes, default=None)


@dataclass(frozen=True)
class Observation:
    """What a program does in one step at `world` ranks. `axes`: size of every named mesh axis; `device`: the type of
    device that the program computes on; `torch`: torch's version."""

    program: Text
    world: Annotated[int, Ge(1), Le(10**7)]
    axes: dict[Text, Count]
    device: Text
    torch: Text
    ranks: Annotated[tuple[RankObservation, ...], MinLen(1)]
    notes: tuple[Text, ...] = ()


@cache
def unit_of(module: str) -> str:
    """Return the unit that a module belongs to: the block of a stack of blocks (its name up to the first number), or
    else the module itself."""
    parts = module.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return module if numbered is None else ".".join(parts[: numbered + 1])


class ObservedRow(NamedTuple):
    """A group of equal collectives: the same operation, group, bytes, type, phase and place."""

    op: str
    axis: str
    group_size: int
    bytes: int
    dtype: str
    phase: str
    module: str
    where: str


def rows(observed: Iterable[ObservedEvent]) -> dict[ObservedRow, int]:
    """Count collectives and messages by row, in order of first appearance."""
    counts: Counter[ObservedRow] = Counter()
    for o in observed:
        e = o.event
        if e.kind != "compute":
            counts[ObservedRow(e.op, e.axis, e.group_size, e.bytes, e.dtype, e.phase, o.module, str(o.site))] += 1
    return dict(counts)
