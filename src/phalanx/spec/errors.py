"""Errors about input, in one line (the field, its value, the reason, and the remedy), and of a schedule that fails
its proof.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Input that cannot be used: `field = value: reason; remedy`. The command line prints that and exits with code 2.

    A value of None and an empty `remedy` are not shown.
    """

    def __init__(self, field: str, value: object, reason: str, remedy: str = "") -> None:
        self.field, self.value, self.reason, self.remedy = field, value, reason, remedy
        shown = "" if value is None else f" = {_short(value)}"
        named = _cut(field, 120) if field.strip() else repr(field)  # an empty key of a stranger's table
        line = f"{named}{shown}: {_cut(reason, 400)}" + (f"; {_cut(remedy, 600)}" if remedy else "")
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str, str]]:
        """Let another process raise it again: by default an exception is unpickled from its message alone."""
        return type(self), (self.field, self.value, self.reason, self.remedy)


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest corrections of a misspelt name: the one or two closest known names, or all if none is close."""
    names = sorted(set(known))  # a name may come from two tables
    close = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def _short(value: object) -> str:
    return _cut(repr(value) if isinstance(value, str) else str(value), 80)


def _cut(text: str, most: int) -> str:
    """Shorten a text to `most` characters by leaving some out after its first quarter: a path's end says most."""
    return text if len(text) <= most else f"{text[: most // 4]}...{text[most // 4 + 3 - most :]}"


class Unproved(ValueError):
    """A schedule that does not do what it must. The message names rank, action or chunk, and round."""
