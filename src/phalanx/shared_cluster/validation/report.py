"""Measured and predicted costs of placements, by machine and model."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from phalanx.report.style import table
from phalanx.shared_cluster.validation.placements import NAMES, PAIRS, PARAMETERS, Machine, Ratio


def machine(on: Machine, rows: Sequence[Ratio]) -> Table:
    """Tabulate a machine's models: the step on two nodes over one on as many GPUs of one node, measured and predicted
    at the middle batch, and the median error over all batches."""
    counts = [sum(map(int, near)) for near, _ in PAIRS]
    columns = ("model", "gradients", *(f"{n} GPUs" for n in counts), "median error")
    grid = table(on.title, *columns, left=("model",))
    for model, n in PARAMETERS.items():
        own = [r for r in rows if r.model == model]
        cells = []
        for gpus in counts:
            of = [r for r in own if r.gpus == gpus]
            cells.append(f"{of[len(of) // 2].measured:.2f}, {of[len(of) // 2].predicted:.2f}" if of else "")
        error = f"{median(abs(r.error) for r in own):.1%}" if own else ""
        grid.add_row(NAMES[model], f"{4 * n * 1e-6:.0f} MB", *cells, error)
    every = [abs(r.error) for r in rows]
    grid.add_row(f"all, {len(every)} ratios", "", *("" for _ in PAIRS), f"{median(every):.1%}")
    return grid
