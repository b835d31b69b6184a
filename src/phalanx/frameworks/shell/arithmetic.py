"""Arithmetic of the shell: whole numbers, C's operators and assignments (bash(1), ARITHMETIC EVALUATION)."""

import operator
import re
from collections.abc import Callable

Value = Callable[[str], "str | None"]
Assign = Callable[[str, int], None]

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*)|(<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
_PRECEDENCE = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7,
    "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10, "**": 11,
}  # fmt: skip
_LONGEST, _LARGEST = 400, 10**15


class Open(Exception):
    """The value of an expression is not known."""


def evaluate(text: str, value: Value, assign: Assign) -> int | None:
    """Return an expression's value, a whole number; None where a variable of it is open, or where it is malformed."""
    if len(text) > _LONGEST:
        return None
    try:
        parser = _Expression(text, value, assign)
        result = 0 if not text.strip() else parser.comma()
        return result if parser.at == len(parser.tokens) else None
    except (Open, RecursionError):
        return None


class _Expression:
    def __init__(self, text: str, value: Value, assign: Assign) -> None:
        self.tokens: list[str] = []
        self.at, self.value, self.assign = 0, value, assign
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if not match:
                raise Open
            self.tokens.append(match[match.lastindex or 0])
            place = match.end()

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""

    def comma(self) -> int:
        result = self.assignment()
        while self.peek() == ",":
            self.take()
            result = self.assignment()
        return result

    def assignment(self) -> int:
        name = self.peek()
        sign = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        if re.fullmatch(r"[A-Za-z_]\w*", name) and sign.endswith("=") and sign not in _PRECEDENCE:
            self.at += 2
            result = self.assignment()
            if sign != "=":
                result = _binary(sign[:-1], self.named(name), result)
            self.assign(name, result)
            return result
        return self.ternary()

    def ternary(self) -> int:
        condition = self.binary(1)
        if self.peek() != "?":
            return condition
        self.take()
        first = self.assignment()
        if self.take() != ":":
            raise Open
        second = self.ternary()
        return first if condition else second

    def binary(self, least: int) -> int:
        left = self.unary()
        while (rank := _PRECEDENCE.get(sign := self.peek(), 0)) >= least:
            self.take()
            left = _binary(sign, left, self.binary(rank if sign == "**" else rank + 1))
        return left

    def unary(self) -> int:
        token = self.take()
        if token in ("-", "+", "!", "~"):
            inner = self.unary()
            return {"-": -inner, "+": inner, "!": int(not inner), "~": ~inner}[token]
        if token in ("++", "--"):
            name = self.take()
            return self.stepped(name, token)[1]
        if token == "(":
            result = self.comma()
            if self.take() != ")":
                raise Open
            return result
        if token[:1].isdigit():
            base = 16 if token[:2].lower() == "0x" else 8 if token.isdigit() and token[0] == "0" else 10
            try:
                return _limited(int(token, base))
            except ValueError:
                raise Open from None
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            raise Open
        if self.peek() in ("++", "--"):
            return self.stepped(token, self.take())[0]
        return self.named(token)

    def stepped(self, name: str, sign: str) -> tuple[int, int]:
        before = self.named(name)
        after = before + (1 if sign == "++" else -1)
        self.assign(name, after)
        return before, after

    def named(self, name: str, depth: int = 0) -> int:
        text = self.value(name)
        if text is None or depth > 8:
            raise Open
        text = text.strip()
        if re.fullmatch(r"[A-Za-z_]\w*", text):
            return self.named(text, depth + 1)
        if not re.fullmatch(r"-?\d{0,15}", text):
            raise Open
        return int(text or 0)


def _limited(value: int) -> int:
    if abs(value) > _LARGEST:
        raise Open
    return value


def _binary(sign: str, a: int, b: int) -> int:
    if sign in ("/", "%"):
        if not b:
            raise Open
        whole = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # C's, towards 0
        return whole if sign == "/" else a - whole * b
    if sign in ("**", "<<", ">>") and not 0 <= b < 64:
        raise Open
    return _limited(int(_OPERATORS[sign](a, b)))


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
