"""What a command runs: a script, a function or a text in a shell of its own, else a program, which is noted."""

import re
from collections.abc import Iterable
from dataclasses import replace

from phalanx.frameworks.shell.expansion import document
from phalanx.frameworks.shell.follower import Follower
from phalanx.frameworks.shell.invocation import ControlExit, Invocation
from phalanx.frameworks.shell.nodes import SimpleCommand
from phalanx.frameworks.shell.scope import DEEPEST, Scope, plain
from phalanx.spec.errors import InputError

SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ksh"))
_QUIET = frozenset(
    (
        "trap", "ulimit", "module", "ml", "conda", "mamba", "mkdir", "rm", "ln", "cp", "mv", "chmod", "touch",
        "sleep", "wait", "pip", "pip3", "git", "wget", "curl", "tar", "ls", "pwd", "date", "hostname", "shopt",
        "umask", "alias", "kill", "pkill", "modprobe", "sysctl", "apt-get", "apt", "scontrol", "tee", "cat",
        "echo", "printf", "sed", "awk", "head", "tail", "set", "history", "popd", "getopts", "squeue", "scancel",
        "jupyter", "tensorboard", "rsync", "scp", "unzip", "du", "df", "free", "top",
        "printenv", "id", "whoami", "uname", "make", "cmake", "basename", "dirname", "expr", "bc", "seq", "tr",
        "cut", "wc", "sort", "uniq", "xargs", "find", "ldconfig", "nvidia-smi", "ps", "which", "realpath",
    )
)  # fmt: skip
"""Programs and builtins that start no training and set nothing that is read."""
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
"""Ends of names of scripts."""
_SUBMITTERS = {
    "sbatch": frozenset(("H", "O", "Q", "W", "h", "s", "v")),
    "qsub": frozenset(("I", "V", "X", "f", "h", "z")),
    "bsub": frozenset(("B", "H", "I", "K", "N", "r", "x")),
}
"""Programs that hand a script to a batch system, with their short switches (sbatch(1), qsub(1B), bsub(1))."""
_SWITCHES = frozenset(
    (
        "parsable", "wait", "hold", "exclusive", "requeue", "no-requeue", "overcommit", "oversubscribe", "quiet",
        "verbose", "test-only", "contiguous", "use-min-nodes", "spread-job", "reboot", "get-user-env",
    )
)  # fmt: skip
_SENDERS = frozenset(("ssh", "pdsh", "clush", "pssh", "parallel-ssh"))
_HOLDERS = frozenset(("tmux", "screen", "su", "script", "watch"))
"""Programs that hand a text to a shell, of other hosts and of this one."""


def _text_in(words: list[str]) -> int | None:
    """Return the place of the word that a program hands to a shell, as `ssh host "cd x && run"`; None without one."""
    known = words[0].rpartition("/")[2] in _SENDERS | _HOLDERS
    for place, word in enumerate(words):
        named = word.startswith("--command=") or words[place - 1] == "--command"
        if place and (known or named) and re.search(r"\s", word):
            return place
    return None


def _options_of(words: list[str], at: int) -> list[str]:
    """Return a launcher with its options: without its subcommands, and without the command at `at` that it runs."""
    rest = [word for word in (*words[1:at], *words[at + 1 :]) if word != "--command"]
    first = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    return [words[0], *rest[first:]]


