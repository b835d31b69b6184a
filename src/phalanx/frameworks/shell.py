"""A command line or a shell script as {launch, env, args}: nothing of it is run.

Assignments, `export`, arrays (`ARGS=( ... )`, `+=`), quotes, continued lines, `$NAME`, `${NAME:-default}`,
`${ARRAY[@]}` and arithmetic in `$(( ))` are followed, and of a condition every branch in turn. What only a running
shell could tell (`$(hostname)`, a variable of the environment) stays as a text with `$`, which no reader takes for a
value. Of several commands the one with the most flags is taken.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

from phalanx.spec.errors import InputError

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate", "srun")
_LAUNCH = {"nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint"}
_LAUNCH |= {"max_restarts", "tee", "log_dir", "num_gpus", "num_nodes", "hostfile", "include", "exclude", "role"}
_LAUNCH |= {
    "rdzv_id",
    "standalone",
    "local_ranks_filter",
    "redirects",
    "num_processes",
    "num_machines",
    "config_file",
}


def read(text: str) -> dict[str, Any]:
    """Return {launch, env, args} of the command with the most flags; args is empty where there is none. Raises
    InputError for a script that is too long."""
    script = Script(text.replace("\r\n", "\n"))
    parsed = [_command(words) for words in script.commands]
    parsed += [_command(v) for v in script.arrays()]
    best = max(parsed, key=lambda one: (len(one[1]), len(one[0])), default=({}, {}))
    return {"launch": best[0], "env": {n: _value(v) for n, v in script.exported.items()}, "args": best[1]}


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST = 200_000
"""Words of the longest script."""
_WORK = 2**24
"""Characters and words that variables may add up to: each can be twice the one before it."""
_LONGEST = 2**17
"""Characters of the longest word."""
_PLAIN = re.compile(r"""[^ \t\r\n;|)&<>'"\\$`]+""")
_QUOTED = re.compile(r"""[^"\\$]+""")
_ARRAY = re.compile(r"\$\{\w+\[@\]")
_MARK = "$"
"""Stands where a value is open."""


class Script:
    """The commands of a script, as words, and the variables at its end."""

    def __init__(self, text: str, given: dict[str, str] | None = None) -> None:
        self.variables: dict[str, list[str]] = {k: [v] for k, v in (given or {}).items()}
        self.exported: dict[str, str] = {}
        self.commands: list[list[str]] = []
        self._text, self._at, self._words, self._work = text.replace("\\\n", " "), 0, 0, 0
        self._run()

    def _spend(self, work: int) -> None:
        """Count what an expansion copies. Raises InputError for a script whose variables grow without end."""
        self._work += work
        if self._work > _WORK:
            raise InputError("script", None, f"its variables make more than {_WORK:,} characters of it")

    def _run(self) -> None:
        words: list[str] = []
        while self._at < len(self._text):
            c = self._text[self._at]
            if c in " \t\r":
                self._at += 1
            elif c == "#":
                self._at = self._find("\n")
            elif assignment := re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=\(").match(self._text, self._at):
                self._at = assignment.end()
                values = self._array()
                name = assignment[1]
                self.variables[name] = (self.variables.get(name, []) if assignment[2] else []) + values
                self._spend(len(self.variables[name]))
            elif document := re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1").match(self._text, self._at):
                self._at = document.end()
                self._skip_document(document[2])
            elif redirected := re.compile(r"\d*[<>]+&?\d*[ \t]*|&>+[ \t]*").match(self._text, self._at):
                self._at = redirected.end()
                if not redirected[0].rstrip()[-1:].isdigit():  # `> file`, not `2>&1`
                    self._word(False)
            elif c in "\n;&|":
                self._end(words)
                words = []
                self._at += 1
            elif c in "()}":
                self._at += 1
            else:
                words += self._word(not words or words[0] in ("export", "local", "env"))
                self._words += 1
                if self._words > _MOST:
                    raise InputError("script", None, f"has more than {_MOST:,} words", "is it the right file?")
        self._end(words)

    def _skip_document(self, word: str) -> None:
        """Take the lines of a here-document, up to the one that is `word`, out of what is still to be read."""
        line = self._find("\n")
        end = re.compile(rf"^\s*{re.escape(word)}[ \t]*$", re.M).search(self._text, line)
        self._spend(len(self._text) // 8)  # what is copied
        if end is not None:
            self._text = self._text[:line] + self._text[end.end() :]

    def _unclosed(self, at: int) -> InputError:
        line = self._text.count("\n", 0, at) + 1
        reason = f"has a quote in command line {line} that does not end"
        return InputError(
            "script", self._text[at : at + 20].split("\n")[0], reason, "is it cut short? close the quote"
        )

    def _find(self, text: str) -> int:
        at = self._text.find(text, self._at)
        return len(self._text) if at < 0 else at

    def _end(self, words: list[str]) -> None:
        """Note the assignments at a command's start, and the command behind them if there is one."""
        exports = bool(words) and words[0] in ("export", "declare", "typeset", "readonly", "local")
        at = int(exports)
        names = []
        while at < len(words) and (match := re.match(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)\Z", words[at], re.S)):
            before = " ".join(self.variables.get(match[1], [])) if match[2] else ""
            self.variables[match[1]] = [before + match[3]]
            self._spend(len(before))
            names.append(match[1])
            at += 1
        rest = words[at:]
        if (exports and words[0] == "export") or rest:  # of a command: its environment alone
            self.exported |= {name: self.variables[name][0] for name in names}
        if rest and not exports:
            self.commands.append(rest)

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
            if c in " \t\r\n;|)&<>":
                break
            some = True
            if c == "'":
                end = self._text.find("'", self._at + 1)
                if end < 0:
                    raise self._unclosed(self._at)
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
                plain = _PLAIN.match(self._text, self._at)
                assert plain is not None  # all other characters are above
                parts[-1] += plain[0]
                self._at = plain.end()
            _require_short(parts[-1])
        if not some:
            self._at += 1
            return []
        return [p for p in parts if p or quoted_value]

    def _double(self, parts: list[str]) -> None:
        opened = self._at - 1
        while self._at < len(self._text) and self._text[self._at] != '"':
            c = self._text[self._at]
            if c == "\\":
                parts[-1] += self._text[self._at + 1 : self._at + 2]
                self._at += 2
            elif c == "$":
                listed = _ARRAY.match(self._text, self._at)
                values = self._variable()
                if listed and values:
                    parts[-1] += values[0]
                    parts += values[1:]
                else:
                    parts[-1] += " ".join(values)
            else:
                plain = _QUOTED.match(self._text, self._at)
                assert plain is not None  # all other characters are above
                parts[-1] += plain[0]
                self._at = plain.end()
            _require_short(parts[-1])
        if self._at >= len(self._text):
            raise self._unclosed(opened)
        self._at += 1

    def _variable(self) -> list[str]:
        """Read `$NAME`, `${NAME...}`, `$((...))` or `$(...)` and return its words."""
        values = self._expanded()
        self._spend(len(values) + sum(map(len, values)))
        return values

    def _expanded(self) -> list[str]:
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
            if not set("$`'\"\\;|&<>()#\n") & set(rest):  # nothing to expand
                return [rest.split()[0]] if rest.split() else [""]
            self._spend(sum(len(values) + 1 for values in self.variables.values()) + len(rest))
            return Script(f"X={rest}", self._plain()).variables["X"]
        if how is None or how in ("?", ":?"):
            return value if value is not None else ([] if listed else [_MARK])
        return [_MARK]

    def arrays(self) -> list[list[str]]:
        """Return variables that hold flags: a file may have nothing but these."""
        split = [[w for value in values for w in value.split()] for values in self.variables.values()]
        return [words for words in split if words and words[0].startswith("--")]

    def _plain(self) -> dict[str, str]:
        return {k: " ".join(v) for k, v in self.variables.items()}

    def _arithmetic(self, text: str) -> str:
        def named(match: re.Match[str]) -> str:
            value = "".join(self.variables.get(match[1], [_MARK]))
            return value if len(value) <= 20 else _MARK

        self._spend(100)  # what parsing costs
        if len(text) > 200:
            return _MARK
        filled = re.sub(r"\$?\{?([A-Za-z_][A-Za-z0-9_]*)\}?", named, text)
        if not re.fullmatch(r"[0-9 \t\n()+*/%-]{1,200}", filled):
            return _MARK
        try:
            return str(_evaluate(ast.parse(filled.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return _MARK


def _require_short(word: str) -> None:
    if len(word) > _LONGEST:
        raise InputError("script", None, f"has a word of more than {_LONGEST:,} characters")


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


def _command(words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a launcher's options and a program's. A flag without a value is true; with several, a list."""
    script = next((i for i, w in enumerate(words) if w.endswith(".py")), None)
    launched = script is not None and any(w.rpartition("/")[2] in _LAUNCHERS for w in words[:script])
    launch = _flags(words[:script]) if launched and script is not None else {}
    args = _flags(words if script is None else words[script + 1 :])
    for name in [n for n in args if n.replace("-", "_") in _LAUNCH] if not launched else []:
        launch[name] = args.pop(name)  # launcher and program in one array
    return {name.replace("-", "_"): value for name, value in launch.items()}, args


def _flags(words: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            result[name] = _value(value) if equals else True
            name = "" if equals else name
        elif name:
            earlier = result[name]
            if isinstance(earlier, list):
                earlier.append(_value(word))
            else:
                result[name] = _value(word) if earlier is True else [earlier, _value(word)]
        elif re.match(r"^[A-Za-z_][\w.]*=", word):
            key, _, value = word.partition("=")
            result[key] = _value(value)
    return result


def _value(text: str) -> Any:
    """Return the number or truth value that a word spells, else the word."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?", text):
        return float(text)
    return {"true": True, "false": False, "True": True, "False": False}.get(text, text)
