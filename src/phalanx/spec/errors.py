"""Errors about input, in one line: which field, which value, why it is wrong, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Input that cannot be used: `field = value: reason; remedy`. The command line prints that and exits with code 2.

    A value of None is not shown, nor an empty `remedy`, which says what would be right.
    """

    def __init__(self, field: str, value: object, reason: str, remedy: str = "") -> None:
        self.field, self.value, self.reason, self.remedy = field, value, reason, remedy
        shown = "" if value is None else f" = {_short(value)}"
        super().__init__(f"{field}{shown}: {reason}" + (f"; {remedy}" if remedy else ""))


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest what a misspelt name may have meant: the one or two closest known names, or all if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:20]}...{text[-57:]}"  # the end of a path says most
