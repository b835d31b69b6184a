"""Versions of plan.json, model.json and cluster files. Files of older versions are read.

2    keys are nouns of the field: kernels.whole -> pass_slowdown, kernels.coding -> compression_per_byte,
     kernels.residual and collectives.residual -> fit_error, experts.held -> local_count
1    the first; cluster files had no version then
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.spec.errors import InputError

VERSION = 2
"""The version that is written."""

_RENAMED = {
    "kernels": {"whole": "pass_slowdown", "coding": "compression_per_byte", "residual": "fit_error"},
    "collectives": {"residual": "fit_error"},
    "experts": {"held": "local_count"},
}
"""Version 2's name of each key of version 1, by the table that holds it."""


def current(content: Mapping[str, Any], version: object, kind: str, where: str) -> dict[str, Any]:
    """Return the tables of a file with the keys of this version, without `version`.

    `kind` (plan, model, cluster) and `where`, the file's name, are for messages. Raises InputError for an unknown
    version.
    """
    if version not in (1, VERSION):
        raise InputError(kind, where, f"has version {version!r}", f"this Phalanx reads versions 1 to {VERSION}")
    tables = {key: value for key, value in content.items() if key != "version"}
    return tables if version == VERSION else {key: _renamed(key, value) for key, value in tables.items()}


def _renamed(table: str, value: Any) -> Any:
    """Return a value of version 1, in which `table` names the innermost table, with version 2's keys."""
    if isinstance(value, list):
        return [_renamed(table, item) for item in value]
    if isinstance(value, dict):
        names = _RENAMED.get(table, {})
        return {names.get(key, key): _renamed(key, item) for key, item in value.items()}
    return value
