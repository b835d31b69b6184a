"""Collective times in closed form: the published formulas of each algorithm on uniform links, as functions and, for
readers, as text (FORMULAS: latency, bandwidth and reduction terms). A test evaluates each text and compares it with
the function.

α: seconds per message, β: seconds per byte sent, γ: seconds per byte reduced, p: ranks, n: bytes of the buffer, lg:
the logarithm to base 2, rounded up; m: segments.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from phalanx.spec.rows import Rows, record


def best_segments(op: str, algorithm: str, p: int, n: float, alpha: float, beta: float) -> int:
    """Return the power of two nearest to the best number of segments m for n bytes over p ranks, at most 1,024: if an
    algorithm takes (c + d m)(α + n β / e m), the best m is sqrt(c n β / (d e α)). 1 for algorithms that do not cut
    the buffer."""
    if (op, algorithm) == ("broadcast", "chain"):
        fixed, per, parts = p - 2, 1, 1
    elif (op, algorithm) == ("all_reduce", "double_tree"):
        fixed, per, parts = 4 * math.ceil(math.log2(p)) - 4, 4, 2
    else:
        return 1
    if fixed <= 0 or n <= 0 or beta <= 0:
        return 1
    best = math.log2(fixed * n * beta / (per * parts * alpha)) / 2 if alpha > 0 else 10
    return int(2 ** min(10, max(0, round(best))))


_POWERS = {("all_gather", "doubling"), ("reduce_scatter", "halving"), ("all_to_all", "bruck")}


def closed_form(
    op: str, algorithm: str, p: int, n: float, alpha: float, beta: float, gamma: float, segments: int = 8
) -> float | None:
    """Return the published time in seconds for n bytes; None for hierarchies, or if a condition fails, such as p
    being a power of two. Formulas assume that p, and the segments of a pipelined algorithm, divide n. Sources: Thakur
    et al. 2005, Rabenseifner 2004; MPICH's file comments; Sanders, Speck & Träff 2009, see `_double_tree`."""
    lg = math.ceil(math.log2(p))
    m = 1 << (p.bit_length() - 1)
    if m != p and (op, algorithm) in _POWERS:
        return None
    volume = n * (p - 1) / p
    # If p is no power of two: ranks beyond the power of two m send to one of these first, and get the result back.
    folded = m.bit_length() - 1
    fold = 0.0 if m == p else 2 * alpha + 2 * n * beta + n * gamma
    table: dict[tuple[str, str], float | None] = {
        ("broadcast", "flat"): (p - 1) * (alpha + n * beta),
        ("broadcast", "binomial"): lg * (alpha + n * beta),
        ("broadcast", "chain"): (p - 2 + segments) * (alpha + n / segments * beta) if p > 1 else 0.0,
        ("broadcast", "scatter_all_gather"): (lg + p - 1) * alpha + 2 * volume * beta,
        ("reduce", "flat"): (p - 1) * (alpha + n * beta + n * gamma),
        ("reduce", "binomial"): lg * (alpha + n * beta + n * gamma),
        ("scatter", "flat"): (p - 1) * (alpha + n / p * beta),
        ("scatter", "binomial"): lg * alpha + volume * beta,
        ("gather", "flat"): (p - 1) * (alpha + n / p * beta),
        ("gather", "binomial"): lg * alpha + volume * beta,
        ("all_gather", "ring"): (p - 1) * alpha + volume * beta,
        ("all_gather", "doubling"): lg * alpha + volume * beta,
        ("all_gather", "bruck"): lg * alpha + volume * beta,
        ("reduce_scatter", "ring"): (p - 1) * alpha + volume * (beta + gamma),
        ("reduce_scatter", "pairwise"): (p - 1) * alpha + volume * (beta + gamma),
        ("reduce_scatter", "halving"): lg * alpha + volume * (beta + gamma),
        ("all_to_all", "pairwise"): (p - 1) * alpha + volume * beta,
        ("all_to_all", "bruck"): lg * (alpha + n / 2 * beta),
        ("all_reduce", "naive"): (p - 1) * (2 * alpha + 2 * n * beta + n * gamma),
        ("all_reduce", "binomial"): lg * (2 * alpha + 2 * n * beta + n * gamma),
        ("all_reduce", "doubling"): folded * (alpha + n * beta + n * gamma) + fold,
        ("all_reduce", "double_tree"): _double_tree(p, n, alpha, beta, gamma, segments),
        ("all_reduce", "ring"): 2 * (p - 1) * alpha + volume * (2 * beta + gamma),
        ("all_reduce", "rabenseifner"): 2 * folded * alpha + n * (m - 1) / m * (2 * beta + gamma) + fold,
        ("barrier", "dissemination"): lg * alpha,
    }
    return table.get((op, algorithm))


def _double_tree(p: int, n: float, alpha: float, beta: float, gamma: float, k: int) -> float | None:
    """Return (4 k + 4 lg p - 5)(α + n β / 2k), or 2 hops less if lg p is odd: a rank forwards 4 k pieces of n / 2k,
    and the first goes up lg p edges and down again, waiting its turn (every other round) at nearly each. With k =
    `best_segments` that is 2 n β + 4 lg p α + O(sqrt(lg p α n β)).

    Holds for p a power of two, k > 1, and adding a piece (n γ / 2k) no slower than sending it; otherwise None: any
    other p takes less than 4 k + 4 lg p hops, with lg p rounded up."""
    if p == 1:
        return 0.0
    if p & (p - 1) or k == 1:
        return None
    lg = p.bit_length() - 1
    hops = 4 * k + 4 * lg - 5 - 2 * (lg % 2) if p > 2 else 2 * k
    adds = 2 * k + 2 * lg - 4 if p > 2 else k
    return hops * (alpha + n / (2 * k) * beta) + adds * n / (2 * k) * gamma


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


_ROWS = Rows(Path(__file__).with_suffix(".toml"), record(Formula))
FORMULAS: dict[tuple[str, str], Formula] = {(name.split()[0], name.split()[1]): row for name, row in _ROWS.items()}
"""Formulas by (operation, algorithm); none for hierarchies, whose links differ."""
