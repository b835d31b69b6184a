"""What branches, programs and outputs need of the machine that follows a script: its records and its recursion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phalanx.frameworks.shell.invocation import Fork, Invocation
from phalanx.frameworks.shell.nodes import Assignment, Chain, Node
from phalanx.frameworks.shell.scope import Scope

Include = Callable[[str], "str | None"]
"""The text of a script that another one calls; None where it is not here."""


class Follower(Protocol):
    """A machine; machine.py says what its fields are."""

    invocations: list[Invocation]
    files: dict[str, str]
    forks: list[Fork]
    notes: list[str]
    batch: list[str]
    prefix: tuple[str, ...]
    depth: int
    references: dict[str, set[str]]
    outer: set[str]
    unset: set[str]

    @property
    def include(self) -> Include:
        """How it reads other scripts."""

    def node(self, node: Node, scope: Scope) -> bool | None:
        """Follow any part of a script; return its status, None where only a running shell could tell."""

    def chain(self, chain: Chain, scope: Scope) -> bool | None:
        """Follow commands one after the other."""

    def text(self, text: str, scope: Scope) -> bool | None:
        """Follow a text in this shell."""

    def assign(self, assignment: Assignment, scope: Scope) -> None:
        """Set a variable or an array."""

    def closure(self, names: set[str]) -> frozenset[str]:
        """Return the variables that some depend on, themselves included."""
