"""What words of a shell script expand to (bash(1), EXPANSION), where the script itself decides it.

What only the running shell could tell (a variable of the environment, `$(hostname)`) is open: such a part is the mark
OPEN with the text of the script behind it. No reader takes it for a value, and `plain` shows it as it was written.
"""

import fnmatch
import re

from phalanx.frameworks.shell.arithmetic import evaluate
from phalanx.frameworks.shell.nodes import NAME
from phalanx.frameworks.shell.quoting import braces, closing, escaped
from phalanx.frameworks.shell.scope import WORD, Scope, is_open, plain, unknown
from phalanx.frameworks.shell.source import PLACEHOLDER

_PARAMETER = re.compile(
    rf"(?P<prefix>[#!]?)(?P<name>{NAME}|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)\Z", re.S
)
_OPERATION = re.compile(r"(:?[-=+?]|##?|%%?|/[/#%]?|\^\^?|,,?|@|:)(.*)\Z", re.S)


def expand(raw: str, scope: Scope) -> list[str]:
    """Return the words that a word of a script expands to: none, one or several."""
    result: list[str] = []
    for word in braces(raw, scope.budget):
        fields = _Fields()
        _Expansion(word, scope, fields).run()
        result += fields.words()
    scope.budget.spend(sum(map(len, result)) + WORD * len(result))
    return result


def expand_all(raws: tuple[str, ...] | list[str], scope: Scope) -> list[str]:
    """Return what several words expand to."""
    return [word for raw in raws for word in expand(raw, scope)]


def text_of(raw: str, scope: Scope) -> str:
    """Return what a word expands to where it is not split: behind `=`, in `[[ ]]` and `case`."""
    fields = _Fields(whole=True)
    _Expansion(raw, scope, fields).run()
    text = " ".join(fields.words())
    scope.budget.spend(len(text))
    return text


def document(text: str, scope: Scope) -> str:
    """Return the text of a here-document whose end is not quoted."""
    fields = _Fields(whole=True)
    _Expansion(text, scope, fields).quoted(0, len(text), quotes=False)
    result = "".join(fields.words())
    scope.budget.spend(len(result))
    return result


def arithmetic(text: str, scope: Scope) -> int | None:
    """Return the value of an arithmetic expression, and assign what it assigns; None where it is open."""
    fields = _Fields(whole=True)
    _Expansion(text, scope, fields).quoted(0, len(text), quotes=False)
    scope.budget.spend(400)
    return evaluate("".join(fields.words()), scope.value, lambda name, value: scope.assign(name, str(value)))


