"""The observation: what one training step of any torch program did, on one rank of each class of ranks.

Written by observation/recorder (torch), read by tables, prices and comparisons (no torch). Its events are the
same Events as those of a StepProgram, so that a program that Phalanx did not write is priced and compared like one
that it did; beside each event stands where in the program it was issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from phalanx.schedule.event import Event

VERSION = 1


class Site(NamedTuple):
    """A place in a program. `file` as it was run, relative to the working folder where it lies below that."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


NOWHERE = Site()


@dataclass(frozen=True, slots=True)
class Observed:
    """One event of an observed step. `module`: full name of the innermost module that was running, "" outside of all,
    or of the one whose parameters fully_shard gathers; `ranks`: the global ranks of a collective's group, or both
    ends of a message; `op_name`: torch's own name."""

    event: Event
    module: str = ""
    site: Site = NOWHERE
    ranks: tuple[int, ...] = ()
    op_name: str = ""


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """The host waited for the device `count` times in a step, or would on a GPU: `call` says by what."""

    call: str
    phase: str
    module: str
    site: Site
    count: int


@dataclass(frozen=True, slots=True)
class Holder:
    """What held `bytes` of device memory at a moment: a kind of tensor, and the module it belongs to."""

    kind: str
    module: str
    bytes: int


@dataclass(frozen=True, slots=True)
class BackwardStart:
    """What device memory held as backward passes of `micro_batches` began, which found the same. `phase`: B, or I
    where a pipeline computes gradients of inputs apart."""

    phase: str
    micro_batches: tuple[int, ...]
    holders: tuple[Holder, ...]

    @property
    def bytes(self) -> int:
        """The live bytes."""
        return sum(h.bytes for h in self.holders)


@dataclass(frozen=True, slots=True)
class Trained:
    """Parameters of one unit that an optimizer updates: elements on this rank, elements of all, and their type."""

    unit: str
    elements: int
    all_elements: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that the forward pass computed at `site` and that only autograd still held when the step ended."""

    module: str
    site: Site
    bytes: int


@dataclass(frozen=True)
class RankObservation:
    """One observed step of `rank`, which stands for `count` ranks that are `are`.

    `start`: live bytes by kind when the step began; `peak`: the most live bytes of the device; `peak_phase`,
    `peak_module`: what ran then; `holders`: what was live then; `host_peak`: the most bytes in host memory, where the
    program computes on another device. `flops`: by (phase, module). `step`: 1 for the program's first, which includes
    lazy initialisation, and is taken only where there is no second. `flops_by_type`: by the type of the operands;
    `trained`: the parameters that got a gradient; `kept`: what only autograd's graph held when the step ended;
    `backward_starts`: what was live as backward passes began, in order.
    """

    rank: int
    count: int
    are: str
    step: int
    events: tuple[Observed, ...]
    flops: dict[tuple[str, str], int]
    start: dict[str, int]
    peak: int
    peak_phase: str
    peak_module: str
    holders: tuple[Holder, ...]
    host_peak: int
    synchronisations: tuple[Synchronisation, ...]
    micro_batches: int
    optimizers: tuple[str, ...]
    flops_by_type: dict[str, int]
    trained: tuple[Trained, ...]
    kept: tuple[Kept, ...]
    backward_starts: tuple[BackwardStart, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def communication(self) -> tuple[Observed, ...]:
        """The collectives and messages of the step, in the order in which they were issued."""
        return tuple(o for o in self.events if o.event.kind != "compute")

    @property
    def fullest_backward_start(self) -> BackwardStart | None:
        """Of the backward passes the one that began with most live bytes."""
        return max(self.backward_starts, key=lambda b: b.bytes, default=None)


@dataclass(frozen=True)
class Observation:
    """What a program does in one step at `world` ranks. `axes`: size of every named mesh axis; `device`: the type of
    device that the program computes on; `torch`: torch's version; `notes`: what was answered or skipped."""

    program: str
    world: int
    axes: dict[str, int]
    device: str
    torch: str
    ranks: tuple[RankObservation, ...]
    notes: tuple[str, ...] = ()


@cache
def unit(module: str) -> str:
    """Return the unit that a module belongs to: the block of a stack of blocks (its name up to the first number), or
    else the module itself."""
    parts = module.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return module if numbered is None else ".".join(parts[: numbered + 1])


class Row(NamedTuple):
    """Collectives that are alike: same operation, group, bytes, type, phase and place."""

    op: str
    axis: str
    group_size: int
    bytes: int
    dtype: str
    phase: str
    module: str
    where: str


def rows(observed: Iterable[Observed]) -> dict[Row, int]:
    """Count collectives and messages by row, in order of first appearance."""
    counts: Counter[Row] = Counter()
    for o in observed:
        e = o.event
        if e.kind != "compute":
            counts[Row(e.op, e.axis, e.group_size, e.bytes, e.dtype, e.phase, o.module, str(o.site))] += 1
    return dict(counts)


