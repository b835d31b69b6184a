"""What a shell script consists of: commands, pipelines, conditions, loops and functions (POSIX.1-2024, XCU 2.10).

Words are as they are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
"""A variable's name, as a pattern."""
REFERENCE = re.compile(rf"\$\{{?[#!]?({NAME}|[@*0-9])")
"""A reference to a variable or an argument."""
DECLARES = frozenset(("export", "declare", "typeset", "readonly", "local"))
"""Builtins whose words assign."""


@dataclass(frozen=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value`, or an array `name=( ... )` whose value is a tuple."""

    name: str
    value: str | tuple[str, ...]
    append: bool = False
    index: str = ""


@dataclass(frozen=True)
class Redirection:
    """`> file`, `< file`, or a here-document with its text; `quoted`: nothing in that text is expanded."""

    operator: str
    target: str
    document: str | None = None
    quoted: bool = False


@dataclass(frozen=True)
class SimpleCommand:
    """Assignments, words and redirections of one simple command."""

    words: tuple[str, ...]
    assignments: tuple[Assignment, ...]
    redirects: tuple[Redirection, ...]
    line: int


@dataclass(frozen=True)
class Test:
    """`[[ words ]]`, or `(( arithmetic ))`."""

    words: tuple[str, ...]
    arithmetic: str | None
    line: int


@dataclass(frozen=True)
class CommandPipeline:
    """Parts of which each reads what the one before it writes; `negated`: its status is turned over."""

    parts: tuple[Node, ...]
    negated: bool = False


@dataclass(frozen=True)
class Chain:
    """Pipelines, each behind its operator: `;`, `&`, `&&` or `||`."""

    links: tuple[tuple[str, CommandPipeline], ...]


@dataclass(frozen=True)
class If:
    """Conditions with their bodies in order, and the body of `else`."""

    branches: tuple[tuple[Chain, Chain], ...]
    otherwise: Chain | None
    line: int


@dataclass(frozen=True)
class For:
    """A loop over words; None: over the script's arguments. With `arithmetic`, the three parts of `for (( ))`."""

    name: str
    words: tuple[str, ...] | None
    body: Chain
    arithmetic: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class While:
    """A loop while, or until, a condition holds."""

    condition: Chain
    body: Chain
    until: bool
    line: int


@dataclass(frozen=True)
class CaseCommand:
    """A word, and bodies by patterns."""

    word: str
    arms: tuple[tuple[tuple[str, ...], Chain], ...]
    line: int


@dataclass(frozen=True)
class Function:
    """A function's name and body."""

    name: str
    body: Node


@dataclass(frozen=True)
class GroupCommand:
    """`{ ... }`, or `( ... )` as a subshell, with redirections."""

    body: Chain
    subshell: bool
    redirects: tuple[Redirection, ...] = ()


Node = SimpleCommand | Test | CommandPipeline | Chain | If | For | While | CaseCommand | Function | GroupCommand