def start(m: Follower, words: list[str], names: set[str], node: SimpleCommand, scope: Scope) -> bool | None:
    """Follow the script that a command runs, or note the program that it starts."""
    if words[0].rpartition("/")[2] in _QUIET and words[1:2] != ["run"]:
        return True
    if words[0].rpartition("/")[2] in _SUBMITTERS:
        return _submit(m, words, names, node, scope)
    for place, word in enumerate(words):
        shell = word.rpartition("/")[2] in SHELLS
        if shell or (word.endswith(SCRIPTS) and (place == 0 or words[place - 1][:2] != "--")):
            inner = _script_of(m, words, place, shell, node, scope)
            if inner is not None:
                text, arguments, file = inner
                return _in_its_own_shell(m, text, words[:place], arguments, names, scope, file)
            if shell:
                continue
    if words[0] == "ssh" and (given := document_of(node, scope)):
        return _in_its_own_shell(m, given, (), [], names, scope, "ssh")
    if (at := _text_in(words)) is not None:
        sent = words[0].rpartition("/")[2] in _SENDERS
        text = " ".join(words[at:]) if sent else words[at].removeprefix("--command=")
        before = words[:at] if sent else _options_of(words, at) if words[0] == "xpk" else ()
        return _in_its_own_shell(m, text, before, [], names, scope, words[0])
    if m.invocations and not m.prefix and _is_pasted(words, node.line, m.invocations[-1]):
        above = m.invocations[-1]
        if not above.pasted:
            m.notes.append(
                f"line {node.line} and what follows it have no \\ before them, as text that was pasted: read as the "
                f"rest of line {above.line}, which bash would start without them"
            )
        m.invocations[-1] = replace(
            above, words=(*above.words, *words), names=above.names | m.closure(names), pasted=node.line
        )
        return True
    if words[0].startswith("-") and m.invocations and not m.prefix:
        m.notes.append(
            f"line {node.line} begins with {plain(words[0])}: the command above it has ended (no \\ at its end, or a "
            "comment or an empty line between), and does not get these flags"
        )
        return True
    environment = {n: plain(" ".join(scope.variables[n])) for n in sorted(scope.exported) if n in scope.variables}
    m.invocations.append(Invocation((*m.prefix, *words), environment, node.line, scope.directory, m.closure(names)))
    scope.budget.spend(sum(map(len, words)))
    return True


def _is_pasted(words: list[str], line: int, above: Invocation) -> bool:
    """Whether a line is the rest of the command above it, in text that lost its backslashes: flags right below a
    command of one line, or below more of them; or the program between them."""
    if line != (above.pasted or above.line) + 1:
        return False
    return words[0].startswith("-") or (bool(above.pasted) and len(words) == 1 and words[0].endswith(".py"))


def _submit(m: Follower, words: list[str], names: set[str], node: SimpleCommand, scope: Scope) -> bool | None:
    """Follow the script that a command hands to a batch system, under the options before it, which come first."""
    by = words[0].rpartition("/")[2]
    options: list[str] = []
    rest, inner, wrapped = words[1:], scope.copy(), None
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        option = rest.pop(0)
        name, equals, value = option.lstrip("-").partition("=")
        attached = not option.startswith("--") and len(name) > 1 and by == "sbatch"
        if not (equals or attached or name in _SUBMITTERS[by] | _SWITCHES) and rest:
            value = rest.pop(0)
        if name in ("export", "v"):
            for pair in value.split(","):
                if "=" in pair:
                    inner.assign(*pair.split("=", 1))
        elif name == "wrap":
            wrapped = value
        else:
            options.append(f"{option.partition('=')[0]} {value}".rstrip())
    file, arguments = (by, []) if wrapped or not rest else (plain(rest[0]), rest[1:])
    text = wrapped or (document_of(node, scope) if not rest else None)
    if text is None and rest:
        text = m.contents(rest[0], scope)
    if text is None and rest and not file.endswith(SCRIPTS):
        text = " ".join(rest)  # a command
    if text is None:
        m.notes += [f"{file}, which it submits, is not here: give it too"] if rest else []
        return True
    kind = "PBS" if by == "qsub" else "SBATCH"
    text = "\n".join((text, *(f"#{kind} {option}" for option in options if by != "bsub")))
    for name, value in m.submitted(text).items():
        inner.assign(name, value)
    m.batch.append(text)
    return _in_its_own_shell(m, text, (), arguments, names, inner, file)


def document_of(node: SimpleCommand, scope: Scope) -> str | None:
    """Return the here-document of a command."""
    for redirect in node.redirects:
        if redirect.operator == "<<":
            return redirect.document if redirect.quoted else document(redirect.document or "", scope)
    return None


