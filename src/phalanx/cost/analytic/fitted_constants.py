"""Constants of stacks and chips, as fitted by `python -m calibration --write` to the shipped published runs.

Fields are documented in their classes (profile.Profile, chips.Generation), from whose defaults the fit starts. The
file groups them by owner (a stack, a generation of chips, a chip), each with the runs that determine it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")


@cache
def fitted_constants() -> Mapping[str, float]:
    """Return the shipped constants, by `owner.field`, read once. Raises ValueError for one that is not a number."""
    constants: dict[str, float] = {}
    for group in json.loads(FILE.read_text()):
        for key, value in group["constants"].items():
            if not isinstance(value, float) or not 0 <= value < float("inf") or key in constants:
                raise ValueError(f"{FILE.name}: {key} = {value!r} is not a number, or is there twice")
            constants[key] = value
    return constants


def resolve(
    defaults: Mapping[str, float], chain: Sequence[str], constants: Mapping[str, float] | None
) -> dict[str, float]:
    """Return each field's constant: from the first owner in `chain` that has one, else the default. `constants`: by
    `owner.field`; None: the shipped ones."""
    constants = fitted_constants() if constants is None else constants
    result = dict(defaults)
    for field in defaults:
        for owner in chain:
            if f"{owner}.{field}" in constants:
                result[field] = constants[f"{owner}.{field}"]
                break
    return result