class _Fields:
    """Words as they come out of an expansion; `whole`: they are one."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self._done: list[str] = []
        self._word: list[str] | None = [] if whole else None

    def add(self, text: str) -> None:
        """Add to the present word, which exists from here on, be it empty."""
        if self._word is None:
            self._word = []
        self._word.append(text)

    def split(self, text: str) -> None:
        """Add what was not quoted: blanks end words."""
        if self.whole:
            self.add(text)
            return
        for part in re.findall(r"[ \t\n]+|[^ \t\n]+", text):
            if part[0] in " \t\n":
                self.end()
            else:
                self.add(part)

    def end(self) -> None:
        if self._word is not None:
            self._done.append("".join(self._word))
            self._word = None

    def each(self, values: list[str]) -> None:
        """Add values, each a word of its own, as `"$@"` does."""
        for i, value in enumerate(values):
            if i:
                self.add(" ") if self.whole else self.end()
            self.add(value)

    def words(self) -> list[str]:
        self.end()
        return self._done


class _Expansion:
    """One word on its way into fields."""

    def __init__(self, raw: str, scope: Scope, fields: _Fields) -> None:
        self.raw, self.scope, self.fields = raw, scope, fields

    def run(self) -> None:
        raw, at = self.raw, 0
        while at < len(raw):
            c = raw[at]
            if c == "\\":
                if raw[at + 1 : at + 2] != "\n":
                    self.fields.add(raw[at + 1 : at + 2])
                at += 2
            elif c == "'":
                end = raw.index("'", at + 1)
                self.fields.add(raw[at + 1 : end])
                at = end + 1
            elif raw.startswith("$'", at):
                end = at + 2 + len(_require(re.match(r"(?:[^'\\]|\\.)*", raw[at + 2 :], re.S))[0])
                self.fields.add(escaped(raw[at + 2 : end]))
                at = end + 1
            elif c == '"' or raw.startswith('$"', at):
                start = at + 1 + (c == "$")
                end = closing(raw, start - 1) - 1
                if not re.fullmatch(r"\$@|\$\{\w+\[@\]\}", raw[start:end]):  # which may be no word at all
                    self.fields.add("")
                self.quoted(start, end)
                at = end + 1
            elif left := PLACEHOLDER.match(raw, at):
                self.fields.add(unknown(left[0]))
                at = left.end()
            elif raw.startswith(("<(", ">("), at):
                end = closing(raw, at + 1)
                self.fields.add(unknown(raw[at:end]))
                at = end
            elif c in "$`":
                at = self.dollar(at, len(raw), quoted=False)
            else:
                stop = _require(re.compile(r"[^\\'\"$`<>]+|.", re.S).match(raw, at)).end()
                self.fields.add(raw[at:stop])
                at = stop

    def quoted(self, at: int, end: int, quotes: bool = True) -> None:
        """Expand what stands in double quotes, or in a here-document (where `quotes` are characters)."""
        raw, escapes = self.raw, '$`"\\\n' if quotes else "$`\\\n"
        while at < end:
            c = raw[at]
            if c == "\\" and raw[at + 1 : at + 2] in escapes and at + 1 < end:
                self.fields.add(raw[at + 1].replace("\n", ""))
                at += 2
            elif c in "$`":
                at = self.dollar(at, end, quoted=True)
            else:
                stop = _require(re.compile(r"[^\\$`]+|.", re.S).match(raw, at, end)).end()
                self.fields.add(raw[at:stop])
                at = stop

    def put(self, text: str, quoted: bool) -> None:
        self.fields.add(text) if quoted else self.fields.split(text)

    def dollar(self, at: int, end: int, quoted: bool) -> int:
        """Expand what begins at a dollar sign or a backquote; return where it ends."""
        raw = self.raw
        if raw[at] == "`":
            stop = _require(re.compile(r"(?:[^`\\]|\\.)*`", re.S).match(raw, at + 1)).end()
            self.command(re.sub(r"\\([$`\\])", r"\1", raw[at + 1 : stop - 1]), quoted)
            return stop
        if raw.startswith("$((", at) and raw.startswith("))", (stop := closing(raw, at + 1)) - 2):
            value = arithmetic(raw[at + 3 : stop - 2], self.scope)
            self.put(unknown(raw[at + 1 : stop]) if value is None else str(value), quoted)
            return stop
        if raw.startswith("$(", at):
            stop = closing(raw, at + 1)
            self.command(raw[at + 2 : stop - 1], quoted)
            return stop
        if raw.startswith("${", at):
            stop = closing(raw, at + 1)
            self.parameter(raw[at + 2 : stop - 1], quoted)
            return stop
        match = re.compile(rf"{NAME}|[0-9@*#?$!-]").match(raw, at + 1, end)
        if not match:
            self.fields.add("$")
            return at + 1
        self.parameter(match[0], quoted)
        return match.end()

    def command(self, text: str, quoted: bool) -> None:
        printed = self.scope.capture(text, self.scope)
        self.put(unknown(f"({text.strip()})") if printed is None else printed.rstrip("\n"), quoted)

    # Parameters.

    def parameter(self, text: str, quoted: bool) -> None:
        """Expand `${text}`."""
        match = _PARAMETER.match(text)
        if not match:
            self.fields.add(unknown("{" + text + "}"))
            return
        prefix, name, index, rest = match["prefix"], match["name"], match["index"], match["rest"]
        if prefix == "!":
            self.indirect(name, index, rest, quoted)
            return
        values = self.values(name)
        if prefix == "#":
            several = name in "@*" or index in ("@", "*")
            size = (
                None if values is None else len(values) if several else len(self.element(name, values, index) or "")
            )
            # An open element may be several words, `(${HOSTS})`, or of any length.
            counted = values or [] if several else [self.element(name, values or [], index) or ""]
            open_ = size is None or any(map(is_open, counted))
            self.put(unknown("{" + text + "}") if open_ else str(size), quoted)
            return
        if index in ("@", "*") or name in ("@", "*"):
            self.all_of(text, values, rest, (index or name) == "@", quoted)
            return
        value = None if values is None else self.element(name, values, index)
        self.put(self.operated(text, name, value, rest), quoted)

    def indirect(self, name: str, index: str | None, rest: str, quoted: bool) -> None:
        values = self.values(name)
        if index in ("@", "*") and name in self.scope.tables:
            self.fields.each(self.scope.keys(name))
        elif index in ("@", "*") and values is not None:
            self.fields.each([str(i) for i in range(len(values))])
        elif values and re.fullmatch(NAME, values[0]):
            self.parameter(values[0] + rest, quoted)
        else:
            self.fields.add(unknown("{!" + name + rest + "}"))

    def values(self, name: str) -> list[str] | None:
        scope = self.scope
        if name in ("@", "*"):
            return scope.arguments
        if name == "#":
            return [str(len(scope.arguments))]
        if name == "0":
            return [scope.name]
        if name.isdigit():
            place = int(name) - 1
            return [scope.arguments[place]] if place < len(scope.arguments) else []
        if name in scope.tables:
            return [value for key in scope.keys(name) for value in scope.variables[f"{name}[{key}]"]]
        return scope.variables.get(name)

    def element(self, name: str, values: list[str], index: str | None) -> str | None:
        """Return an element of an array; None for one that it does not have."""
        if name in self.scope.tables:
            key = text_of(index or "0", self.scope)
            return unknown(f"{name}[{key}]") if is_open(key) else self.scope.value(f"{name}[{key}]")
        if index is None or index == "":
            return values[0] if values else None
        place = arithmetic(index, self.scope)
        if place is None:
            return unknown("[" + index + "]")
        return values[place] if -len(values) <= place < len(values) else None

    def all_of(self, text: str, values: list[str] | None, rest: str, apart: bool, quoted: bool) -> None:
        """Expand all elements of an array, or the script's arguments."""
        if values is None:
            if rest.startswith((":-", "-", ":+", "+")):
                self.put(self.operated(text, text, None, rest), quoted)
            else:
                self.fields.add(unknown("{" + text + "}" if len(text) > 1 else text))
            return
        if rest.startswith((":-", "-", ":+", "+")):
            joined = " ".join(values) if values else None
            if rest.lstrip(":")[0] == "+" or joined is None:
                self.put(self.operated(text, text, joined, rest), quoted)
                return
        elif rest.startswith(":"):
            offset, _, length = rest[1:].partition(":")
            first, many = arithmetic(offset, self.scope), arithmetic(length, self.scope) if length else None
            if first is None:
                self.fields.add(unknown("{" + text + "}"))
                return
            first -= text[:1] in "@*"  # arguments are counted from 1
            values = values[max(first, 0) :][: many if length else None]
        elif rest:
            values = [self.operated(text, text, value, rest) for value in values]
        if quoted and apart:
            self.fields.each(values)
        elif quoted:
            self.fields.add(" ".join(values))
        else:
            for i, value in enumerate(values):
                self.fields.split((" " if i else "") + value)

    def operated(self, text: str, name: str, value: str | None, rest: str) -> str:
        """Return a value behind the operator of its expansion."""
        if not rest:
            missing = (
                "" if name.isdigit() and self.scope.called else unknown("{" + text + "}" if "[" in text else text)
            )
            return missing if value is None else value
        match = _OPERATION.match(rest)
        if not match:
            return unknown("{" + text + "}")
        operator, word = match[1], match[2]
        if operator[-1] in "-=+?":
            return self.default(operator, name, value, word)
        if value is None or is_open(value):
            return "" if name.isdigit() and self.scope.called else unknown("{" + text + "}")
        result = self.changed(operator, value, word)
        return unknown("{" + text + "}") if result is None else result

    def default(self, operator: str, name: str, value: str | None, word: str) -> str:
        missing = value is None or (operator[0] == ":" and value == "")
        kind = operator[-1]
        if kind == "+":
            return "" if missing else text_of(word, self.scope)
        if not missing:
            return value or ""
        if kind == "?":
            return unknown(name)
        result = text_of(word, self.scope)
        if value is None and re.fullmatch(NAME, name):
            self.scope.environment.setdefault(name, plain(result))
        if kind == "=" and re.fullmatch(NAME, name):
            self.scope.assign(name, result)
        return result

    def changed(self, operator: str, value: str, word: str) -> str | None:
        """Return a value cut, replaced or in other letters; None for what is not read."""
        if operator == ":":
            offset, _, length = word.partition(":")
            first, many = arithmetic(offset or "0", self.scope), arithmetic(length, self.scope) if length else None
            if first is None or (length and many is None):
                return None
            end = None if many is None else first + many if many >= 0 else len(value) + many
            return value[first:end] if first >= 0 else value[first:][:many]
        if operator in ("^^", "^", ",,", ","):
            changed = value.upper() if operator[0] == "^" else value.lower()
            return changed if len(operator) == 2 else changed[:1] + value[1:]
        if operator == "@":
            return value if word in ("Q", "E", "P") else None
        if operator[0] == "/":
            pattern, _, new = word.partition("/")
            return self.replaced(operator, value, text_of(pattern, self.scope), text_of(new, self.scope))
        pattern = text_of(word, self.scope)
        self.scope.budget.spend(len(value) * 4)
        if is_open(pattern) or len(value) > 4096:
            return None
        # `#` and `%` cut the shortest match, `##` and `%%` the longest.
        sizes = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
        for size in sizes:
            part = value[:size] if operator[0] == "#" else value[len(value) - size :]
            if fnmatch.fnmatchcase(part, pattern):
                return value[size:] if operator[0] == "#" else value[: len(value) - size]
        return value

    def replaced(self, operator: str, value: str, pattern: str, new: str) -> str | None:
        if is_open(pattern) or is_open(new) or len(value) > 4096 or len(pattern) > 200:
            return None
        if not re.search(r"[*?\[]", pattern):
            if operator == "/#":
                return new + value.removeprefix(pattern) if value.startswith(pattern) else value
            if operator == "/%":
                return value.removesuffix(pattern) + new if value.endswith(pattern) else value
            return value.replace(pattern, new, -1 if operator == "//" else 1) if pattern else value
        return None


def _require(match: re.Match[str] | None) -> re.Match[str]:
    assert match is not None  # the grammar closed every quote
    return match
