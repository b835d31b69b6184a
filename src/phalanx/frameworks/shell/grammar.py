"""The grammar of a shell script: text -> commands, pipelines, conditions, loops and functions (POSIX.1-2024, XCU
2.10, with bash's arrays, `[[ ]]`, `(( ))` and here-strings).

Words are kept as they are written, quotes included; expansion.py says what they expand to. Nothing is run.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NoReturn

from phalanx.spec.errors import InputError

DEEPEST = 40
"""Levels of compound commands in one another."""
MOST_WORDS = 50_000
"""Words of the longest script."""


@dataclass(frozen=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value`, or an array `name=( ... )` whose value is a tuple."""

    name: str
    value: str | tuple[str, ...]
    append: bool = False
    index: str = ""


@dataclass(frozen=True)
class Redirect:
    """`> file`, `< file`, or a here-document with its text; `quoted`: nothing in that text is expanded."""

    operator: str
    target: str
    document: str | None = None
    quoted: bool = False


@dataclass(frozen=True)
class Command:
    """Assignments, words and redirections of one simple command."""

    words: tuple[str, ...]
    assignments: tuple[Assignment, ...]
    redirects: tuple[Redirect, ...]
    line: int


@dataclass(frozen=True)
class Test:
    """`[[ words ]]`, or `(( arithmetic ))`."""

    words: tuple[str, ...]
    arithmetic: str | None
    line: int


@dataclass(frozen=True)
class Pipeline:
    """Parts of which each reads what the one before it writes; `negated`: its status is turned over."""

    parts: tuple[Node, ...]
    negated: bool = False


@dataclass(frozen=True)
class Chain:
    """Pipelines, each behind its operator: `;`, `&`, `&&` or `||`."""

    links: tuple[tuple[str, Pipeline], ...]


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
class Case:
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
class Group:
    """`{ ... }`, or `( ... )` as a subshell, with redirections."""

    body: Chain
    subshell: bool
    redirects: tuple[Redirect, ...] = ()


Node = Command | Test | Pipeline | Chain | If | For | While | Case | Function | Group

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({NAME})(?:\[([^\]\n]*)\])?(\+?)=")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|&>>?|[;&|()\n]")
_REDIRECT = re.compile(r"(\d*|\{\w+\})(<<<|<<-?|<>|>>|>\||>&|<&|&>>|&>|[<>])")
_STOP = frozenset(" \t\n;|&()<>")
_WORD = re.compile(r"[a-z]+(?=[\s;|&()<>]|\Z)|[{}!](?=[\s;|&()<>]|\Z)")
"""A word as reserved ones are."""
_BLANKS = re.compile(r"(?:[ \t\r]|\\\n)*(?:#[^\n]*)?")
_CONTINUED = re.compile(r"\\[ \t]+(?=\n)")
_ARITHMETIC = re.compile(r"\(\((?P<text>.*?)\)\)", re.S)


def parse(text: str) -> tuple[Chain, tuple[str, ...]]:
    """Return a script's commands, and notes of what its author will not have meant. Raises InputError for one that a
    shell would refuse, with its line."""
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    notes: tuple[str, ...] = ()
    if spaced := _CONTINUED.search(text):
        line = text.count("\n", 0, spaced.start()) + 1
        notes = (f"line {line} ends in a backslash and a space, where a shell ends the command: it is read on",)
        text = _CONTINUED.sub(r"\\", text)
    parser = _Parser(text)
    chain = parser.chain(())
    if parser.at < len(text):
        parser.fail(f"{text[parser.at]!r} is where no command can begin")
    return chain, notes


