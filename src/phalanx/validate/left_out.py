"""Constants fitted without the rows of one family, for the prediction of these rows as if they had not been
published. Written by `python -m calibration --leave-out`; families that no constant is fitted on have none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from phalanx.cost.analytic.fitted_constants import fitted_constants

FILE = Path(__file__).parent / "data" / "left_out.json"
"""By name: the kinds of runs left out together (prediction_error.kinds_of), and the resulting constants that differ
from the shipped ones."""


@cache
def constants() -> tuple[tuple[frozenset[str], dict[str, float]], ...]:
    """Return (kinds of runs, all constants as fitted without them) for each family that is left out in turn."""
    return tuple(
        (frozenset(without["kinds"]), {**fitted_constants(), **without["constants"]})
        for without in json.loads(FILE.read_text()).values()
    )
