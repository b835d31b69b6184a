"""What compression of gradients saves on the wire, over the ranks that reduce together."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.planning.tables import textbook
from phalanx.report.pictures.figure import Lines, Picture, PlotAxis, RuleLine, Series
from phalanx.spec.model.spec import Parameter
from phalanx.spec.strategy.compressors import PLACE_BYTES, Codes, Compression, Summed

_RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
_SIDE = 4096
_MATRIX = Parameter("blocks.0.attention.q.weight", (_SIDE, _SIDE), "column", "blocks.0")
"""The matrix that PowerSGD factors here; its saving depends on the shape."""


def compression() -> Picture:
    """Draw how many times less than a ring all-reduce in fp32 a rank sends under each compressor."""
    chosen = (
        ("bf16", Compression("bf16")),
        ("int8", Compression("int8")),
        ("int4", Compression("int4")),
        ("randk:0.01", Compression("randk", 0.01)),
        ("powersgd:4", Compression("powersgd", 4)),
        ("powersgd:32", Compression("powersgd", 32)),
        ("topk:0.01", Compression("topk", 0.01)),
    )
    curves = [Series(name, [(p, times_less(c)(p)) for p in _RANKS], dots=True) for name, c in chosen]
    taught = {int(row[0]): float(row[3]) for row in textbook.top_k(1e9, _RANKS, 0.01).rows}
    wide = textbook.PLACE_BYTES
    curves.append(Series(f"topk:0.01, places of {wide} bytes", list(taught.items()), dots=True))
    panel = Lines(
        PlotAxis("ranks that reduce together", "count", log=True, base=2, low=2, high=256),
        PlotAxis("times less than a ring all-reduce in fp32 sends", "count", log=True),
        tuple(curves),
        rules=(RuleLine("y", 1.0, "no less than without"),),
        height=340,
    )
    four, thirty_two = (times_less(Compression("powersgd", r))(8) for r in (4, 32))
    own = times_less(Compression("topk", 0.01))
    return Picture(
        "Compression of gradients: what it saves on the wire",
        (panel,),
        "the table of compressors that parses, sends and prices them (spec/strategy/compressors.py); top-k with the "
        "int64 places of torch.topk: `phalanx tables comm --params N --top-k 0.01`",
        f"What every rank chooses for itself travels by all-gather: top 1 % saves {own(2):.3g} times at 2 ranks and "
        f"{own(64):.3g} at 64 ({taught[2]:.3g} and {taught[64]:.3g} with places of {wide} bytes). PowerSGD of a "
        f"{_SIDE:,} x {_SIDE:,} matrix: {four:.0f} times less at rank 4, {thirty_two:.0f} at rank 32.",
    )


def times_less(c: Compression) -> Callable[[int], float]:
    """Return, by ranks, the bytes that a rank sends in an fp32 ring all-reduce over those it sends under `c`."""
    row = c.row
    if isinstance(row, Codes):  # an all-to-all and an all-gather: the same (p-1)/p twice
        return lambda p: 4 / row.bytes_per_element
    if isinstance(row, Summed):
        return lambda p: 1 / row.share(c, [_MATRIX])
    return lambda p: 2 * 4 / p / (row.share(c, p) * (4 + PLACE_BYTES))