def to_json(observation: Observation) -> dict[str, Any]:
    """Return an observation as JSON: the summary of its first class of ranks on top, then every class in full."""
    first = observation.ranks[0]
    return {
        "version": VERSION,
        "kind": "observation",
        "program": observation.program,
        "world": observation.world,
        "axes": observation.axes,
        "device": observation.device,
        "torch": observation.torch,
        "notes": list(observation.notes),
        **_summary(first),
        "ranks": [rank_to_json(r) for r in observation.ranks],
    }


def _summary(r: RankObservation) -> dict[str, Any]:
    return {
        "collectives": [
            {
                "op": row.op,
                "axis": row.axis,
                "group_size": row.group_size,
                "bytes": row.bytes,
                "dtype": row.dtype,
                "count": count,
                "where": {"phase": row.phase, "module": row.module, "line": row.where},
            }
            for row, count in rows(r.events).items()
        ],
        "flops": [{"phase": phase, "module": module, "flops": n} for (phase, module), n in r.flops.items()],
        "peak_bytes": r.peak,
        "host_synchronisations": [
            {
                "call": s.call,
                "count": s.count,
                "where": {"phase": s.phase, "module": s.module, "line": str(s.site)},
            }
            for s in r.synchronisations
        ],
        "micro_batches": r.micro_batches,
        "optimizers": list(r.optimizers),
    }


def rank_to_json(r: RankObservation) -> dict[str, Any]:
    """Return one rank's record. Sites and modules are written once, and events name them by number."""
    sites = {site: i for i, site in enumerate(dict.fromkeys(o.site for o in r.events))}
    groups = {ranks: i for i, ranks in enumerate(dict.fromkeys(o.ranks for o in r.events))}
    return {
        "rank": r.rank,
        "count": r.count,
        "are": r.are,
        "step": r.step,
        "flops": [[phase, module, n] for (phase, module), n in r.flops.items()],
        "start": r.start,
        "peak_bytes": r.peak,
        "peak_at": {"phase": r.peak_phase, "module": r.peak_module},
        "held_at_peak": [asdict(h) for h in r.holders],
        "host_peak_bytes": r.host_peak,
        "host_synchronisations": [[s.call, s.phase, s.module, list(s.site), s.count] for s in r.synchronisations],
        "micro_batches": r.micro_batches,
        "optimizers": list(r.optimizers),
        "flops_by_type": r.flops_by_type,
        "trained": [asdict(t) for t in r.trained],
        "kept": [[k.module, list(k.site), k.bytes] for k in r.kept],
        "held_before_backward": [
            {"phase": b.phase, "micro_batches": list(b.micro_batches), "held": [asdict(h) for h in b.holders]}
            for b in r.backward_starts
        ],
        "notes": list(r.notes),
        "sites": [list(s) for s in sites],
        "groups": [list(g) for g in groups],
        "events": [[_fields(o.event), o.module, sites[o.site], groups[o.ranks], o.op_name] for o in r.events],
    }


def _fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event that differ from their defaults."""
    defaults = _PLAIN
    return {k: v for k, v in asdict(event).items() if v != defaults.get(k)}


_PLAIN = asdict(Event("compute", "", "F"))
_PLAIN.update(kind=None, op=None, phase=None)


def from_json(content: dict[str, Any]) -> Observation:
    """Read an observation that `to_json` wrote. Raises KeyError, TypeError or ValueError where it is not one."""
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']} of an observation; this release reads {VERSION}")
    return Observation(
        content["program"],
        content["world"],
        content["axes"],
        content["device"],
        content["torch"],
        tuple(rank_from_json(r) for r in content["ranks"]),
        tuple(content["notes"]),
    )


def rank_from_json(r: dict[str, Any]) -> RankObservation:
    """Read what `rank_to_json` returned."""
    sites = [Site(*s) for s in r["sites"]]
    groups = [tuple(g) for g in r["groups"]]
    return RankObservation(
        r["rank"],
        r["count"],
        r["are"],
        r["step"],
        tuple(Observed(Event(**e), module, sites[s], groups[g], name) for e, module, s, g, name in r["events"]),
        {(phase, module): n for phase, module, n in r["flops"]},
        r["start"],
        r["peak_bytes"],
        r["peak_at"]["phase"],
        r["peak_at"]["module"],
        tuple(Holder(**h) for h in r["held_at_peak"]),
        r["host_peak_bytes"],
        tuple(Synchronisation(c, p, m, Site(*s), n) for c, p, m, s, n in r["host_synchronisations"]),
        r["micro_batches"],
        tuple(r["optimizers"]),
        r["flops_by_type"],
        tuple(Trained(**t) for t in r["trained"]),
        tuple(Kept(module, Site(*site), n) for module, site, n in r["kept"]),
        tuple(
            BackwardStart(b["phase"], tuple(b["micro_batches"]), tuple(Holder(**h) for h in b["held"]))
            for b in r["held_before_backward"]
        ),
        tuple(r["notes"]),
    )
