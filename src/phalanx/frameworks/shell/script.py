"""What a script starts: its commands in order, with the words and variables that they would have. Nothing is run.

Branches are decided by the script's own assignments. Where a variable of the environment decides, it is taken as
unset, and the note says what it would change; where only a running shell could tell, both branches are followed, and
what differs between them is open. Programs are taken to succeed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.frameworks.shell import filters
from phalanx.frameworks.shell.conditions import Answer, holds, test_holds
from phalanx.frameworks.shell.expansion import arithmetic, document, expand, expand_all, text_of
from phalanx.frameworks.shell.grammar import parse
from phalanx.frameworks.shell.nodes import (
    NAME,
    Assignment,
    Case,
    Chain,
    Command,
    For,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Redirect,
    Test,
    While,
)
from phalanx.frameworks.shell.scope import Scope, is_open, plain, unknown
from phalanx.spec.errors import InputError

Include = Callable[[str], "str | None"]
_SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ksh"))
_DECLARES = frozenset(("export", "declare", "typeset", "readonly", "local"))
_QUERIES = frozenset(
    ("command", "which", "type", "hash", "grep", "pgrep", "nvidia-smi", "lspci", "ping", "nc", "diff")
)
_QUIET = frozenset(
    (
        "trap", "ulimit", "module", "ml", "conda", "mamba", "mkdir", "rm", "ln", "cp", "mv", "chmod", "touch",
        "sleep", "wait", "pip", "pip3", "git", "wget", "curl", "tar", "ls", "pwd", "date", "hostname", "shopt",
        "umask", "alias", "kill", "pkill", "modprobe", "sysctl", "apt-get", "apt", "scontrol", "tee", "cat",
        "echo", "printf", "sed", "awk", "head", "tail", "set", "history", "popd", "getopts", "squeue", "scancel",
        "jupyter", "tensorboard", "rsync", "scp", "unzip", "du", "df", "free", "top",
        "printenv", "id", "whoami", "uname", "make", "cmake", "basename", "dirname", "expr", "bc", "seq", "tr",
        "cut", "wc", "sort", "uniq", "xargs", "find",
    )
)  # fmt: skip
"""Programs and builtins that start no training and set nothing that is read."""
_PLACES = re.compile(r"RANK|MASTER|PORT$|HOST|ADDR|RDZV|SOCKET|LOG|_ID$|PATH|DIR$")
"""Names of variables that tell parts of one training from one another, or places."""
_SENDERS = frozenset(("ssh", "pdsh", "clush", "pssh", "parallel-ssh"))
_HOLDERS = frozenset(("tmux", "screen", "su", "script", "watch"))
"""Programs that hand a text to a shell, of other hosts and of this one."""
_DEEPEST = 12
_ROUNDS = 1_000
_STEP = 100
"""Work of a step, in characters copied: a script takes about a second at most."""
_REFERENCE = re.compile(rf"\$\{{?[#!]?({NAME}|[@*0-9])")


@dataclass(frozen=True)
class Invocation:
    """A program that the script starts. `environment`: what it exports for it; `names`: variables that its words
    depend on."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int
    directory: str
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fork:
    """A place where the script cannot decide. `taken`, `other`: variables that differ, as each branch leaves them."""

    line: int
    reason: str
    taken: Mapping[str, str]
    other: Mapping[str, str]

    def note(self, names: frozenset[str]) -> str:
        """Say what differs among variables of a command; "" where nothing does."""
        differing = sorted(name for name in set(self.taken) & names if not _PLACES.search(name))
        if not differing:
            return ""
        parts = (f"{n} is {self.taken[n] or 'unset'!s}, else {self.other[n] or 'unset'!s}" for n in differing[:3])
        return f"line {self.line}: {self.reason}: {'; '.join(parts)}"


@dataclass(frozen=True)
class Script:
    """What a script starts, the files that it writes, and what was assumed."""

    invocations: tuple[Invocation, ...]
    files: Mapping[str, str]
    variables: Mapping[str, tuple[str, ...]]
    forks: tuple[Fork, ...]
    notes: tuple[str, ...]
    batch: tuple[str, ...] = ()
    """Scripts that it hands to a batch system."""


