"""The text of a shell script from left to right: blanks, comments, quotations, brackets, words, here-documents."""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NoReturn

from phalanx.spec.errors import InputError

DEEPEST = 40
"""Levels of compound commands in one another."""
MOST_WORDS = 50_000
"""Words of the longest script."""


_INSIDE = r"[^\s<>|&;()`\"'$]+"
PLACEHOLDER = re.compile(
    rf"<(?=[A-Za-z])(?:[A-Z0-9_-]+|(?i:your|my|path|num|insert)[\w-]*|{_INSIDE}(?:[ \t]+{_INSIDE})+)>"
    r"(?=[\s\"'/,:.\\]|\Z)"
)
"""A blank that the author leaves to the reader, `<PATH TO gpt-vocab.json>`; a shell would take it for
redirections."""
STOP = frozenset(" \t\n;|&()<>")
_WORD = re.compile(r"[a-z]+(?=[\s;|&()<>]|\Z)|[{}!](?=[\s;|&()<>]|\Z)")
"""A word that could be a reserved one: lower-case letters, a brace or `!`."""
_BLANKS = re.compile(r"(?:[ \t\r]|\\\n)*(?:#[^\n]*)?")


@dataclass
class ScriptText:
    """A script's text. `at`: where the next token begins; `depth`: of brackets and compound commands; `count`: words
    read."""

    text: str
    at: int = 0
    depth: int = 0
    count: int = 0
    documents: dict[int, int] = field(default_factory=dict)
    """Where a line ends -> where the here-documents that follow it end."""

    def __post_init__(self) -> None:
        self.lines = [m.start() for m in re.finditer("\n", self.text)]

    def line(self, at: int | None = None) -> int:
        return bisect_right(self.lines, (self.at if at is None else at) - 1) + 1

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        raise InputError("script", None, f"line {self.line(at)}: {reason}", "is it cut short?")

    def blanks(self, lines: bool = False) -> None:
        """Go to the next token; with `lines` over the ends of lines too."""
        while True:
            self.at = _BLANKS.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if not (lines and self.text.startswith("\n", self.at)):
                return
            self.newline()

    def newline(self) -> None:
        """Go over the end of a line, and the here-documents that follow it."""
        self.at = self.documents.get(self.at, self.at + 1)

    def document(self, end: str, tabs: bool) -> str:
        """Return the here-document that follows the present line. `tabs`: tabs at the start of its lines are
        removed."""
        line = self.text.find("\n", self.at)
        at = self.documents.get(line, line + 1)
        taken: list[str] = []
        while line >= 0 and at < len(self.text):
            stop = self.text.find("\n", at)
            stop = len(self.text) if stop < 0 else stop
            written = self.text[at:stop].lstrip("\t") if tabs else self.text[at:stop]
            at = min(stop + 1, len(self.text))
            if written.rstrip(" \t") == end:
                self.documents[line] = at
                return "".join(taken)
            taken.append(written + "\n")
        self.fail(f"has a here-document that does not end: {end}")

    def word(self) -> str:
        """Take a word as it is written; "" where none begins."""
        start = self.at
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in STOP:
                if c == "<" and (left := PLACEHOLDER.match(self.text, self.at)):
                    self.at = left.end()
                    continue
                if c in "<>" and self.text.startswith("(", self.at + 1):  # process substitution
                    self.at = self.parenthesis(self.at + 1)
                    continue
                if not (c == "(" and self.at > start and self.text[self.at - 1] in "@?*+!"):  # extended patterns
                    break
                self.at = self.parenthesis(self.at)
                continue
            self.at = self.piece(self.at)
        if self.at > start:
            self.count += 1
            if self.count > MOST_WORDS:
                raise InputError("script", None, f"has more than {MOST_WORDS:,} words", "is it the right file?")
        return self.text[start : self.at]

    def piece(self, at: int) -> int:
        """Return where a character, a quotation or an expansion ends."""
        c = self.text[at]
        if c == "\\":
            return min(at + 2, len(self.text))
        if c == "'" or self.text.startswith("$'", at):
            return self.quotation(at + (c == "$"), escapes=c == "$")
        if c == '"':
            return self.double(at)
        if c == "`":
            end = re.compile(r"(?:[^`\\]|\\.)*`", re.S).match(self.text, at + 1)
            return end.end() if end else self.fail("a ` does not end", at)
        if self.text.startswith("$(", at):
            return self.parenthesis(at + 1)
        if self.text.startswith("${", at):
            return self.brace(at + 1)
        return at + 1

    def quotation(self, at: int, escapes: bool) -> int:
        pattern = r"(?:[^'\\]|\\.)*'" if escapes else r"[^']*'"
        end = re.compile(pattern, re.S).match(self.text, at + 1)
        return end.end() if end else self.fail(f"has a quote that does not end: {self.text[at : at + 20]!r}", at)

    def double(self, start: int) -> int:
        at = start + 1
        while at < len(self.text):
            c = self.text[at]
            if c == '"':
                return at + 1
            at = self.piece(at) if c in "\\`" or self.text.startswith(("$(", "${"), at) else at + 1
        self.fail(f"has a quote that does not end: {self.text[start : start + 20]!r}", start)

    def parenthesis(self, start: int) -> int:
        return self.nested(start, "(", ")")

    def brace(self, start: int) -> int:
        return self.nested(start, "{", "}")

    def nested(self, start: int, opens: str, closes: str) -> int:
        """Return where a bracket at `start` closes."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"is nested more than {DEEPEST} deep", start)
        at, level = start + 1, 1
        while at < len(self.text):
            c = self.text[at]
            if c == opens:
                level += 1
            elif c == closes:
                level -= 1
                if not level:
                    self.depth -= 1
                    return at + 1
            elif c == "#" and opens == "(" and self.text[at - 1] in " \t\n":
                end = self.text.find("\n", at)
                at = len(self.text) if end < 0 else end
                continue
            elif c in "\\'\"`" or self.text.startswith(("$(", "${", "$'"), at):
                at = self.piece(at)
                continue
            at += 1
        self.fail(f"has a {opens} that does not end: {self.text[start : start + 20]!r}", start)

    def reserved(self, *words: str) -> str:
        """Take one of several reserved words if it is next; "" if none is."""
        self.blanks(lines=True)
        match = _WORD.match(self.text, self.at)
        if not match or match[0] not in words:
            return ""
        self.at = match.end()
        return match[0]

    def require(self, *words: str) -> str:
        return self.reserved(*words) or self.fail(f"{' or '.join(words)} is missing")

    def ended(self, ends: tuple[str, ...]) -> bool:
        at = self.at
        taken = self.reserved(*ends)
        self.at = at
        return bool(taken)

    def close(self, character: str) -> None:
        self.blanks(lines=True)
        if not self.text.startswith(character, self.at):
            self.fail(f"{character} is missing")
        self.at += 1
