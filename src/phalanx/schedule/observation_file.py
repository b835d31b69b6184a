"""An observation as a file has it: its types and ranges, checked before anything is built from it.

`observe` writes the JSON, people pass it on, and `explain`, `lint`, `comm`, `predict` and `compare` read it: a count
that is a text, a rank outside the world or a group of nobody is refused by its place, not found by whoever computes
with it.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from phalanx.schedule.event import Event, Phase
from phalanx.schedule.observation import Holder, Observation, Trained, from_json
from phalanx.spec.errors import InputError

_Amount = Annotated[int, Field(ge=0, le=2**62)]
_Count = Annotated[int, Field(ge=1, le=10**9)]
_Rank = Annotated[int, Field(ge=0, lt=10**7)]
_Text = Annotated[str, Field(max_length=4096)]
_Site = tuple[_Text, _Amount, _Text]


class _Place(TypedDict):
    phase: Phase
    module: _Text


class _BackwardStart(TypedDict):
    phase: Phase
    micro_batches: Annotated[list[_Amount], Field(min_length=1)]
    held: list[Holder]


class _RankRecord(TypedDict):
    rank: _Rank
    count: _Count
    are: _Text
    step: _Count
    flops: list[tuple[Phase, _Text, _Amount]]
    start: dict[_Text, _Amount]
    peak_bytes: _Amount
    peak_at: _Place
    held_at_peak: list[Holder]
    host_peak_bytes: _Amount
    host_synchronisations: list[tuple[_Text, _Text, _Text, _Site, _Amount]]
    micro_batches: Annotated[int, Field(ge=0, le=10**9)]
    optimizers: list[_Text]
    flops_by_type: dict[_Text, _Amount]
    trained: list[Trained]
    kept: list[tuple[_Text, _Site, _Amount]]
    held_before_backward: list[_BackwardStart]
    notes: list[_Text]
    sites: list[_Site]
    groups: list[list[_Rank]]
    events: list[tuple[Event, _Text, _Amount, _Amount, _Text]]


class _Record(TypedDict):
    program: _Text
    world: Annotated[int, Field(ge=1, le=10**7)]
    axes: dict[_Text, _Count]
    device: _Text
    torch: _Text
    ranks: Annotated[list[_RankRecord], Field(min_length=1)]
    notes: list[_Text]


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(_Record)


def checked(content: dict[str, Any], text: str, where: str) -> Observation:
    """Return the observation of a file with that content, which is the JSON `text`; `where` names the file. Raises
    InputError with the place of what is wrong."""
    try:
        _adapter().validate_json(text, strict=True)
        _require_sound(content)
        return from_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Input ")
        reason = message[:1].lower() + message[1:]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        place, reason = where, f"is damaged: {error}"
    raise InputError(f"observation {place}", None, reason, "observe the program again")


def _require_sound(content: dict[str, Any]) -> None:
    """Require ranks that the world has, and amounts that are none below nothing. Raises ValueError."""
    world = content["world"]
    for r in content["ranks"]:
        if r["rank"] >= world:
            raise ValueError(f"rank {r['rank']} of a world of {world}")
        for group in r["groups"]:
            if len(set(group)) < len(group) or any(rank >= world for rank in group):
                raise ValueError(f"the group {str(group)[:60]} in a world of {world}")
        for event, _, site, group, _ in r["events"]:
            r["sites"][site]
            if event["kind"] == "collective" and not r["groups"][group]:
                raise ValueError(f"a collective ({event['op']}) of no ranks")
            if event.get("peer") is not None and not 0 <= event["peer"] < world:
                raise ValueError(f"a message to rank {event['peer']} in a world of {world}")
            for name in ("bytes", "flops", "alloc", "free", "group_size"):
                if not 0 <= event.get(name, 1) < 2**62:
                    raise ValueError(f"an event's {name} of {event[name]}")
        before_backward = [h for b in r["held_before_backward"] for h in b["held"]]
        for item in (*r["held_at_peak"], *before_backward, *r["trained"]):
            for name, value in item.items():
                if isinstance(value, int) and not 0 <= value < 2**62:
                    raise ValueError(f"{name} of {value}")