@dataclass
class _Parser:
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

    # Blanks, comments, here-documents.

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
        """Return the here-document that the present line is followed by. `tabs`: those at the start of lines go."""
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

    # Words.

    def word(self) -> str:
        """Take a word as it is written; "" where none begins."""
        start = self.at
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in _STOP:
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

    # Commands.

    def chain(self, ends: tuple[str, ...], close: str = "") -> Chain:
        """Take commands up to one of the reserved words, or to the character `close`."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"is nested more than {DEEPEST} deep")
        links: list[tuple[str, Pipeline]] = []
        operator = ";"
        while True:
            self.blanks(lines=True)
            start = self.at
            if start >= len(self.text) or (close and self.text[start] == close) or self._ended(ends):
                break
            if self.text.startswith(";;", start):
                break
            if self.text[start] in ";&":  # an empty command, as people write it
                self.at += 1
                continue
            pipeline = self.pipeline()
            if self.at == start:
                break
            links.append((operator, pipeline))
            self.blanks()
            match = _OPERATOR.match(self.text, self.at)
            operator = ";"
            if match and match[0] in ("&&", "||", ";", "&"):
                self.at = match.end()
                operator = match[0] if match[0] in ("&&", "||") else ";"
            elif match and match[0] == "\n":
                self.newline()
        self.depth -= 1
        return Chain(tuple(links))

    def _ended(self, ends: tuple[str, ...]) -> bool:
        at = self.at
        taken = self.reserved(*ends)
        self.at = at
        return bool(taken)

    def pipeline(self) -> Pipeline:
        negated = bool(self.reserved("!"))
        self.blanks()
        parts = [self.part()]
        while True:
            self.blanks()
            match = _OPERATOR.match(self.text, self.at)
            if not match or match[0] not in ("|", "|&"):
                return Pipeline(tuple(parts), negated)
            self.at = match.end()
            self.blanks(lines=True)
            parts.append(self.part())

    def part(self) -> Node:
        """Take a simple or a compound command."""
        line = self.line()
        if self.text.startswith("[[", self.at) and self.text[self.at + 2 : self.at + 3] in (" ", "\t", "\n"):
            return self.test(line)
        if self.text.startswith("((", self.at) and (match := _ARITHMETIC.match(self.text, self.at)):
            self.at = match.end()
            return Test((), match["text"], line)
        if self.text.startswith("(", self.at):
            self.at += 1
            body = self.chain((), close=")")
            self.close(")")
            return Group(body, True, self.redirects())
        word = self.reserved("{", "if", "for", "select", "while", "until", "case", "function")
        if word == "{":
            body = self.chain(("}",))
            self.require("}")
            return Group(body, False, self.redirects())
        if word == "if":
            return self.branches(line)
        if word in ("for", "select"):
            return self.loop()
        if word in ("while", "until"):
            condition = self.chain(("do",))
            body = self.body()
            self.redirects()
            return While(condition, body, word == "until", line)
        if word == "case":
            return self.arms(line)
        named = re.compile(rf"\s*({NAME.replace('_]', '_:.-]')})\s*\(\s*\)").match(self.text, self.at)
        if word == "function":
            named = re.compile(r"\s*([\w:.-]+)\s*(?:\(\s*\))?").match(self.text, self.at)
            if named is None:
                self.fail("a function has no name")
        if named:
            self.at = named.end()
            self.blanks(lines=True)
            return Function(named[1], self.part())
        return self.command(line)

    def close(self, character: str) -> None:
        self.blanks(lines=True)
        if not self.text.startswith(character, self.at):
            self.fail(f"{character} is missing")
        self.at += 1

    def test(self, line: int) -> Test:
        self.at += 2
        words: list[str] = []
        while True:
            self.blanks(lines=True)
            if self.at >= len(self.text):
                self.fail("]] is missing")
            operator = re.compile(r"&&|\|\||[()<>]").match(self.text, self.at)
            if operator and not (words and words[-1] == "=~"):
                words.append(operator[0])
                self.at = operator.end()
                continue
            if words and words[-1] == "=~":  # a regular expression has brackets of its own
                end = re.compile(r"(?:\\.|\$\{[^}]*\}|\S)+").match(self.text, self.at)
                word = end[0] if end else ""
                self.at += len(word)
            else:
                word = self.word()
            if word == "]]":
                return Test(tuple(words), None, line)
            if not word:
                self.fail(f"{self.text[self.at]!r} stands in [[ ]]")
            words.append(word)

    def branches(self, line: int) -> If:
        branches, otherwise = [], None
        while True:
            condition = self.chain(("then",))
            self.require("then")
            branches.append((condition, self.chain(("elif", "else", "fi"))))
            word = self.require("elif", "else", "fi")
            if word == "else":
                otherwise = self.chain(("fi",))
                self.require("fi")
            if word != "elif":
                self.redirects()
                return If(tuple(branches), otherwise, line)

    def body(self) -> Chain:
        if self.reserved("{"):
            body = self.chain(("}",))
            self.require("}")
            return body
        self.require("do")
        body = self.chain(("done",))
        self.require("done")
        return body

    def loop(self) -> For:
        self.blanks()
        if self.text.startswith("((", self.at) and (match := _ARITHMETIC.match(self.text, self.at)):
            self.at = match.end()
            parts = match["text"].split(";")
            if len(parts) != 3:
                self.fail("for (( )) has not three parts")
            self.blanks()
            self.at += self.text.startswith(";", self.at)
            loop = For("", (), self.body(), (parts[0], parts[1], parts[2]))
        else:
            name, words = self.word(), None
            if self.reserved("in"):
                words = self.words_to_end()
            self.blanks()
            self.at += self.text.startswith(";", self.at)
            loop = For(name, words, self.body())
        self.redirects()
        return loop

    def words_to_end(self) -> tuple[str, ...]:
        words: list[str] = []
        while True:
            self.blanks()
            if not (word := self.word()):
                return tuple(words)
            words.append(word)

    def arms(self, line: int) -> Case:
        self.blanks()
        word = self.word()
        self.require("in")
        arms = []
        while not self.reserved("esac"):
            self.blanks(lines=True)
            self.at += self.text.startswith("(", self.at)
            patterns = []
            while True:
                self.blanks()
                patterns.append(self.word() or self.fail("a pattern of case is missing"))
                self.blanks()
                if not self.text.startswith("|", self.at):
                    break
                self.at += 1
            self.close(")")
            body = self.chain(("esac",))
            arms.append((tuple(patterns), body))
            if match := re.compile(r";;&?|;&").match(self.text, self.at):
                self.at = match.end()
            elif not self._ended(("esac",)):
                self.fail(";; or esac is missing")
        self.redirects()
        return Case(word, tuple(arms), line)

    def redirects(self) -> tuple[Redirect, ...]:
        redirects: list[Redirect] = []
        while True:
            self.blanks()
            if not (redirect := self.redirect()):
                return tuple(redirects)
            redirects.append(redirect)

    def redirect(self) -> Redirect | None:
        """Take a redirection if one is next, with the text of its here-document."""
        match = _REDIRECT.match(self.text, self.at)
        if not match or (match[2] in "<>" and self.text.startswith("(", match.end())):
            return None
        self.at = match.end()
        self.blanks()
        target = self.word()
        if not match[2].startswith("<<") or match[2] == "<<<":
            return Redirect(match[2], target)
        end = re.sub(r"[\\'\"]", "", target)
        return Redirect("<<", "", self.document(end, match[2] == "<<-"), end != target)

    def command(self, line: int) -> Node:
        words: list[str] = []
        assignments: list[Assignment] = []
        redirects: list[Redirect] = []
        while True:
            self.blanks()
            if redirect := self.redirect():
                redirects.append(redirect)
            elif assignment := self.assignment(words):
                assignments.append(assignment)
            elif word := self.word():
                words.append(word)
            else:
                break
        if words[:1] in (["$"], ["%"]):  # the prompt, pasted with the line
            words = words[1:]
        return Command(tuple(words), tuple(assignments), tuple(redirects), line)

    def assignment(self, words: list[str]) -> Assignment | None:
        """Take an assignment in front of a command, or behind `export` and its kin."""
        if words and words[0] not in ("export", "declare", "typeset", "readonly", "local"):
            return None
        match = _ASSIGNMENT.match(self.text, self.at)
        if not match:
            return None
        self.at = match.end()
        if not self.text.startswith("(", self.at):
            return Assignment(match[1], self.word(), bool(match[3]), match[2] or "")
        self.at += 1
        values: list[str] = []
        while True:
            self.blanks(lines=True)
            if self.at >= len(self.text):
                self.fail(f"the array {match[1]} does not end", match.start())
            if self.text[self.at] == ")":
                self.at += 1
                return Assignment(match[1], tuple(values), bool(match[3]))
            values.append(self.word() or self.fail(f"{self.text[self.at]!r} stands in an array"))
