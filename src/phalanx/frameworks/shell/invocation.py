"""What a script starts, where it could not decide, and how a part of it ends."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PLACES = re.compile(r"RANK|MASTER|PORT$|HOST|ADDR|RDZV|SOCKET|LOG|_ID$|PATH|DIR$")
"""Names of variables that tell parts of one training from one another, or places."""


@dataclass(frozen=True)
class Invocation:
    """A program that the script starts. `environment`: what it exports for it; `names`: variables that its words
    depend on."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int
    directory: str
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fork:
    """A place where the script cannot decide. `taken`, `other`: variables that differ, as each branch leaves them."""

    line: int
    reason: str
    taken: Mapping[str, str]
    other: Mapping[str, str]

    def note(self, names: frozenset[str]) -> str:
        """Say what differs among variables of a command; "" where nothing does."""
        differing = sorted(name for name in set(self.taken) & names if not _PLACES.search(name))
        if not differing:
            return ""
        parts = (f"{n} is {self.taken[n] or 'unset'!s}, else {self.other[n] or 'unset'!s}" for n in differing[:3])
        return f"line {self.line}: {self.reason}: {'; '.join(parts)}"


class Left(Exception):
    """The script, a function or a loop ends here: exit, return, break, continue."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how
