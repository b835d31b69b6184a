"""A measured figure with its limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """A figure and whether it keeps its limit; without a limit it is only shown."""

    name: str
    shown: str
    limit: str = ""
    kept: bool = True
