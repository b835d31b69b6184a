r"""What a few small programs print, where it depends on nothing but their words and their input.

They are what scripts compute settings with: `$(echo "$X" | cut -d, -f1)`, `$(expr $A \\* 2)`, `$(seq 0 3)`. Any other
program's output is open.
"""

import ast
import re
from collections.abc import Callable
from fractions import Fraction

from phalanx.frameworks.shell.arithmetic import evaluate
from phalanx.frameworks.shell.scope import is_open

_LONGEST = 2**16
"""Characters of the longest output."""
_MOST_NUMBERS = 10_000


def program_output(words: list[str], given: str | None) -> str | None:
    """Return what a program prints for its words and its input (None: open); None where only a shell could tell."""
    name = words[0].rpartition("/")[2]
    if name not in PRINTS or (any(map(is_open, words[1:])) and name not in ("echo", "printf")):
        return None
    if given is not None and is_open(given) and name != "cat":
        return None
    try:
        result = PRINTS[name](words[1:], given)
    except (ValueError, IndexError, ZeroDivisionError, KeyError, TypeError, SyntaxError):
        return None
    return result if result is not None and len(result) <= _LONGEST else None


def _echo(words: list[str], given: str | None) -> str:
    escapes = False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        escapes |= "e" in words[0]
        words = words[1:]
    text = " ".join(words)
    return _escaped(text) + "\n" if escapes else text + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\")


def _printf(words: list[str], given: str | None) -> str:
    words = words[1:] if words[0] == "--" else words
    form, values = _escaped(words[0]), words[1:]
    places = len(re.findall(r"%[^%]", form.replace("%%", "")))
    result, at = "", 0
    while True:

        def value(match: re.Match[str]) -> str:
            nonlocal at
            if match[0] == "%%":
                return "%"
            text = values[at] if at < len(values) else ""
            at += 1
            kind = match[0][-1]
            if kind in "di":
                return (match[0][:-1] + "d") % int(text or 0)
            return match[0] % float(text or 0) if kind in "fge" else (match[0][:-1] + "s") % text

        result += re.sub(r"%[-0]?\d{0,2}(?:\.\d)?[sdifgeb]|%%", value, form)
        if not places or at >= len(values) or len(result) > _LONGEST:
            return result


def _expr(words: list[str], given: str | None) -> str | None:
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return f"{int((words[0] == words[2]) is (words[1] != '!='))}\n"
    value = evaluate(" ".join(words), lambda name: None, lambda name, value: None)
    return None if value is None else f"{value}\n"


def _bc(words: list[str], given: str | None) -> str | None:
    """Print the value of sums and products, to as many digits as `scale` says."""
    lines = [line.strip() for line in re.split(r"[;\n]", given or "") if line.strip()]
    scale, result = 20 if "-l" in words else 0, ""
    for line in lines:
        if match := re.fullmatch(r"scale\s*=\s*(\d{1,2})", line):
            scale = int(match[1])
            continue
        if not re.fullmatch(r"[0-9.+\-*/() ]{1,200}", line):
            return None
        line = re.sub(r"\b0+(?=\d)", "", line)  # which Python has no numbers with
        value = _sum(ast.parse(line, mode="eval").body, line, scale)
        digits = int(abs(value) * 10**scale)
        sign = "-" if value < 0 and digits else ""
        whole, part = divmod(digits, 10**scale)
        result += f"{sign}{whole or ('' if scale and part else 0)}{f'.{part:0{scale}d}' if scale and part else ''}\n"
    return result


def _sum(node: ast.AST, line: str, scale: int) -> Fraction:
    """Return the value of a sum of products; quotients are cut to `scale` digits, as bc does. Raises KeyError for
    other expressions."""
    match node:
        case ast.Constant():
            return Fraction(str(ast.get_source_segment(line, node)))
        case ast.UnaryOp(ast.USub(), inner):
            return -_sum(inner, line, scale)
        case ast.BinOp(left, operator, right):
            a, b = _sum(left, line, scale), _sum(right, line, scale)
            if isinstance(operator, ast.Div):
                return Fraction(int(a / b * 10**scale), 10**scale)
            return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}[type(operator)]
    raise KeyError(node)


def _seq(words: list[str], given: str | None) -> str:
    between = "\n"
    if words[0].startswith("-s"):
        between = words[0][2:] or words[1]
        words = words[1 if words[0][2:] else 2 :]
    numbers = [int(word) for word in words]
    first, step, last = {1: (1, 1), 2: (numbers[0], 1), 3: (numbers[0], numbers[1 % len(numbers)])}[len(numbers)] + (
        numbers[-1],
    )
    values = range(first, last + (1 if step > 0 else -1), step)
    if len(values) > _MOST_NUMBERS:
        raise ValueError
    return between.join(map(str, values)) + "\n"


def _basename(words: list[str], given: str | None) -> str:
    name = words[0].rstrip("/").rpartition("/")[2]
    return name.removesuffix(words[1] if len(words) > 1 else "") + "\n"


def _dirname(words: list[str], given: str | None) -> str:
    return (words[0].rstrip("/").rpartition("/")[0] or ".") + "\n"


