"""`phalanx cluster validate`: compare the predicted cost of placements with measured ones."""

from __future__ import annotations

from phalanx.cli.command import command
from phalanx.cli.terminal import console, print_json


@command
def validate(json: bool = False) -> None:
    """Predict what it costs to have a job's GPUs on two nodes: measured steps of small models on three machines, from
    the time of one GPU and the links' published rates."""
    from dataclasses import asdict

    from phalanx.shared_cluster.validation.placements import scores

    scored = scores()
    if json:
        print_json([asdict(on) | {"ratios": [asdict(r) | {"error": r.error} for r in rows]} for on, rows in scored])
        return

    from phalanx.shared_cluster.validation.placements import machine

    out = console()
    out.print("step on two nodes over one on as many GPUs of one node, measured and predicted", highlight=False)
    for on, rows in scored:
        out.print(machine(on, rows))
