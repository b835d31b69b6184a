"""Disturbances of a step parsed from the words of options: slow ranks, slow links, kills, jitter."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.planning.stragglers.links import SlowLink
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError

_SLOW = re.compile(r"(?:(rank|node)=)?(\d+):([\d.]+)")
_LINK = re.compile(r"(nic|node|tier)=([^:=]+):([\d.]+%?)")
_KILL = re.compile(r"(rank|node)=(\d+)@([\d.]+)(%|s)")


@dataclass(frozen=True)
class Kill:
    """A rank's process, or a node, that dies within a step."""

    takes_node: bool
    number: int
    first_rank: int
    ranks: int
    at: float
    """Seconds into the step, or its share."""
    is_share: bool


def _words(line: str) -> Iterator[str]:
    return filter(None, (part.strip() for part in line.split(",")))


def _require_inside(field: str, word: str, number: int, count: int, what: str) -> None:
    if number >= count:
        raise InputError(field, word, f"is outside of the {what} of the strategy", f"use 0 to {count - 1}")


def factors(slow: str, world: int, node: int) -> npt.NDArray[np.float64]:
    """Parse slow ranks such as `rank=37:1.3,node=4:1.1`; return how many times longer each takes, (world,). `node`:
    ranks of a node. Raises InputError."""
    factor = np.ones(world)
    for word in _words(slow):
        match = _SLOW.fullmatch(word)
        if match is None or not 0 < _number(match[3]) < 1000:
            raise InputError("slow", word, "is no rank and factor", "use rank=37:1.3 or node=4:1.1")
        first, count = (int(match[2]) * node, node) if match[1] == "node" else (int(match[2]), 1)
        _require_inside("slow", word, first // count, -(-world // count), f"{world} ranks")
        factor[first : first + count] = float(match[3])
    return factor


def slow_links(line: str, world: int, cluster: ClusterSpec) -> tuple[SlowLink, ...]:
    """Parse links with the share of their rate that is left, such as `nic=37:0.5`. Raises InputError."""
    links = []
    for word in _words(line):
        match = _LINK.fullmatch(word)
        value = math.nan if match is None else _number(match[3])
        if match is None or not 0 < value < 1:
            remedy = "use nic=37:0.5, node=4:50% or tier=NAME:0.5"
            raise InputError("slow-link", word, "is no link and share of its rate between 0 and 1", remedy)
        kind, name = match[1], match[2].strip()
        if kind == "tier":
            names = [tier.name for tier in cluster.tiers]
            alike = [i for i, tier in enumerate(names) if tier.lower() == name.lower()]
            if not alike:
                raise InputError("slow-link", word, f"names no tier of {cluster.name}", f"one of {', '.join(names)}")
            links += [SlowLink("tier", i, value) for i in alike]
            continue
        if not name.isdecimal():
            raise InputError("slow-link", word, "has no number", f"use {kind}=4:0.5")
        node, last = cluster.ranks_per_node, cluster.tiers[-1]
        _require_inside("slow-link", word, int(name), world if kind == "nic" else -(-world // node), f"{world} ranks")
        if kind == "nic" and (last.uplink_bandwidth_bytes_per_s_per_direction or len(cluster.tiers) == 1 < node):
            reason = "names a rank's own port, and here the ranks of a node share a link"
            raise InputError("slow-link", word, reason, f"name the node: node={int(name) // node}:{match[3]}")
        links.append(SlowLink("nic" if kind == "nic" else "node", int(name), value))
    return tuple(links)


def kill_in(word: str, world: int, node: int) -> Kill:
    """Parse a kill such as `rank=37@40%` or `node=4@2.5s`. Raises InputError."""
    match = _KILL.fullmatch(word.strip())
    at = math.nan if match is None else _number(match[3])
    if match is None or math.isnan(at):
        reason = "is no rank or node and moment of a step"
        raise InputError("kill", word, reason, "use rank=37@40% of the step, or node=4@2.5s into it")
    takes_node, number = match[1] == "node", int(match[2])
    _require_inside("kill", word, number, -(-world // node) if takes_node else world, f"{world} ranks")
    is_share = match[4] == "%"
    if is_share and not at <= 100:
        raise InputError("kill", word, "is after the end of the step", "use 0% to 100%")
    first, ranks = (number * node, node) if takes_node else (number, 1)
    return Kill(takes_node, number, first, ranks, at / 100 if is_share else at, is_share)


def ranks_in(line: str, world: int, field: str = "ranks", kind: str = "ranks of the strategy") -> tuple[int, ...]:
    """Parse numbers below `world`, such as `0-7,37`, each once. `kind`: what errors call them. Raises InputError."""
    numbers: list[int] = []
    for word in _words(line):
        first, dash, last = word.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise InputError(field, word, f"is no number or range of {kind}", "use 0-7,37")
        low, high = int(first), int(last) if dash else int(first)
        if low > high:
            raise InputError(field, word, "goes backwards", f"use {high}-{low}")
        if high >= world:
            raise InputError(field, word, f"is outside of the {world} {kind}", f"use 0 to {world - 1}")
        numbers += range(low, high + 1)
    return tuple(dict.fromkeys(numbers))


def jitter_of(text: str | float) -> float:
    """Parse a share such as `2%` or 0.02. Raises InputError."""
    value = _number(str(text).strip())
    if not 0 <= value <= 1:
        raise InputError("jitter", text, "is no share of a rank's time", "use 2% or 0.02")
    return value


def _number(text: str) -> float:
    """Parse a number or a percentage; NaN for what is neither."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan
