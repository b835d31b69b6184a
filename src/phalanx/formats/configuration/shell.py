"""Words of shell scripts, without running anything: variables, arrays, quotes, continued lines, arithmetic.

Every branch of a condition is read in turn. What only a running shell could tell (`$(hostname)`, variables of the
environment without a default) is left open.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

from phalanx.formats.configuration.reading import Open
from phalanx.spec.errors import InputError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST = 200_000
"""Words of the longest script."""
_MARK = "\0"
"""Stands where a value is open."""


class Script:
    """The commands of a script, as words, and the variables at its end."""

    def __init__(self, text: str, given: Mapping[str, str] | None = None) -> None:
        self.variables: dict[str, list[str]] = {k: [v] for k, v in (given or {}).items()}
        self.exported: dict[str, str] = {}
        self.commands: list[list[str]] = []
        self._text, self._at, self._words = text.replace("\\\n", " "), 0, 0
        self._run()

    def _run(self) -> None:
        words: list[str] = []
        while self._at < len(self._text):
            c = self._text[self._at]
            if c in "\n;&|":
                self._end(words)
                words = []
                self._at += 1
            elif c in " \t\r":
                self._at += 1
            elif c == "#":
                self._at = self._find("\n")
            elif assignment := re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=\(").match(self._text, self._at):
                self._at = assignment.end()
                values = self._array()
                name = assignment[1]
                self.variables[name] = (self.variables.get(name, []) if assignment[2] else []) + values
            elif c in "(){}<>" and not self._text.startswith("{", self._at):
                self._at += 1
            else:
                words += self._word(not words or words[0] in ("export", "local", "env"))
                self._words += 1
                if self._words > _MOST:
                    raise InputError("script", None, f"has more than {_MOST:,} words", "is it the right file?")
        self._end(words)

    def _find(self, text: str) -> int:
        at = self._text.find(text, self._at)
        return len(self._text) if at < 0 else at

    def _end(self, words: list[str]) -> None:
        kept = []
        for i, word in enumerate(words):
            match = re.match(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)\Z", word, re.S)
            if match and all(w in ("export", "local", "env", "declare", "-x") or w is None for w in words[:i][:1]):
                name, plus, value = match[1], match[2], match[3]
                before = self.variables.get(name, [""]) if plus else [""]
                self.variables[name] = ["".join(before) + value]
                self.exported[name] = self.variables[name][0]
                words[i] = "export"
            elif word not in ("export", "local"):
                kept.append(word)
        if kept:
            self.commands.append(kept)

    def _array(self) -> list[str]:
        values: list[str] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            c = self._text[self._at]
            if c in " \t\r\n":
                self._at += 1
            elif c == "#":
                self._at = self._find("\n")
            else:
                before = self._at
                values += self._word(False)
                if self._at == before:
                    self._at += 1
        self._at += 1
        return values

    def _word(self, assigns: bool) -> list[str]:
        """Read one word; unquoted variables may make several of it."""
        parts: list[str] = [""]
        some = False
        quoted_value = False
        while self._at < len(self._text):
            c = self._text[self._at]
            if c in " \t\r\n;|)" or (c == "&" and not some) or c in "<>":
                break
            if c == "&":
                break
            some = True
            if c == "'":
                end = self._text.find("'", self._at + 1)
                end = len(self._text) if end < 0 else end
                parts[-1] += self._text[self._at + 1 : end]
                self._at = end + 1
                quoted_value = True
            elif c == '"':
                self._at += 1
                self._double(parts)
                quoted_value = True
            elif c == "\\":
                parts[-1] += self._text[self._at + 1 : self._at + 2]
                self._at += 2
            elif c == "$":
                values = self._variable()
                text = " ".join(values)
                if assigns and re.match(r"[A-Za-z_][A-Za-z0-9_]*\+?=", parts[0]):
                    parts[-1] += text
                else:
                    pieces = text.split()
                    if pieces:
                        parts[-1] += pieces[0]
                        parts += pieces[1:]
            elif c == "`":
                end = self._text.find("`", self._at + 1)
                self._at = (len(self._text) if end < 0 else end) + 1
                parts[-1] += _MARK
            else:
                parts[-1] += c
                self._at += 1
        if not some:
            self._at += 1
            return []
        return [p for p in parts if p or quoted_value]

    def _double(self, parts: list[str]) -> None:
        while self._at < len(self._text) and self._text[self._at] != '"':
            c = self._text[self._at]
            if c == "\\":
                parts[-1] += self._text[self._at + 1 : self._at + 2]
                self._at += 2
            elif c == "$":
                listed = (
                    self._text.startswith(("${", "$@"), self._at) and "[@]" in self._text[self._at : self._find("}")]
                )
                values = self._variable()
                if listed and values:
                    parts[-1] += values[0]
                    parts += values[1:]
                else:
                    parts[-1] += " ".join(values)
            else:
                parts[-1] += c
                self._at += 1
        self._at += 1

    def _variable(self) -> list[str]:
        """Read `$NAME`, `${NAME...}`, `$((...))` or `$(...)` and return its words."""
        text, at = self._text, self._at
        if text.startswith("$((", at):
            end = text.find("))", at)
            end = len(text) if end < 0 else end
            self._at = end + 2
            return [self._arithmetic(text[at + 3 : end])]
        if text.startswith("$(", at):
            depth, end = 0, at + 1
            while end < len(text):
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
                if depth == 0:
                    break
            self._at = end
            return [_MARK]
        if text.startswith("${", at):
            end = text.find("}", at)
            end = len(text) if end < 0 else end
            self._at = end + 1
            return self._braced(text[at + 2 : end])
        match = _NAME.match(text, at + 1)
        if match is None:
            self._at += 2 if at + 1 < len(text) else 1
            return [] if text.startswith("$@", at) else [_MARK]
        self._at = match.end()
        return self.variables.get(match[0], [_MARK])

    def _braced(self, inner: str) -> list[str]:
        match = re.match(r"([A-Za-z_0-9]+)(\[[@*]\])?(:?[-=+?]|#|%|/|\^|,)?(.*)\Z", inner, re.S)
        if match is None:
            return [_MARK]
        name, listed, how, rest = match[1], match[2], match[3], match[4]
        value = self.variables.get(name)
        known = value is not None and _MARK not in "".join(value)
        if how in (":-", "-", ":=", "="):
            if known and (how[0] != ":" or "".join(value or [])):
                return value or []
            return Script(f"X={rest}", self._plain()).variables["X"]
        if how is None or how in ("?", ":?"):
            return value if value is not None else ([] if listed else [_MARK])
        return [_MARK]

    def _plain(self) -> dict[str, str]:
        return {k: " ".join(v) for k, v in self.variables.items()}

    def _arithmetic(self, text: str) -> str:
        def named(match: re.Match[str]) -> str:
            return "".join(self.variables.get(match[1], [_MARK]))

        filled = re.sub(r"\$?\{?([A-Za-z_][A-Za-z0-9_]*)\}?", named, text)
        if _MARK in filled or len(filled) > 200:
            return _MARK
        try:
            return str(_evaluate(ast.parse(filled.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return _MARK


_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**15:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    raise ValueError("not plain arithmetic")


def value(word: str) -> Any:
    """A word as a number or a bool where it reads as one; Open where its value is."""
    if _MARK in word:
        return Open(word.replace(_MARK, "?"))
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def flags(words: list[str]) -> dict[str, Any]:
    """Return `--name value ...` words as a table by name without dashes; a flag alone is True."""
    table: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, text = word.lstrip("-").partition("=")
            table[name] = value(text) if equals else True
            continue
        if name is None:
            continue
        held = table[name]
        table[name] = value(word) if held is True else [*(held if isinstance(held, list) else [held]), value(word)]
    return table


def launched(script: Script) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return (flags of the launcher, flags of the program, the program) of the command with the most flags."""
    best: list[str] = max(script.commands, key=lambda c: sum(w.startswith("-") for w in c), default=[])
    at = next((i for i, w in enumerate(best) if w.endswith(".py")), None)
    if at is None:
        module = next(
            (i for i, w in enumerate(best[:-1]) if w == "-m" and "torch.distributed" not in best[i + 1]), None
        )
        at = None if module is None else module + 1
    if at is None:
        return {}, flags(best), ""
    return flags(best[:at]), flags(best[at + 1 :]), best[at]