def _tr(words: list[str], given: str | None) -> str | None:
    if given is None:
        return None
    if words[0] == "-d":
        return given.translate({ord(c): None for c in _set(words[1])})
    if words[0] in ("-s", "-c"):
        return None
    old, new = _set(words[0]), _set(words[1])
    return given.translate({ord(c): new[min(i, len(new) - 1)] for i, c in enumerate(old)})


def _set(text: str) -> str:
    text = text.replace("[:upper:]", "A-Z").replace("[:lower:]", "a-z")
    text = text.replace("\\n", "\n").replace("\\t", "\t").strip("[]") or text
    return re.sub(r"(\w)-(\w)", lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))), text)


def _wc(words: list[str], given: str | None) -> str | None:
    if given is None or len(words) != 1:
        return None
    counts = {"-w": len(given.split()), "-l": given.count("\n"), "-c": len(given), "-m": len(given)}
    return f"{counts[words[0]]}\n"


def _cut(words: list[str], given: str | None) -> str | None:
    """Print fields of each line: `-f2`, `-f1,3`, `-f2-`, with or without `-d`."""
    text = " ".join(words)
    between, fields = re.search(r"-d\s?(\S| (?= ))", text), re.search(r"-f\s?([\d,-]+)", text)
    if given is None or not fields:
        return None
    mark = between[1] if between else "\t"
    ranges = [re.fullmatch(r"(\d*)(-?)(\d*)", part) for part in fields[1].split(",")]
    lines = []
    for line in given.splitlines():
        parts = line.split(mark)
        places: set[int] = set()
        for match in ranges:
            if not match or not match[0].strip("-"):
                return None
            first = int(match[1] or 1)
            places |= {*range(first - 1, (int(match[3] or len(parts)) if match[2] else first))}
        lines.append(mark.join(p for i, p in enumerate(parts) if i in places) if mark in line else line)
    return "\n".join(lines) + "\n"


def _awk(words: list[str], given: str | None) -> str | None:
    mark = None
    if words[0].startswith("-F"):
        mark = words[0][2:] or words[1]
        words = words[1 if words[0][2:] else 2 :]
    match = re.fullmatch(r"\s*\{\s*print\s+(\$(\d+|NF)|NF|[\d.$*/+ ()-]+)\s*;?\s*\}\s*", words[0])
    if given is None or not match or len(words) > 1:
        return None
    lines = []
    for line in given.splitlines():
        parts = line.split(mark)
        if match[1] == "NF":
            lines.append(str(len(parts)))
        elif not match[2]:
            return None
        else:
            place = len(parts) if match[2] == "NF" else int(match[2])
            lines.append(line if place == 0 else parts[place - 1] if place <= len(parts) else "")
    return "\n".join(lines) + "\n"


def _line_count(words: list[str]) -> str | None:
    """Return the number of `-n 5`, `-n5`, `-5` or `--lines=5`, with its sign, as head and tail take it; None for
    other options (`-c`) and for files."""
    match = re.fullmatch(r"(?:-n ?|--lines[= ]|-)([+-]?\d+)", " ".join(words) or "-10")
    return match[1] if match else None


def _head(words: list[str], given: str | None) -> str | None:
    """Print the first lines; of `-n -2`, all but the last two."""
    if given is None or (count := _line_count(words)) is None:
        return None
    lines = given.splitlines(keepends=True)
    return "".join(lines[: max(len(lines) + int(count), 0) if count.startswith("-") else int(count)])


def _tail(words: list[str], given: str | None) -> str | None:
    """Print the last lines; of `-n +2`, those from the second on."""
    if given is None or (count := _line_count(words)) is None:
        return None
    lines = given.splitlines(keepends=True)
    first = int(count) - 1 if count.startswith("+") else len(lines) - abs(int(count))
    return "".join(lines[max(first, 0) :])


def _cat(words: list[str], given: str | None) -> str | None:
    return given if not words or words == ["-"] else None


def _xargs(words: list[str], given: str | None) -> str | None:
    return None if words or given is None else " ".join(given.split()) + "\n"


def _sed(words: list[str], given: str | None) -> str | None:
    """Print its input with plain texts replaced: `s/a/b/`, `s/a/b/g`, several by `-e` or `;`."""
    scripts = [word for word in words if word not in ("-e", "-i")]
    for command in (command for script in scripts for command in re.split(r"[;\n]", script)):
        match = re.fullmatch(r"\s*s(.)([\w ,:=\"'/-]+?)\1([\w ,.:=\"'/+${}-]*?)\1(g?)\s*", command)
        if given is None or not match:
            return None
        lines = (line.replace(match[2], match[3], -1 if match[4] else 1) for line in given.splitlines())
        given = "\n".join(lines) + "\n"
    return given


PRINTS: dict[str, Callable[[list[str], str | None], str | None]] = {
    "echo": _echo,
    "printf": _printf,
    "expr": _expr,
    "bc": _bc,
    "seq": _seq,
    "basename": _basename,
    "dirname": _dirname,
    "tr": _tr,
    "wc": _wc,
    "cut": _cut,
    "awk": _awk,
    "head": _head,
    "tail": _tail,
    "cat": _cat,
    "xargs": _xargs,
    "sed": _sed,
}
"""Programs by name: (words, input) -> output, None where it is open."""
