"""Parity with one process, in lines: each optimizer, compression, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.answers.parity import Parity
from phalanx.report.view import View


def view(p: Parity) -> View:
    """Return the lines of a comparison."""
    return View(list(_lines(p)))


def _lines(p: Parity) -> Iterator[str]:
    for row in p.optimizers:
        worst = f"  ({row['worst']})" if row["worst"] else ""
        yield f"{row['optimizer']:5}  loss {row['loss_rel_max']:.1e}  gradients {row['grad_rel_max']:.1e}{worst}"
        if row["near_tie"]:
            compared = f"only the {row['steps']} steps before it are compared"
            yield f"{'':7}a router's near-tie in {row['near_tie']}; {compared} (float64 has none)"
    if p.compression:
        lossy = p.compression
        lost = lossy["lost_rel_max"]
        kept = "nothing is kept back" if lost is None else f"sent + kept back = gradient to {lost:.1e}"
        yield (
            f"compressed, lr = 0: {kept}; the first step is off by {lossy['first_error']:.2%}, the mean of "
            f"{p.steps} by {lossy['mean_error']:.2%}; sgd and adamw above are without compression"
        )
    verdict = "holds" if p.passed else "DOES NOT HOLD"
    errors = f"loss_rel_max {p.loss_rel_max:.1e}, grad_rel_max {p.grad_rel_max:.1e}, bound {p.bound:.1e}"
    yield f"parity of {p.strategy} in {p.dtype} over {p.steps} steps {verdict}: {errors}"
