"""Numbers on axes: their ticks, positions and short forms."""

import math
from collections.abc import Iterator
from dataclasses import replace

from phalanx.report.pictures.figure import PlotAxis


def short(value: float, unit: str) -> str:
    """Write a number in a few characters: 2 GiB, 40 GB, 5 µs, 30 %, 1.2 T."""
    if unit == "bytes":
        for name, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
            if value >= scale:
                return f"{_digits(value / scale)} {name}"
        return f"{_digits(value)} B"
    if unit == "s":
        for name, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if value >= scale * 0.9999:
                return f"{_digits(value / scale)} {name}"
        return "0" if value == 0 else f"{_digits(value * 1e9)} ns"
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "year":
        return str(int(value))
    if unit == "parameters":
        for name, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
            if value >= scale * 0.99999:
                return f"{_digits(value / scale)} {name}"
    if unit == "GB":
        return f"{_digits(value)}"
    for name, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.99999 and (scale > 1e3 or value >= 1e4):
            tail = unit if unit in ("B/s", "FLOP/s") else ""
            return f"{_digits(value / scale)} {name}{tail}"
    return _digits(value) + (f" {unit}" if unit in ("B/s", "FLOP/s") else "")


def _digits(value: float) -> str:
    """Write a number with at least three significant digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def ticks(axis: PlotAxis, low: float, high: float) -> Iterator[float]:
    """Yield the values at which an axis has ticks."""
    if axis.log:
        step = axis.base
        first, last = math.ceil(math.log(low, step) - 1e-9), math.floor(math.log(high, step) + 1e-9)
        if step == 10 and high / low < 300:
            near = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
            near = [value for value in near if low * 0.9999 <= value <= high * 1.0001]
            yield from near if len(near) > 1 else ticks(replace(axis, log=False), low, high)
            return
        for k in range(first, last + 1):
            yield float(step) ** k
        return
    rough = (high - low) / 5
    scale = 10.0 ** math.floor(math.log10(rough))
    step_ = next(s * scale for s in (1, 2, 2.5, 5, 10) if s * scale >= rough * 0.999)
    value = math.ceil(low / step_ - 1e-9) * step_
    while value <= high * (1 + 1e-9):
        yield value
        value += step_


def position(axis: PlotAxis, low: float, high: float, value: float) -> float:
    """Return the place of a value on an axis, from 0 to 1."""
    if axis.log:
        return math.log(max(value, 1e-300) / low) / math.log(high / low) if high > low else 0.5
    return (value - low) / (high - low) if high > low else 0.5
