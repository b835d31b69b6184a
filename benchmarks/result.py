"""One figure against its limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """No limit: shown for information."""

    name: str
    shown: str
    limit: str = ""
    kept: bool = True