def follow(
    text: str,
    given: Mapping[str, str] | None = None,
    include: Include = lambda path: None,
    name: str = "script.sh",
    arguments: Iterable[str] = (),
) -> Script:
    """Follow a script or a command line. `given`: variables that its batch system sets; `include`: the text of a
    script that it calls, None where there is none. Raises InputError for what a shell would refuse."""
    machine = _Machine(include)
    scope = Scope({k: [v] for k, v in (given or {}).items()}, name=name, arguments=list(arguments))
    scope.capture = machine.capture
    chain, notes = parse(text)
    machine.notes += notes
    try:
        machine.chain(chain, scope)
    except _Left:
        pass
    except RecursionError:
        raise InputError("script", None, "is nested too deep", "give the command line that it comes to") from None
    variables = {k: tuple(v) for k, v in scope.variables.items()}
    return Script(
        tuple(machine.invocations),
        machine.files,
        variables,
        tuple(machine.forks),
        tuple(dict.fromkeys(machine.notes)),
        tuple(machine.batch),
    )


def _text_in(words: list[str]) -> int | None:
    """Return the place of the word that a program hands to a shell, as `ssh host "cd x && run"`; None without one."""
    known = words[0].rpartition("/")[2] in _SENDERS | _HOLDERS
    for place, word in enumerate(words):
        named = word.startswith("--command=") or words[place - 1] == "--command"
        if place and (known or named) and re.search(r"\s", word):
            return place
    return None


