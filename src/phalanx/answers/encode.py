"""Answers as plain data: what `--json` prints, what notebooks tabulate, and what an agent receives.

An answer is a frozen dataclass; its keys are the names of its fields. Fields with metadata {"plain": False} are
left out: they carry what pages and pictures are drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import singledispatch
from pathlib import Path
from typing import Any

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

DRAWN = {"plain": False}
"""Metadata of a field that is not part of the plain answer."""


@singledispatch
def plain(value: Any) -> Any:
    """Return a value as numbers, words, lists and dicts. Raises TypeError for a type without a plain form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value):
        shown = (f.name for f in fields(value) if f.metadata.get("plain", True))
        return {name: plain(getattr(value, name)) for name in shown}
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no plain form")


@plain.register
def _(value: Strategy) -> str:
    return str(value)


@plain.register
def _(value: StackOptions) -> dict[str, Any]:
    return value.changed()


@plain.register
def _(value: ModelSpec) -> dict[str, Any]:
    return {"family": value.family, "parameters": value.parameter_count}


@plain.register
def _(value: ClusterSpec) -> str:
    return value.name


@plain.register
def _(value: Path) -> str:
    return str(value)


@plain.register
def _(value: Enum) -> Any:
    return value.value
