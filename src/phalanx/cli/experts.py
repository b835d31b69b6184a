"""`phalanx report experts`: how a run's tokens were spread over its experts."""

from __future__ import annotations

from phalanx.cli.options import Json, Plot, Run
from phalanx.cli.terminal import announce, console, exit_on_error, print_json, require_drawing


def experts(run: Run, plot: Plot = None, as_json: Json = False) -> None:
    """Show the busiest expert's load over the mean, layer by layer, in the course of a run."""
    from phalanx.report.experts import balance, busiest, picture, stretches
    from phalanx.runs.folder import metrics
    from phalanx.spec.errors import InputError

    with exit_on_error():
        require_drawing(plot)
        parts = stretches(metrics(run))
        if not parts:
            raise InputError(
                "run", str(run), "its metrics hold nothing about experts", "name a run of a model that has experts"
            )
        if plot is not None:
            from phalanx.report.pictures.files import write

            write([picture(parts, str(run))], plot)
            announce(f"wrote {plot}")
        if as_json:
            rows = [
                {
                    "first_step": part.first,
                    "last_step": part.last,
                    "dropped": part.dropped,
                    "busiest": {block: busiest(chosen) for block, chosen in part.chosen.items()},
                    "chosen": dict(part.chosen),
                }
                for part in parts
            ]
            print_json({"stretches": rows})
        else:
            console().print(balance(parts))
