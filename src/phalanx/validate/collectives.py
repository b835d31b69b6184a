"""Published times of single collectives compared with those predicted from a system's links.

busbw = bytes / seconds x (n - 1) / n, twice that for all_reduce        (as nccl-tests defines it, n ranks)
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.cost.analytic.chips import system
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.spec.cluster.chips import CHIPS
from phalanx.validate.models import Unspecified
from phalanx.validate.records import Row, readable
from phalanx.validate.scores import errors

NEEDED = ("hardware", "collective", "bytes", "gpus")
"""Columns that a file of collectives must have."""
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_CHIPS = ("A100-SXM-40GB", "A100-SXM-80GB", "H100", "H200", "B200", "GB200", "GB300")
_NAMES = {"A100-SXM-40GB": "A100-40GB", "A100-SXM-80GB": "A100"}
_NODES = {
    # bytes/s of all ports of a node in one direction, by the words of the source
    "4x100Gb/s": 50e9,
    "8x200Gb/s": 200e9,
    "16x200Gb/s": 400e9,
    "16x100Gb/s": 200e9,
    "32x100Gb/s": 400e9,
    "NDR400 IB per GPU": 400e9,
}


@dataclass(frozen=True)
class MeasuredCollective:
    """One measured collective."""

    row: Row
    op: str
    chip: str
    """Chip, by its name in cost/hardware."""
    node: int
    """Ranks per node (NVLink domain)."""
    nic: float
    """Bytes/s of one rank's network port, in one direction."""
    cloud: bool
    """Whether the network is a cloud's own (EFA, TCPXO)."""
    ranks: int
    bytes: float
    """As nccl-tests counts: the gathered buffer of all_gather and reduce_scatter, the send buffer of all_to_all."""
    measured_s: float


def point(row: Row, chips_known: Iterable[str] = _CHIPS) -> MeasuredCollective:
    """Return the measured collective of a row. Raises Unspecified if its chip is not one of `chips_known`, its links
    between nodes are not stated, or no time can be derived."""
    chips = [name for name in chips_known if row["hardware"].startswith(name)]
    if not chips:
        raise Unspecified(f"hardware {row['hardware'][:40] or 'not stated'} is not modelled, or of unknown make")
    op, ranks, size = row["collective"], row.count("gpus"), row.number("bytes")
    if op not in _OPS or not ranks or not size:
        raise Unspecified("operation, ranks or bytes are not stated")
    rate = row.number("busbw_gbs")
    time = row.number("time_us")
    passes = 2 if op == "all_reduce" else 1
    if not time and not rate:
        raise Unspecified("neither time nor bus bandwidth is stated")
    seconds = time * 1e-6 if time else passes * size * (ranks - 1) / ranks / (rate * 1e9)  # type: ignore[operator]
    nodes, links = row.count("nodes", 1) or 1, row["interconnect"]
    node = row.count("gpus_per_node", 8) or 8
    if "one rack" in links or "1 rack" in links:
        node, nodes = ranks, 1
    stated = [total / node for words, total in _NODES.items() if words in links]
    if nodes > 1 and not stated:
        raise Unspecified("links between nodes are not stated")
    chip, cloud = max(chips, key=len), "EFA" in links or "TCPXO" in links
    return MeasuredCollective(
        row, op, _NAMES.get(chip, chip), node, stated[0] if stated else 50e9, cloud, ranks, size, seconds
    )


def predicted_s(p: MeasuredCollective, constants: Mapping[str, float] | None = None) -> float:
    """Predict the seconds of a measured collective."""
    return float(collective_s(p.op, p.bytes, p.ranks, 1, system(p.chip, p.node, p.nic, p.cloud, constants)))


def points(rows: list[Row]) -> tuple[list[MeasuredCollective], list[tuple[Row, str]]]:
    """Split rows into collectives that can be predicted, and the others with the reason."""
    return readable(rows, point, Unspecified)


def scores_by_chip(rows: list[Row]) -> dict[str, Any]:
    """Score predicted times of a file as `errors` does, in percent, by chip and operation, on every chip with a
    datasheet; rows that cannot be predicted are counted by reason."""
    usable, skipped = readable(rows, partial(point, chips_known=(*_CHIPS, *CHIPS)), Unspecified)
    by_chip: dict[str, dict[str, Any]] = {}
    for chip, op in sorted({(p.chip, p.op) for p in usable}):
        mine = [p for p in usable if (p.chip, p.op) == (chip, op)]
        by_chip.setdefault(chip, {})[op] = errors([predicted_s(p) for p in mine], [p.measured_s for p in mine])
    every = errors([predicted_s(p) for p in usable], [p.measured_s for p in usable])
    return {"by_chip": by_chip, "all": every, "refused": dict(Counter(why for _, why in skipped).most_common())}


def link_scores(rows: list[Row]) -> dict[str, Any]:
    """Score predicted times as `errors` does, in percent: all-reduce, and the other operations."""
    usable, skipped = points(rows)
    out: dict[str, Any] = {}
    for name, wanted in (("all_reduce", True), ("other", False)):
        selected = [p for p in usable if (p.op == "all_reduce") == wanted]
        out[name] = errors([predicted_s(p) for p in selected], [p.measured_s for p in selected])
    return {**out, "skipped": len(skipped), "reasons": dict(Counter(why for _, why in skipped).most_common())}
