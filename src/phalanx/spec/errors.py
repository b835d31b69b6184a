"""Wrong input, said in one line: which field, which value, why it cannot be, and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Input that cannot be used. The command line prints it as one line and exits with code 2."""

    def __init__(self, field: str, value: object, reason: str, mend: str = "") -> None:
        self.field, self.value, self.reason, self.mend = field, value, reason, mend
        shown = "" if value is None else f" = {_short(value)}"
        super().__init__(f"{field}{shown}: {reason}" + (f"; {mend}" if mend else ""))


def nearest(word: str, known: Iterable[str]) -> str:
    """The mend for a misspelt name: the nearest known ones, or all of them where none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:20]}...{text[-57:]}"  # of a path the end says most
