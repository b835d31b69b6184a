"""What was measured of stacks and chips: fitted on the published runs that ship with Phalanx.

Written by `python -m benchmarks calibrate --write`; what each field means stands with its class (Profile,
Generation), from whose defaults the fit starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CONSTANTS: dict[str, float] = {}


def resolve(defaults: Mapping[str, float], chain: Sequence[str], constants: Mapping[str, float]) -> dict[str, float]:
    """Each field's constant: of the first in a chain of owners that has one, else the default."""
    found = dict(defaults)
    for field in defaults:
        for owner in chain:
            if f"{owner}.{field}" in constants:
                found[field] = constants[f"{owner}.{field}"]
                break
    return found
