"""Version of plan.json, model.json and cluster files. Files of any other version are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.spec.errors import InputError

VERSION = 2


def tables_of(content: Mapping[str, Any], version: object, kind: str, where: str) -> dict[str, Any]:
    """Return the tables of a file without its `version`.

    `kind` (plan, model, cluster) and `where`, the file's name, are for messages. Raises InputError for another
    version.
    """
    if version != VERSION:
        raise InputError(kind, where, f"has version {version!r}", f"this Phalanx reads version {VERSION}")
    return {key: value for key, value in content.items() if key != "version"}
