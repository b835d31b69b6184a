"""What a script starts, where it could not decide, and how a part of it ends."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PLACES = re.compile(r"RANK|MASTER|PORT$|HOST|ADDR|RDZV|SOCKET|LOG|_ID$|PATH|DIR$")
"""Variables that differ between processes of one training, or that name places: they decide nothing."""

_LONGEST = 80
"""Characters from which a value is cut."""


@dataclass(frozen=True)
class Invocation:
    """A program that the script starts. `words`: with its launchers in front; `environment`: variables that the
    script exports to it; `line`: of the script, from 1; `directory`: where it starts; `names`: variables that its
    words depend on; `pasted`: the last of the lines below it that are taken for its rest, 0 without any."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int
    directory: str
    names: frozenset[str] = frozenset()
    pasted: int = 0


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
        pairs = ((n, *_differing_words(self.taken[n], self.other[n])) for n in differing[:3])
        parts = (f"{n} is {taken or 'unset'}, else {other or 'unset'}" for n, taken, other in pairs)
        return f"line {self.line}: {self.reason}: {'; '.join(parts)}"


def _differing_words(a: str, b: str) -> tuple[str, str]:
    """Return two values; long ones without the words that both begin with, cut to 80 characters."""
    if len(a) <= _LONGEST >= len(b):
        return a, b
    x, y = a.split(), b.split()
    same = next((i for i, (u, v) in enumerate(zip(x, y, strict=False)) if u != v), min(len(x), len(y)))
    rest = [" ".join((*(("...",) if same else ()), *words[same:])) for words in (x, y)]
    first, second = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..." for text in rest)
    return first, second


class ControlExit(Exception):
    """The script, a function or a loop ends here: exit, return, break, continue. `status`: as it ends."""

    def __init__(self, how: str, status: bool = True) -> None:
        super().__init__(how)
        self.how, self.status = how, status
