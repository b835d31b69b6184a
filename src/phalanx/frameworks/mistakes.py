"""A mistake in a configuration that its own loader accepts, and the lint that finds it, from a reported issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout

Found = Iterator[tuple[str, str, str]]
"""(key, problem, remedy) of each mistake."""


@dataclass(frozen=True)
class Lint:
    """What finds a mistake in a file's tables and what was read from them. Lints of several frameworks may share a
    name."""

    name: str
    issue: str
    """Where it was reported: owner/repository#number."""
    examine: Callable[[Config, Configuration], Found]


@dataclass(frozen=True)
class Mistake:
    """A mistake in a configuration."""

    name: str
    key: str
    problem: str
    mend: str
    source: str


def arguments(config: Config) -> Mapping[str, Any]:
    """Return the arguments of a program: of a command line, or the tables themselves."""
    args = config.get("args")
    return args if isinstance(args, Mapping) else config


def arg(config: Config, name: str) -> Any:
    """Return an argument, however it is spelt; None where it is not there."""
    return Keys(arguments(config)).take(name, "")


def inner_ranks(layout: StatedLayout) -> int:
    """Return the ranks of a replica, axes that are left open counted as 1."""
    return (layout.tp or 1) * (layout.pp or 1) * (layout.cp or 1)


def inner_axes(layout: StatedLayout) -> str:
    """Return the axes of a replica as text, such as "tp 2 x pp 4"."""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "cp")}
    return " x ".join(f"{name} {n}" for name, n in degrees.items() if n and n > 1) or "1"
