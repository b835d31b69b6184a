"""The growth of models: parameters by date of release, and the loss that the scaling law gives."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

import numpy as np

from phalanx.planning.lookup import model_named
from phalanx.report.pictures.figure import Lines, Mark, Picture, PlotAxis, Series
from phalanx.textbook.gallery.scaling_law import LAW, loss


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


RELEASES = (
    Release("GPT", date(2018, 6, 11), stated=117e6),  # Radford et al. 2018
    Release("BERT", date(2018, 10, 11), stated=340e6),  # Devlin et al. 2018, large
    Release("GPT-2", date(2019, 2, 14), "gpt2-xl"),
    Release("Megatron", date(2019, 9, 17), stated=8.3e9),  # Shoeybi et al. 2019
    Release("T5", date(2019, 10, 23), stated=11e9),  # Raffel et al. 2019
    Release("GPT-3", date(2020, 5, 28), "gpt3-175b"),
    Release("MT-NLG", date(2021, 10, 11), "mt-nlg-530b"),
    Release("GPT-NeoX", date(2022, 2, 2), "gpt-neox-20b"),
    Release("PaLM", date(2022, 4, 5), "palm-540b"),
    Release("LLaMA", date(2023, 2, 24), "llama-65b"),
    Release("Llama 2", date(2023, 7, 18), "llama2-70b"),
    Release("Mixtral", date(2023, 12, 11), "mixtral-8x7b"),
    Release("DeepSeek-V2", date(2024, 5, 7), "deepseek-v2"),
    Release("Llama 3.1", date(2024, 7, 23), "llama3-405b"),
    Release("DeepSeek-V3", date(2024, 12, 26), "deepseek-v3"),
    Release("gpt-oss", date(2025, 8, 5), "gpt-oss-120b"),
)
"""Days of the papers or announcements."""


KAPLAN_N = 0.076
"""Exponent of parameters, of Kaplan et al. 2020, equation 1.1; that of compute is 0.050 there."""


def growth() -> Picture:
    """Draw the parameters of released models over the years, and the loss over parameters by the scaling law."""
    years = Lines(
        PlotAxis("year of release", "year", low=2018.0, high=2027.0),
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
        ("tokens without end", lambda n: 1e30),
    )
    law = Lines(
        PlotAxis("parameters N", "parameters", log=True, low=1e7, high=1e12),
        PlotAxis("loss, nats a token", low=1.5, high=5.0),
        tuple(Series(name, [(n, loss(n, tokens(n))) for n in sizes]) for name, tokens in ways),
        head=f"L(N, D) = {LAW.entropy} + {LAW.a:g} / N^{LAW.alpha} + {LAW.b:g} / D^{LAW.beta}",
        height=240,
    )
    return Picture(
        "Growth of models, and what size buys: L(N)",
        (years, law),
        "sizes: the presets of `phalanx presets models` where there is one, else (grey) as their papers say; days of "
        "papers or announcements; the law: Hoffmann et al. 2022, equation 10",
        f"Each tenfold model takes {1 - 10**-LAW.alpha:.0%} off the part of the loss that size decides. By the older "
        f"law L ~ N^-{KAPLAN_N:g} (Kaplan et al. 2020), half of the loss takes {2 ** (1 / KAPLAN_N):,.0f} times the "
        "parameters.",
    )