class _Left(Exception):
    """The script, a function or a loop ends here: exit, return, break, continue."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


@dataclass
class _Machine:
    """Follows commands; `prefix`: launchers in front of the shell that runs them."""

    include: Include
    invocations: list[Invocation] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    prefix: tuple[str, ...] = ()
    depth: int = 0
    references: dict[str, set[str]] = field(default_factory=dict)
    """Variable -> variables that its value was made of."""
    outer: set[str] = field(default_factory=set)
    """Variables that the text of the present shell was made of."""
    unset: set[str] = field(default_factory=set)
    """Variables of the environment that the latest condition took as unset."""

    # Compound commands. Each returns its status: None where only a running shell could tell.

    def node(self, node: Node, scope: Scope) -> bool | None:
        scope.budget.spend(_STEP)
        match node:
            case Command():
                return self.command(node, scope)
            case Chain():
                return self.chain(node, scope)
            case Pipeline():
                return self.pipeline(node, scope)
            case Test():
                return self.decided(holds(node, scope))
            case If():
                return self.branches(node, scope)
            case For():
                return self.loop(node, scope)
            case While():
                return self.while_(node, scope)
            case Case():
                return self.case(node, scope)
            case Function():
                scope.functions[node.name] = node.body
                return True
            case Group():
                inner = scope.copy() if node.subshell else scope
                try:
                    status = self.chain(node.body, inner)
                except _Left as left:
                    if not node.subshell or left.how not in ("exit", "return"):
                        raise
                    status = True
                return status

    def chain(self, chain: Chain, scope: Scope) -> bool | None:
        status: bool | None = True
        for operator, pipeline in chain.links:
            if operator != ";" and status is (operator == "||"):
                continue
            if operator != ";" and status is None:
                before = scope.copy()
                other = self.attempt(pipeline, before)
                self.merge(scope, before, scope.copy(), self._line(pipeline), "depends on the machine")
                status = None if other is None else status
                continue
            status = self.pipeline(pipeline, scope)
        return status

    def _line(self, node: Node) -> int:
        if isinstance(node, Pipeline):
            return self._line(node.parts[0])
        return getattr(node, "line", 0)

    def attempt(self, node: Node, scope: Scope) -> bool | None:
        """Follow a branch that may not be taken: what ends a script ends only the branch."""
        try:
            return self.node(node, scope)
        except _Left:
            return None

    def merge(self, scope: Scope, taken: Scope, other: Scope, line: int, reason: str) -> None:
        """Leave open what differs between two branches, and note it."""
        differing = self.differing(taken, other)
        for name in differing:
            scope.variables[name] = [unknown(name)]
        for name, values in taken.variables.items():
            if name not in differing:
                scope.variables[name] = values
        scope.exported |= taken.exported | other.exported
        scope.functions |= other.functions | taken.functions
        if differing:
            self.forks.append(Fork(line, reason, *self.shown(differing, taken, other)))

    def differing(self, a: Scope, b: Scope) -> list[str]:
        names = {*a.variables, *b.variables}
        return sorted(n for n in names if a.variables.get(n) != b.variables.get(n))

    def shown(self, names: list[str], a: Scope, b: Scope) -> tuple[dict[str, str], dict[str, str]]:
        first, second = ({n: plain(" ".join(s.variables.get(n, []))) for n in names} for s in (a, b))
        return first, second

    def decided(self, answer: Answer) -> bool | None:
        self.unset = answer.unset
        return answer.holds

    def branches(self, node: If, scope: Scope) -> bool | None:
        for place, (condition, body) in enumerate(node.branches):
            self.unset = set()
            status = self.attempt(condition, scope)
            unset = self.unset
            rest = (
                If(node.branches[place + 1 :], node.otherwise, node.line) if place + 1 < len(node.branches) else None
            )
            instead: Node | None = rest or node.otherwise
            if status is None:
                first, second = scope.copy(), scope.copy()
                self.attempt(body, first)
                if instead is not None:
                    self.attempt(instead, second)
                self.merge(scope, first, second, node.line, "the condition depends on the machine, so both are open")
                return None
            other = instead if status else body
            untaken = scope.copy() if unset else None
            if untaken is not None and other is not None:
                self.silently(other, untaken)
            if status:
                result = self.chain(body, scope)
                self.note_unset(node.line, unset, scope, untaken)
                return result
            if rest is None:
                result = self.node(node.otherwise, scope) if node.otherwise else True
                self.note_unset(node.line, unset, scope, untaken)
                return result
        return True

    def silently(self, node: Node, scope: Scope) -> None:
        """Follow a branch that is not taken, for the variables that it would set."""
        kept = len(self.invocations), len(self.forks), len(self.notes), dict(self.files)
        self.attempt(node, scope)
        del self.invocations[kept[0] :], self.forks[kept[1] :], self.notes[kept[2] :]
        self.files = kept[3]

    def note_unset(self, line: int, unset: set[str], scope: Scope, untaken: Scope | None) -> None:
        if untaken is None or not (differing := self.differing(scope, untaken)):
            return
        names = ", ".join(sorted(unset))
        reason = f"{names} of the environment decides, taken as unset"
        self.forks.append(Fork(line, reason, *self.shown(differing, scope, untaken)))

    def loop(self, node: For, scope: Scope) -> bool | None:
        if node.arithmetic is not None:
            start, condition, step = node.arithmetic
            arithmetic(start, scope)
            for _ in range(_ROUNDS):
                if not (arithmetic(condition, scope) if condition.strip() else 1):
                    return True
                if self.round(node.body, scope):
                    return True
                arithmetic(step, scope)
            return None
        values = scope.arguments if node.words is None else expand_all(node.words, scope)
        self.references[node.name] = set(_REFERENCE.findall(" ".join(node.words or ())))
        for value in values[:_ROUNDS]:
            scope.assign(node.name, value)
            if self.round(node.body, scope):
                break
        return True

    def round(self, body: Chain, scope: Scope) -> bool:
        """Follow a loop's body once; return whether the loop ends with it."""
        try:
            self.chain(body, scope)
        except _Left as left:
            if left.how not in ("break", "continue"):
                raise
            return left.how == "break"
        return False

    def while_(self, node: While, scope: Scope) -> bool | None:
        for _ in range(_ROUNDS):
            status = self.chain(node.condition, scope)
            if status is None or self._reads(node.condition):
                before = scope.copy()
                self.attempt(node.body, scope)
                self.merge(scope, scope.copy(), before, node.line, "the loop depends on the machine")
                return None
            if status is node.until:
                return True
            if self.round(node.body, scope):
                return True
        return None

    def _reads(self, condition: Chain) -> bool:
        return any(
            isinstance(part, Command) and part.words[:1] == ("read",)
            for _, line in condition.links
            for part in line.parts
        )

    def case(self, node: Case, scope: Scope) -> bool | None:
        word = text_of(node.word, scope)
        if is_open(word):
            name = re.fullmatch(rf"[\"']?\$\{{?({NAME})\}}?[\"']?", node.word)
            last = node.arms[-1][1] if node.arms and "*" in node.arms[-1][0] else None
            untaken = scope.copy()
            if last is not None:
                self.chain(last, scope)
            self.note_unset(node.line, {name[1] if name else plain(word)}, scope, untaken)
            return None
        for patterns, body in node.arms:
            if any(fnmatch.fnmatchcase(word, text_of(pattern, scope)) for pattern in patterns):
                return self.chain(body, scope)
        return True

    # Pipelines and simple commands.

    def pipeline(self, node: Pipeline, scope: Scope) -> bool | None:
        if len(node.parts) == 1:
            status = self.node(node.parts[0], scope)
        else:
            status = True
            given: str | None = ""
            for part in node.parts:
                inner = scope.copy()
                if isinstance(part, Command):
                    words = expand_all(part.words, inner)
                    if words[:1] in (["bash"], ["sh"]) and len(words) == 1 and given:
                        self.text(given, inner)
                        continue
                    status = self.command(part, inner)
                    given = self.printed(words, part.redirects, given, inner)
                    if words[:1] == ["tee"] and given is not None and len(words) > 1:
                        self.files[plain(words[-1])] = given
                else:
                    status, given = self.node(part, inner), None
        return status if not node.negated or status is None else not status

    def capture(self, text: str, scope: Scope) -> str | None:
        """Return what a command substitution prints; None where only a shell could tell."""
        if self.depth >= _DEEPEST:
            return None
        return self.outputs(parse(text)[0].links, scope.copy())

    def outputs(self, links: tuple[tuple[str, Pipeline], ...], scope: Scope) -> str | None:
        """Return what commands print one after the other."""
        result = ""
        for operator, pipeline in links:
            if operator == "||" and result:
                continue
            printed: str | None = ""
            for part in pipeline.parts:
                printed = self.output(part, printed, scope)
            if printed is None:
                return None
            result += printed
        return result

    def output(self, part: Node, given: str | None, scope: Scope) -> str | None:
        """Return what a command of a substitution prints for its input."""
        self.depth += 1
        try:
            if not isinstance(part, Command):
                return None
            for assignment in part.assignments:
                self.assign(assignment, scope)
            words = expand_all(part.words, scope)
            if not words:
                return ""
            if words[0] in scope.functions:
                body = scope.functions[words[0]]
                links = body.body.links if isinstance(body, Group) else ()
                inner = scope.copy()
                inner.arguments = words[1:]
                return self.outputs(links, inner)
            if words[0] in ("cd", "set", "true", ":", *_DECLARES):
                return ""
            return self.printed(words, part.redirects, given, scope)
        finally:
            self.depth -= 1

    def printed(
        self, words: list[str], redirects: tuple[Redirect, ...], given: str | None, scope: Scope
    ) -> str | None:
        for redirect in redirects:
            if redirect.operator == "<<":
                given = redirect.document if redirect.quoted else document(redirect.document or "", scope)
            elif redirect.operator == "<<<":
                given = text_of(redirect.target, scope) + "\n"
            elif redirect.operator == "<":
                given = self.files.get(plain(text_of(redirect.target, scope)))
        if not words:
            return None
        if words[0] == "scontrol" and words[1:3] in (["show", "hostnames"], ["show", "hostname"]):
            nodes = scope.value("SLURM_JOB_NUM_NODES") or ""
            return "".join(f"node{i}\n" for i in range(int(nodes))) if re.fullmatch(r"\d{1,4}", nodes) else None
        if words[0] == "cat" and len(words) > 1:
            texts = [self.files.get(plain(word)) for word in words[1:]]
            return None if None in texts else "".join(text or "" for text in texts)
        scope.budget.spend(len(given or "") + sum(map(len, words)))
        return filters.printed(words, given)

    def command(self, node: Command, scope: Scope) -> bool | None:
        scope.budget.spend(_STEP + len(node.words))
        if not node.words:
            for assignment in node.assignments:
                self.assign(assignment, scope)
            return True
        words = expand_all(node.words, scope)
        declares = bool(words) and words[0] in _DECLARES
        if declares:
            if any(re.fullmatch(r"-\w*A\w*", word) for word in words):
                scope.tables |= {a.name for a in node.assignments} | {w for w in words[1:] if w[:1] != "-"}
            for assignment in node.assignments:
                self.assign(assignment, scope)
            declared = [a.name for a in node.assignments] + [w.partition("=")[0] for w in words[1:] if w[:1] != "-"]
            for word in words[1:]:
                name, equals, value = word.partition("=")
                if equals and re.fullmatch(NAME, name):
                    scope.assign(name, value)
            if words[0] == "export" or "-x" in words:
                scope.exported |= set(declared)
            return True
        local = scope
        if node.assignments:  # for this command alone
            local = scope.copy()
            for assignment in node.assignments:
                self.assign(assignment, local)
                local.exported.add(assignment.name)
        self.redirected(words, node, local)
        names = set(_REFERENCE.findall(" ".join(node.words)))
        return self.words(words, names, node, local if node.assignments else scope)

    def redirected(self, words: list[str], node: Command, scope: Scope) -> None:
        """Keep the text of a file that the script writes."""
        for redirect in node.redirects:
            if redirect.operator in (">", ">>", ">|", "&>") and words[:1] and words[0] in ("cat", "echo", "printf"):
                text = self.printed(words, node.redirects, "", scope)
                target = plain(text_of(redirect.target, scope))
                if text is not None:
                    earlier = self.files.get(target, "") if redirect.operator == ">>" else ""
                    scope.budget.spend(len(earlier) + len(text))
                    self.files[target] = earlier + text

    def words(self, words: list[str], names: set[str], node: Command, scope: Scope) -> bool | None:
        """Follow a command by its expanded words."""
        if not words:
            return True
        name, line = words[0], node.line
        if name in scope.functions:
            return self.call(words, names, scope)
        if name in ("[", "test"):
            inner = words[1:-1] if name == "[" else words[1:]
            return self.decided(test_holds(inner, scope))
        if name in ("exit", "return", "break", "continue"):
            if name == "exit" and words[1:2] not in ([], ["0"]):  # a guard, which a run that succeeds passes
                return True
            raise _Left(name)
        if name in (":", "true", "false"):
            return name != "false"
        if name in ("cd", "pushd"):
            self.enter(words[1:], scope)
            return True
        if name == "set":
            if "--" in words:
                scope.arguments = words[words.index("--") + 1 :]
            return True
        if name == "shift":
            size = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            scope.arguments = scope.arguments[size:]
            return True
        if name == "unset":
            for word in words[1:]:
                scope.variables.pop(word, None)
                scope.functions.pop(word, None)
            return True
        if name == "let":
            for word in words[1:]:
                arithmetic(word, scope)
            return True
        if name in ("read", "mapfile", "readarray"):
            self.read(words[1:], node, scope)
            return True
        if name == "eval":
            return self.text(" ".join(words[1:]), scope)
        if name in ("source", "."):
            return self.source(words[1:], line, scope)
        if name in _QUERIES:
            return None
        return self.start(words, names, node, scope)

    def read(self, words: list[str], node: Command, scope: Scope) -> None:
        """Set the variables that `read` takes from a text that is known, else leave them open."""
        names = [word for word in words if re.fullmatch(NAME, word) and word not in ("d", "r", "a")] or ["REPLY"]
        given = next((text_of(r.target, scope) for r in node.redirects if r.operator == "<<<"), None)
        separator = text_of("$IFS", scope) if "IFS" in scope.variables else None
        parts = None if given is None else given.split(separator if separator else None)
        if parts is not None and "-a" in " ".join(words).replace("-ra", "-a"):
            scope.variables[names[-1]] = parts
            return
        for place, name in enumerate(names):
            if parts is None:
                scope.variables[name] = [unknown(name)]
            else:
                rest = " ".join(parts[place:]) if place == len(names) - 1 else "".join(parts[place : place + 1])
                scope.variables[name] = [rest]

    def start(self, words: list[str], names: set[str], node: Command, scope: Scope) -> bool | None:
        """Follow the script that a command runs, or note the program that it starts."""
        for place, word in enumerate(words):
            shell = word.rpartition("/")[2] in _SHELLS
            if shell or (word.endswith((".sh", ".bash")) and (place == 0 or words[place - 1][:2] != "--")):
                inner = self.inner(words, place, shell, node, scope)
                if inner is not None:
                    text, arguments, file = inner
                    return self.nested(text, words[:place], arguments, names, scope, file)
                if shell:
                    continue
        if words[0] in ("sbatch", "qsub", "bsub") and (given := self._given(node, scope)):
            self.batch.append(given)
            return self.nested(given, (), [], names, scope, words[0])
        if words[0] in ("ssh",) and (given := self._given(node, scope)):
            return self.nested(given, (), [], names, scope, "ssh")
        if (at := _text_in(words)) is not None:
            sent = words[0].rpartition("/")[2] in _SENDERS
            text = " ".join(words[at:]) if sent else words[at].removeprefix("--command=")
            return self.nested(text, words[:at] if sent else (), [], names, scope, words[0])
        if words[0].rpartition("/")[2] in _QUIET and not self.prefix and words[1:2] != ["run"]:
            return True
        if words[0].startswith("-") and self.invocations and not self.prefix:
            self.notes.append(
                f"line {node.line} begins with {plain(words[0])}: a comment or an empty line ends the command above "
                "it, which does not get these flags"
            )
            return True
        environment = {n: plain(" ".join(scope.variables[n])) for n in sorted(scope.exported) if n in scope.variables}
        self.invocations.append(
            Invocation((*self.prefix, *words), environment, node.line, scope.directory, self.closure(names))
        )
        scope.budget.spend(sum(map(len, words)))
        return True

    def _given(self, node: Command, scope: Scope) -> str | None:
        """Return the here-document of a command."""
        for redirect in node.redirects:
            if redirect.operator == "<<":
                return redirect.document if redirect.quoted else document(redirect.document or "", scope)
        return None

    def inner(
        self, words: list[str], place: int, shell: bool, node: Command, scope: Scope
    ) -> tuple[str, list[str], str] | None:
        """Return (text, arguments, file) of the script that a shell at `place` runs; None where it is not known."""
        rest = words[place + 1 :] if shell else words[place:]
        while shell and rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if re.fullmatch(r"-\w*c", option):
                return self._of_option(rest, node.line) if rest else None
            if option in ("-o", "-O") and rest:
                rest.pop(0)
        if not rest or (shell and rest == ["-s"]):
            given = self._given(node, scope) if shell else None
            return None if given is None else (given, [], "bash")
        text = self.files.get(plain(rest[0])) or self.include(self._path(rest[0], scope))
        if text is None and shell:
            self.notes.append(f"{plain(rest[0])}, which it runs, is not here: give it too")
        return None if text is None else (text, rest[1:], plain(rest[0]))

    def _of_option(self, words: list[str], line: int) -> tuple[str, list[str], str]:
        """Return (text, arguments, name) of `bash -c TEXT NAME ARGUMENTS`."""
        text, rest = words[0], words[1:]
        if len(rest) > 1 and not re.search(r"\$\{?[0-9@*]", text):
            self.notes.append(
                f'line {line}: an array in quotes, "... ${{A[@]}}", ends the text of -c at its first element: write '
                "${A[*]}. It is read as it was meant"
            )
            return " ".join(words), [], "bash"
        return text, rest[1:], rest[0] if rest else "bash"

    def _path(self, name: str, scope: Scope) -> str:
        name = plain(name)
        return name if name.startswith("/") or not scope.directory else f"{scope.directory}/{name}"

    def nested(
        self, text: str, prefix: Iterable[str], arguments: list[str], names: set[str], scope: Scope, name: str
    ) -> bool | None:
        """Follow a script in a shell of its own, behind what launches it."""
        if self.depth >= _DEEPEST:
            raise InputError("script", None, f"runs scripts more than {_DEEPEST} deep", "does one run itself?")
        inner = scope.copy()
        inner.arguments, inner.name = arguments, name
        kept, self.prefix, outer = self.prefix, (*self.prefix, *prefix), self.outer
        self.outer = outer | names
        self.references["@"] = self.references["*"] = set(names)
        self.depth += 1
        try:
            self.batch += [text] if "#SBATCH" in text else []
            return self.text(text, inner)
        except _Left:
            return True
        finally:
            self.depth -= 1
            self.prefix, self.outer = kept, outer

    def text(self, text: str, scope: Scope) -> bool | None:
        scope.budget.spend(len(text))
        chain, notes = parse(text)
        self.notes += notes
        return self.chain(chain, scope)

    def source(self, words: list[str], line: int, scope: Scope) -> bool | None:
        if not words:
            return True
        text = self.files.get(plain(words[0])) or self.include(self._path(words[0], scope))
        if text is None:
            if not re.search(r"activate|conda|bashrc|profile|modules|setvars", words[0]):
                self.notes.append(f"{plain(words[0])}, which it sources, is not here: what it sets is open")
            return True
        if self.depth >= _DEEPEST:
            raise InputError(
                "script", None, f"line {line}: sources files more than {_DEEPEST} deep", "does one source itself?"
            )
        self.depth += 1
        try:
            return self.text(text, scope)
        except _Left as left:
            if left.how != "return":
                raise
            return True
        finally:
            self.depth -= 1

    def call(self, words: list[str], names: set[str], scope: Scope) -> bool | None:
        if self.depth >= _DEEPEST:
            return None
        outer, scope.arguments = scope.arguments, words[1:]
        self.references["@"] = self.references["*"] = set(names)
        for place in range(1, len(words)):
            self.references[str(place)] = set(names)
        self.depth += 1
        try:
            return self.node(scope.functions[words[0]], scope)
        except _Left as left:
            if left.how != "return":
                raise
            return True
        finally:
            self.depth -= 1
            scope.arguments = outer

    def enter(self, words: list[str], scope: Scope) -> None:
        """Change the folder: a relative one is known, `$(dirname $0)` is where the script lies."""
        target = words[-1] if words else ""
        if is_open(target) or target.startswith(("/", "~", "-")):
            scope.directory = "" if "dirname" in target else plain(target)
        elif target and target != ".":
            scope.directory = f"{scope.directory}/{target}" if scope.directory else target

    def assign(self, assignment: Assignment, scope: Scope) -> None:
        name = assignment.name
        raws = assignment.value if isinstance(assignment.value, tuple) else (assignment.value,)
        self.references.setdefault(name, set()).update(_REFERENCE.findall(" ".join(raws)))
        if isinstance(assignment.value, tuple):
            pairs = [(raw, re.match(r"\[([^\]]*)\]=", raw)) for raw in assignment.value]
            for raw, key in pairs:
                if key:
                    self.assign_element(name, key[1], text_of(raw[key.end() :], scope), scope)
            if any(key for _, key in pairs):
                return
            values = [word for raw in assignment.value for word in expand(raw, scope)]
            earlier = scope.variables.get(name, []) if assignment.append else []
            scope.budget.spend(len(earlier) + len(values))
            scope.variables[name] = [*earlier, *values]
            return
        value = text_of(assignment.value, scope)
        if assignment.index:
            self.assign_element(name, assignment.index, value, scope)
        elif assignment.append:
            values = scope.variables.get(name) or [
                unknown(name) if name.isupper() and name not in scope.variables else ""
            ]
            scope.budget.spend(len(values[0]) + len(value))
            scope.variables[name] = [values[0] + value, *values[1:]]
        else:
            scope.assign(name, value)

    def assign_element(self, name: str, index: str, value: str, scope: Scope) -> None:
        if name in scope.tables:
            scope.assign(f"{name}[{text_of(index, scope)}]", value)
            return
        place = arithmetic(index, scope)
        values = scope.variables.setdefault(name, [])
        if place is None or not 0 <= place < _ROUNDS:
            scope.variables[name] = [unknown(name)]
            return
        values += [""] * (place + 1 - len(values))
        values[place] = value

    def closure(self, names: set[str]) -> frozenset[str]:
        """Return the variables that some depend on, themselves included."""
        closed = names | self.outer
        waiting = list(closed)
        while waiting:
            for name in self.references.get(waiting.pop(), ()):
                if name not in closed:
                    closed.add(name)
                    waiting.append(name)
        return frozenset(closed)
