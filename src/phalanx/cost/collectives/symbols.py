"""The formulas of `closed_form` as text, for readers: latency, bandwidth and reduction terms of each algorithm.

α: seconds per message, β: seconds per byte sent, γ: seconds per byte reduced, p: ranks, n: bytes of the buffer, lg:
the logarithm to base 2, rounded up; m: segments. A test evaluates each text and compares it with `closed_form`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """Time = latency α + sent β + reduced γ, each a factor as text."""

    latency: str
    """Messages that one rank sends, one after the other."""
    sent: str
    """Bytes that the rank on the critical path sends."""
    reduced: str = "0"
    """Bytes added by the rank on the critical path."""
    condition: str = ""
    """Condition on p; "" for any."""


_POWER = "p a power of two"
FORMULAS: dict[tuple[str, str], Formula] = {
    ("broadcast", "flat"): Formula("(p-1)", "(p-1) n"),
    ("broadcast", "binomial"): Formula("lg p", "lg p n"),
    ("broadcast", "chain"): Formula("(p-2+m)", "(p-2+m) n/m"),
    ("broadcast", "scatter_all_gather"): Formula("(lg p + p-1)", "2 n (p-1)/p"),
    ("reduce", "flat"): Formula("(p-1)", "(p-1) n", "(p-1) n"),
    ("reduce", "binomial"): Formula("lg p", "lg p n", "lg p n"),
    ("scatter", "flat"): Formula("(p-1)", "n (p-1)/p"),
    ("scatter", "binomial"): Formula("lg p", "n (p-1)/p"),
    ("gather", "flat"): Formula("(p-1)", "n (p-1)/p"),
    ("gather", "binomial"): Formula("lg p", "n (p-1)/p"),
    ("all_gather", "ring"): Formula("(p-1)", "n (p-1)/p"),
    ("all_gather", "doubling"): Formula("lg p", "n (p-1)/p", condition=_POWER),
    ("all_gather", "bruck"): Formula("lg p", "n (p-1)/p"),
    ("reduce_scatter", "ring"): Formula("(p-1)", "n (p-1)/p", "n (p-1)/p"),
    ("reduce_scatter", "pairwise"): Formula("(p-1)", "n (p-1)/p", "n (p-1)/p"),
    ("reduce_scatter", "halving"): Formula("lg p", "n (p-1)/p", "n (p-1)/p", _POWER),
    ("all_to_all", "pairwise"): Formula("(p-1)", "n (p-1)/p"),
    ("all_to_all", "bruck"): Formula("lg p", "lg p n/2", condition=_POWER),
    ("all_reduce", "naive"): Formula("2 (p-1)", "2 (p-1) n", "(p-1) n"),
    ("all_reduce", "binomial"): Formula("2 lg p", "2 lg p n", "lg p n"),
    ("all_reduce", "doubling"): Formula("lg p", "lg p n", "lg p n", _POWER),
    ("all_reduce", "double_tree"): Formula(
        "(4 m + 4 lg p - 5 - 2 (lg p % 2))",
        "(4 m + 4 lg p - 5 - 2 (lg p % 2)) n/(2 m)",
        "(2 m + 2 lg p - 4) n/(2 m)",
        "p a power of two above 2, m > 1",
    ),
    ("all_reduce", "ring"): Formula("2 (p-1)", "2 n (p-1)/p", "n (p-1)/p"),
    ("all_reduce", "rabenseifner"): Formula("2 lg p", "2 n (p-1)/p", "n (p-1)/p", _POWER),
    ("barrier", "dissemination"): Formula("lg p", "0"),
}
"""Formulas by (operation, algorithm); none for hierarchies, whose links differ."""
