"""Whether a condition of a script holds: `[ ]` and `test`, `[[ ]]` and `(( ))`, by the script's own assignments.

A variable that the script never sets is taken as unset, which the caller names, since the environment could set it;
one that numbers processes or nodes is 0 where it is compared: the first one is followed. What depends on files,
programs or the machine is open.
"""

import fnmatch
import operator
import re
from dataclasses import dataclass, field

from phalanx.frameworks.shell.expansion import arithmetic, text_of
from phalanx.frameworks.shell.nodes import NAME, Test
from phalanx.frameworks.shell.scope import OPEN, Scope, is_open

_ENVIRONMENT = re.compile(rf"{OPEN}({NAME}|\d+)")
_RANK = re.compile(rf"{OPEN}(?:\w+_)?(?:RANK|PROCID|NODEID|LOCALID|COMPLETION_INDEX|WORKER_INDEX)(?!\w)", re.I)
_NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_ORDERS = {"<": operator.lt, ">": operator.gt, "\\<": operator.lt, "\\>": operator.gt}
_LONGEST_PATTERN = 200


@dataclass
class TestOutcome:
    """`holds`: None where it is open. `unset`: variables of the environment that were taken as unset."""

    holds: bool | None
    unset: set[str] = field(default_factory=set)


def holds(test: Test, scope: Scope) -> TestOutcome:
    """Decide `[[ ]]` or `(( ))`."""
    if test.arithmetic is not None:
        unset = {name for name in re.findall(NAME, test.arithmetic) if name not in scope.variables}
        known = scope.copy()
        known.variables |= {name: ["0"] for name in unset}
        value = arithmetic(test.arithmetic, known)
        scope.variables |= {name: v for name, v in known.variables.items() if name not in unset}
        return TestOutcome(None if value is None else bool(value), unset)
    expression = _Expression([*test.words], scope, double=True)
    return TestOutcome(expression.decide(), expression.unset)


def test_holds(words: list[str], scope: Scope) -> TestOutcome:
    """Decide the words of `[ ]` or `test`, which are expanded."""
    expression = _Expression(words, scope, double=False)
    return TestOutcome(expression.decide(), expression.unset)


class _Expression:
    """Words of a condition, read from left to right. `double`: they are those inside `[[ ]]`, which are expanded
    here."""

    def __init__(self, words: list[str], scope: Scope, double: bool) -> None:
        self.words, self.scope, self.double = words, scope, double
        self.at = 0
        self.unset: set[str] = set()

    def decide(self) -> bool | None:
        if not self.words:
            return False
        result = self.either()
        return result if self.at == len(self.words) else None

    def peek(self, ahead: int = 0) -> str:
        return self.words[self.at + ahead] if self.at + ahead < len(self.words) else ""

    def take(self) -> str:
        self.at += 1
        return self.words[self.at - 1] if self.at <= len(self.words) else ""

    def either(self) -> bool | None:
        result = self.both()
        while self.peek() in ("||", "-o"):
            self.take()
            other = self.both()
            result = True if result or other else None if result is None or other is None else False
        return result

    def both(self) -> bool | None:
        result = self.single()
        while self.peek() in ("&&", "-a"):
            self.take()
            other = self.single()
            result = False if result is False or other is False else None if None in (result, other) else True
        return result

    def single(self) -> bool | None:
        if self.peek() == "!" and self.at + 1 < len(self.words):
            self.take()
            inner = self.single()
            return None if inner is None else not inner
        if self.peek() in ("(", "\\("):
            self.take()
            inner = self.either()
            return inner if self.take() in (")", "\\)") else None
        if self.peek(1) in _BINARY and not (
            self.peek() in _UNARY and self.peek(1) not in _NUMBERS and not self.peek(2)
        ):
            left = self.text(self.take(), of_first=True)
            how = self.take()
            return self.compared(left, how, self.take())
        if self.peek() in _UNARY and self.at + 1 < len(self.words):
            how = self.take()
            return self.about(how, self.take())
        word = self.text(self.take())
        return None if word is None else bool(word)

    def text(self, word: str, of_first: bool = False) -> str | None:
        """Return a word's text, in which variables of the environment are empty; None where it stays open.
        `of_first`: a rank is 0, as the first process has it."""
        value = text_of(word, self.scope) if self.double else word
        value = _RANK.sub("0", value) if of_first else value
        if is_open(value):
            self.unset |= set(_ENVIRONMENT.findall(value))
            value = _ENVIRONMENT.sub("", value)
        return None if is_open(value) else value

    def compared(self, left: str | None, how: str, right: str) -> bool | None:
        pattern = self.text(right, of_first=True)
        if left is None or pattern is None:
            return None
        if how in _NUMBERS:
            a, b = (arithmetic(side or "0", self.scope) for side in (left, pattern))
            return None if a is None or b is None else bool(_NUMBERS[how](a, b))
        if how in _ORDERS:
            return bool(_ORDERS[how](left, pattern))
        if how == "=~":
            return _searched(pattern, left)
        if how in ("=", "==", "!="):
            quoted = right[:1] in "'\""
            same = left == pattern
            if self.double and not quoted and len(pattern) <= _LONGEST_PATTERN:
                same = fnmatch.fnmatchcase(left, pattern)
            return same if how != "!=" else not same
        return None  # of files: -nt, -ot, -ef

    def about(self, how: str, word: str) -> bool | None:
        if how == "-v":
            name = self.text(word)
            if name not in self.scope.variables:
                self.unset.add(name or "")
            return name in self.scope.variables
        if how not in ("-z", "-n"):
            return None  # of files and terminals
        value = self.text(word)
        return None if value is None else bool(value) is (how == "-n")


_BINARY = {*_NUMBERS, *_ORDERS, "=", "==", "!=", "=~", "-nt", "-ot", "-ef"}
_UNARY = {"-z", "-n", "-v", *(f"-{c}" for c in "abcdefghkoprstuwxGLNORS")}


def _searched(pattern: str, text: str) -> bool | None:
    """Search a simple regular expression; None for one that could take long, or that Python reads otherwise."""
    if len(pattern) > _LONGEST_PATTERN or len(text) > 1000 or re.search(r"[*+}]\)?[*+{]|\[:", pattern):
        return None
    if pattern.count("*") + pattern.count("+") > 3:
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None
