"""`phalanx calibrate`: a few measured steps bend the prediction for a user's own machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from phalanx.answers.query import Query
from phalanx.cli.command import command
from phalanx.cli.output import Display
from phalanx.cli.terminal import require_writable

_OF_ALL = ("model", "cluster", "gpus", "batch", "seq", "stack", "precision", "options", "changes")


@command
def calibrate(
    steps: list[str],
    query: Annotated[Query, _OF_ALL],
    output: Annotated[Display, "json", "save"],
    out: Path | None = None,
) -> None:
    """Fit a few factors to steps that you measured on your machines, and predict with them from then on.

    The factors multiply the seconds of products, attention, memory-bound work, links inside and between nodes, and
    launches; a prior keeps three steps from moving one far. Each step is also predicted from the others.

    steps STEP...: Measured steps: CONFIGURATION=LOG, CONFIGURATION=SECONDS, a log that prints its own arguments,
        tp=8,zero=1=SECONDS with --model and the rest, or a CSV with the columns step and measured.
    --out FILE.toml: Write the factors there, for --calibration.
    """
    from phalanx.answers.calibration import calibration_of

    if out is not None:
        require_writable("--out", out)
    output.show(calibration_of(steps, query, out))
