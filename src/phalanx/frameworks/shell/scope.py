"""The state of a shell at one point of a script, and text in it that only the running shell could tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phalanx.frameworks.shell.nodes import Node
from phalanx.spec.errors import InputError

OPEN = "\ue000"
"""The mark in front of a part that only the running shell could tell."""
DEEPEST = 12
"""Scripts, functions and substitutions inside one another."""
LONGEST_LOOP = 1_000
"""Rounds of a loop that are followed, and places of an array."""
LARGEST_WORK = 2**24
"""Characters that expansions may copy in all; a script that doubles a variable in a loop would need any number."""
WORD = 100
"""Work of making a word beyond its characters, in characters copied."""
_SHIFT = 0xE100
_OPAQUE = {ord(c): _SHIFT + ord(c) for c in map(chr, range(128)) if not (c.isalnum() or c == "_")}
"""Punctuation and blanks inside an open part, as characters that no shell reads: so it stays one word when its text
is read again, as by `bash -c "$COMMAND"`."""
_SHOWN = {ord(OPEN): "$"} | {mark: chr(character) for character, mark in _OPAQUE.items()}


@dataclass
class Budget:
    """Work that is left for a whole script."""

    left: int = LARGEST_WORK

    def spend(self, work: int) -> None:
        """Count what an expansion copies or a command costs. Raises InputError when nothing is left."""
        self.left -= work + 1
        if self.left < 0:
            reason = f"its variables and loops make more than {LARGEST_WORK:,} characters of it"
            raise InputError("script", None, reason, "give the command line that it comes to")


@dataclass
class Scope:
    """Variables, functions and arguments of a shell at one point of a script."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    arguments: list[str] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    directory: str = ""
    """Where `cd` led, relative to where the script starts; open behind a folder that is not known."""
    name: str = "script.sh"
    capture: Callable[[str, Scope], str | None] = lambda text, scope: None
    """What a command substitution prints; None where only a shell could tell."""
    budget: Budget = field(default_factory=Budget)
    environment: dict[str, str] = field(default_factory=dict)
    """Defaults that the script has for variables of the environment, by name."""
    tables: set[str] = field(default_factory=set)
    """Associative arrays; an element is a variable, `name[key]`."""
    called: bool = False
    """Whether its arguments are known: arguments of a script that is given alone stay open."""

    def copy(self) -> Scope:
        """Return a shell of its own, with the same budget."""
        variables = {name: list(value) for name, value in self.variables.items()}
        self.budget.spend(16 * len(variables))
        return replace(
            self,
            variables=variables,
            exported=set(self.exported),
            arguments=list(self.arguments),
            functions=dict(self.functions),
            tables=set(self.tables),
        )

    def keys(self, name: str) -> list[str]:
        """Return the keys of an associative array, in the order in which they were set."""
        return [n[len(name) + 1 : -1] for n in self.variables if n.startswith(f"{name}[")]

    def value(self, name: str) -> str | None:
        """Return a variable's text, of an array its first element; None for one that is not set here."""
        values = self.variables.get(name)
        return None if values is None else values[0] if values else ""

    def assign(self, name: str, value: str) -> None:
        """Set a variable."""
        self.budget.spend(len(value))
        self.variables[name] = [value]


def unknown(text: str) -> str:
    """Return an open part, written as `text` in the script."""
    return OPEN + re.sub(r"\s+", " ", plain(text)).translate(_OPAQUE)


def is_open(text: str) -> bool:
    """Whether a part of a text is open."""
    return OPEN in text


def plain(text: str) -> str:
    """Return a text as it was written, with `$` where it is open."""
    return text.translate(_SHOWN)