def _script_of(
    m: Follower, words: list[str], place: int, shell: bool, node: SimpleCommand, scope: Scope
) -> tuple[str, list[str], str] | None:
    """Return (text, arguments, file) of the script that a shell at `place` runs; None where it is not known."""
    rest = words[place + 1 :] if shell else words[place:]
    while shell and rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if re.fullmatch(r"-\w*c", option):
            return _text_of_option(m, rest, node.line) if rest else None
        if option in ("-o", "-O") and rest:
            rest.pop(0)
    if not rest or (shell and rest == ["-s"]):
        given = document_of(node, scope) if shell else None
        return None if given is None else (given, [], "bash")
    text = m.contents(rest[0], scope)
    if text is None and shell:
        m.notes.append(f"{plain(rest[0])}, which it runs, is not here: give it too")
    return None if text is None else (text, rest[1:], plain(rest[0]))


def _text_of_option(m: Follower, words: list[str], line: int) -> tuple[str, list[str], str]:
    """Return (text, arguments, name) of `bash -c TEXT NAME ARGUMENTS`."""
    words = words[1:] if words[0] == "--" and words[1:] else words
    text, rest = words[0], words[1:]
    if len(rest) > 1 and not re.search(r"\$\{?[0-9@*]", text):
        m.notes.append(
            f'line {line}: an array in quotes, "... ${{A[@]}}", ends the text of -c at its first element: write '
            "${A[*]}. It is read as it was meant"
        )
        return " ".join(words), [], "bash"
    return text, rest[1:], rest[0] if rest else "bash"


def _in_its_own_shell(
    m: Follower,
    text: str,
    prefix: Iterable[str],
    arguments: list[str],
    names: set[str],
    scope: Scope,
    name: str,
) -> bool | None:
    """Follow a script in a shell of its own. `prefix`: launchers before it, which come before every program that it
    starts."""
    if m.depth >= DEEPEST:
        raise InputError("script", None, f"runs scripts more than {DEEPEST} deep", "does one run itself?")
    inner = scope.copy()
    inner.arguments, inner.called, inner.name = arguments, True, name
    kept, m.prefix, outer = m.prefix, (*m.prefix, *prefix), m.outer
    m.outer = outer | names
    m.references["@"] = m.references["*"] = set(names)
    m.depth += 1
    try:
        m.batch += [text] if "#SBATCH" in text and not m.batch else []  # comments, to a job that runs
        return m.text(text, inner)
    except ControlExit:
        return True
    finally:
        m.depth -= 1
        m.prefix, m.outer = kept, outer


def source(m: Follower, words: list[str], line: int, scope: Scope) -> bool | None:
    """Follow a script in this shell. Raises InputError for one that sources itself."""
    if not words:
        return True
    text = m.contents(words[0], scope)
    if text is None:
        if not re.search(r"activate|conda|bashrc|profile|modules|setvars", words[0]):
            m.notes.append(f"{plain(words[0])}, which it sources, is not here: what it sets is open")
        return True
    if m.depth >= DEEPEST:
        raise InputError(
            "script", None, f"line {line}: sources files more than {DEEPEST} deep", "does one source itself?"
        )
    m.depth += 1
    try:
        return m.text(text, scope)
    except ControlExit as left:
        if left.how != "return":
            raise
        return left.status
    finally:
        m.depth -= 1


def call(m: Follower, words: list[str], names: set[str], scope: Scope) -> bool | None:
    """Follow a function with its arguments; None where it calls itself."""
    if m.depth >= DEEPEST:
        return None
    outer, called = scope.arguments, scope.called
    scope.arguments, scope.called = words[1:], True
    m.references["@"] = m.references["*"] = set(names)
    for place in range(1, len(words)):
        m.references[str(place)] = set(names)
    m.depth += 1
    try:
        return m.node(scope.functions[words[0]], scope)
    except ControlExit as left:
        if left.how != "return":
            raise
        return left.status
    finally:
        m.depth -= 1
        scope.arguments, scope.called = outer, called
