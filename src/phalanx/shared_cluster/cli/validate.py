"""`phalanx cluster validate`: compare the predicted cost of placements with measured ones."""

from __future__ import annotations

from phalanx.cli.options import Json
from phalanx.cli.terminal import console, exit_on_error, print_json


def validate(as_json: Json = False) -> None:
    """Predict what it costs to have a job's GPUs on two nodes: measured steps of small models on three machines, from
    the time of one GPU and the links' published rates."""
    with exit_on_error():
        from dataclasses import asdict

        from phalanx.shared_cluster.validation.placements import scores

        scored = scores()
        if as_json:
            print_json(
                [asdict(on) | {"ratios": [asdict(r) | {"error": r.error} for r in rows]} for on, rows in scored]
            )
            return

        from phalanx.shared_cluster.validation.placements import machine

        out = console()
        out.print("step on two nodes over one on as many GPUs of one node, measured and predicted", highlight=False)
        for on, rows in scored:
            out.print(machine(on, rows))
