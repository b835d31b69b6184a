"""The growth of models: parameters by date of release, and the loss that the scaling law gives.

A model of N parameters has after D tokens the loss (Hoffmann et al. 2022, "Training Compute-Optimal Large Language
Models", equation 10)

    L(N, D) = E + A / N^α + B / D^β        in nats a token

E is the entropy of text, which no model goes below; the second term falls with size, the third with data.
"""

import math
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from phalanx.planning.lookup import model_named
from phalanx.report.pictures.figure import Lines, Mark, Picture, PlotAxis, Series
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class Release:
    """A model with the day on which it was published."""

    name: str
    day: date
    preset: str = ""
    """The preset that counts its parameters."""
    stated: float = 0.0
    """Parameters as its paper states them, where there is no preset."""

    @property
    def parameters(self) -> float:
        """Its parameters."""
        return float(model_named(self.preset)[0].parameter_count) if self.preset else self.stated

    @property
    def year(self) -> float:
        """The day as a year with its fraction."""
        return self.day.year + (self.day.timetuple().tm_yday - 1) / 365.25


RELEASES = tuple(Rows(Path(__file__).with_suffix(".toml"), record(Release, "name")).values())
GPT3_YEARS = 6 * 175e9 * 300e9 / 28e12 / (365 * 86400)
"""Years of one GPU of 28 TFLOP/s for 300 B tokens of 175 B parameters: 6 N D FLOP."""
KAPLAN_N = 0.076
"""Exponent of parameters, of Kaplan et al. 2020, equation 1.1; that of compute is 0.050 there."""


@dataclass(frozen=True)
class Law:
    """The constants of L(N, D)."""

    entropy: float
    a: float
    b: float
    alpha: float
    beta: float


LAW = Law(entropy=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
"""The constants that the paper fitted."""


def doubling() -> str:
    """Return a sentence on the ratio of the largest release to the first, and the time of a doubling."""
    first, largest = RELEASES[0], max(RELEASES, key=lambda m: m.parameters)
    times, years = largest.parameters / first.parameters, largest.year - first.year
    return (
        f"From {first.name} to {largest.name} {times:,.0f} times in {years:.1f} years: "
        f"doubled every {12 * years / math.log2(times):.1f} months."
    )


def loss(parameters: float, tokens: float, law: Law = LAW) -> float:
    """Return the loss in nats a token."""
    of_size: float = law.a / parameters**law.alpha
    of_data: float = law.b / tokens**law.beta
    return law.entropy + of_size + of_data


def growth() -> Picture:
    """Draw the parameters of released models over the years, and the loss over parameters by the scaling law."""
    years = Lines(
        PlotAxis("year of release", "year", low=2017.0, high=2027.0),
        PlotAxis("parameters", "parameters", log=True, low=5e7, high=4e12),
        (Series("", ()),),
        tuple(Mark(m.year, m.parameters, m.name, 1 if m.preset else 7) for m in RELEASES),
        head="Growth of models",
        height=330,
    )
    sizes = np.geomspace(1e7, 1e12, 30).tolist()
    ways = (
        ("20 tokens a parameter", lambda n: 20 * n),
        ("300 B tokens", lambda n: 300e9),
        ("unlimited tokens", lambda n: 1e30),
    )
    law = Lines(
        PlotAxis("parameters N", "parameters", log=True, low=1e7, high=1e12),
        PlotAxis("loss, nats a token", low=1.5, high=5.5),
        tuple(Series(name, [(n, loss(n, tokens(n))) for n in sizes]) for name, tokens in ways),
        head=f"L(N, D) = {LAW.entropy} + {LAW.a:g} / N^{LAW.alpha} + {LAW.b:g} / D^{LAW.beta}",
        height=240,
    )
    return Picture(
        "Growth of models, and what size buys: L(N)",
        (years, law),
        "sizes: the presets of `phalanx tables models` where there is one, else (grey) as their papers say; days of "
        "papers or announcements; the law: Hoffmann et al. 2022, equation 10",
        f"{doubling()} GPT-3 takes one GPU of 28 TFLOP/s {GPT3_YEARS:.1f} years (6 N D FLOP). "
        f"Each tenfold model takes {1 - 10**-LAW.alpha:.0%} off the part of the loss that size decides. By the older "
        f"law L ~ N^-{KAPLAN_N:g} (Kaplan et al. 2020), half of the loss takes {2 ** (1 / KAPLAN_N):,.0f} times the "
        "parameters.",
    )
