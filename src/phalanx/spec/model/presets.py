"""Models by name, as their papers or published config.json files describe them: models.toml, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.spec import MODEL_FIELDS
from phalanx.spec.rows import Rows, require_fields

_REQUIRED = ("source", "family", "vocab", "hidden", "layers", "heads", "ffn", "max_seq")


def _fields(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row, which are some of a ModelSpec's. Raises ValueError for others, and for too few."""
    require_fields(name, row, ("source", *MODEL_FIELDS), _REQUIRED)
    return {field: value for field, value in row.items() if field != "source"}


PRESETS: Mapping[str, dict[str, Any]] = Rows(Path(__file__).with_name("models.toml"), _fields)
"""Every model that Phalanx knows, by name; `families.complete` adds the fields that its family fixes."""


def preset(name: str) -> dict[str, Any]:
    """Return the fields of a preset; `families.complete` adds the rest. Raises InputError for unknown names."""
    if name not in PRESETS:
        raise InputError("model.preset", name, "is not a model that Phalanx knows", nearest(name, PRESETS))
    return dict(PRESETS[name])
