"""An observation as JSON: the summary of its first class of ranks on top, then every class in full.

`observe` writes it, people pass it on, and `explain`, `lint`, `comm`, `predict` and `compare` read it. So types and
ranges are checked before anything is built: a count that is a text, a rank outside the world or an empty group is
refused with its place. Sites and groups of ranks are written once, and events name them by number.
"""

import json
from dataclasses import MISSING, asdict, fields, replace
from functools import cache
from typing import Annotated, Any, get_type_hints

from annotated_types import MinLen

from phalanx.schedule.event import Event, Phase
from phalanx.schedule.observation import (
    Amount,
    Observation,
    ObservedEvent,
    RankIndex,
    RankObservation,
    Site,
    Text,
    rows,
)
from phalanx.spec.errors import InputError

VERSION = 1
_DEFAULTS = asdict(Event("compute", "", "F")) | {"kind": None, "op": None, "phase": None}


def to_json(observation: Observation) -> dict[str, Any]:
    """Return an observation as JSON."""
    plain = {f.name: getattr(observation, f.name) for f in fields(Observation)}
    ranks = [_rank_to_json(r) for r in observation.ranks]
    return {"version": VERSION, "kind": "observation", **plain, **_summary(observation.ranks[0]), "ranks": ranks}


def _summary(r: RankObservation) -> dict[str, Any]:
    return {
        "collectives": [
            dict(zip(row._fields[:5], row[:5], strict=True))
            | {"count": count, "where": {"phase": row.phase, "module": row.module, "line": row.where}}
            for row, count in rows(r.events).items()
        ],
        "flops": [{"phase": phase, "module": module, "flops": n} for (phase, module), n in r.flops.items()],
        "peak_bytes": r.peak,
        "host_synchronisations": [
            {"call": s.call, "count": s.count, "where": {"phase": s.phase, "module": s.module, "line": str(s.site)}}
            for s in r.synchronisations
        ],
        "micro_batches": r.micro_batches,
        "optimizers": r.optimizers,
    }


def _rank_to_json(r: RankObservation) -> dict[str, Any]:
    sites = {site: i for i, site in enumerate(dict.fromkeys(o.site for o in r.events))}
    groups = {ranks: i for i, ranks in enumerate(dict.fromkeys(o.ranks for o in r.events))}
    return {
        **asdict(replace(r, events=())),
        "flops": [(phase, module, n) for (phase, module), n in r.flops.items()],
        "sites": list(sites),
        "groups": list(groups),
        "events": [(_fields(o.event), o.module, sites[o.site], groups[o.ranks], o.op_name) for o in r.events],
    }


def _fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event that differ from their defaults."""
    return {name: value for name, value in asdict(event).items() if value != _DEFAULTS.get(name)}


@cache
def _reader() -> Any:
    """Return the pydantic model of a file, made from the fields of Observation and RankObservation."""
    from pydantic import create_model  # takes a moment to import

    def columns(record: type[Any], **others: Any) -> dict[str, Any]:
        defaults = {f.name: f.default for f in fields(record) if f.default is not MISSING}
        types = get_type_hints(record, include_extras=True) | others
        return {name: (kind, defaults.get(name, ...)) for name, kind in types.items()}

    rank = create_model(
        "RankRecord",
        **columns(
            RankObservation,
            flops=list[tuple[Phase, Text, Amount]],
            sites=list[Site],
            groups=list[tuple[RankIndex, ...]],
            events=list[tuple[Event, Text, Amount, Amount, Text]],
        ),
    )
    ranks = Annotated[list[rank], MinLen(1)]  # type: ignore[valid-type]
    return create_model("ObservationRecord", **columns(Observation, ranks=ranks))


def from_json(text: str, name: str = "observation") -> Observation:
    """Read the text that `to_json` became; `name` names the file. Raises InputError with the place of a mistake."""
    from pydantic import ValidationError

    try:
        version = json.loads(text)["version"]
        if version != VERSION:
            raise ValueError(f"version {version} of an observation; this release reads {VERSION}")
        return _built(_reader().model_validate_json(text, strict=True))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Input ")
        reason = message[:1].lower() + message[1:]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        place, reason = name, f"is damaged: {error}"
    raise InputError(f"observation {place}", None, reason, "observe the program again")


def _built(record: Any) -> Observation:
    """Build an observation of ranks that the world has. Raises ValueError or IndexError."""
    ranks = tuple(_rank(r, record.world) for r in record.ranks)
    return Observation(**{f.name: getattr(record, f.name) for f in fields(Observation)} | {"ranks": ranks})


def _rank(record: Any, world: int) -> RankObservation:
    if record.rank >= world:
        raise ValueError(f"rank {record.rank} of a world of {world}")
    for group in record.groups:
        if len(set(group)) < len(group) or any(rank >= world for rank in group):
            raise ValueError(f"the group {str(group)[:60]} in a world of {world}")
    events = []
    for event, module, site, group, name in record.events:
        ranks = record.groups[group]
        if event.kind == "collective" and not ranks:
            raise ValueError(f"a collective ({event.op}) of no ranks")
        if event.peer is not None and not 0 <= event.peer < world:
            raise ValueError(f"a message to rank {event.peer} in a world of {world}")
        for amount in ("bytes", "flops", "alloc", "free", "group_size"):
            if not 0 <= getattr(event, amount) < 2**62:
                raise ValueError(f"an event's {amount} of {getattr(event, amount)}")
        events.append(ObservedEvent(event, module, record.sites[site], ranks, name))
    plain = {f.name: getattr(record, f.name) for f in fields(RankObservation)}
    flops = {(phase, module): n for phase, module, n in record.flops}
    return RankObservation(**plain | {"events": tuple(events), "flops": flops})
