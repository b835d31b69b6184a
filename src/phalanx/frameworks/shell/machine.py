"""A shell that follows commands and runs nothing."""

import re

from phalanx.frameworks.shell import branches, output, programs
from phalanx.frameworks.shell.conditions import TestOutcome, holds, test_holds
from phalanx.frameworks.shell.expansion import arithmetic, expand, expand_all, text_of
from phalanx.frameworks.shell.follower import Follower
from phalanx.frameworks.shell.grammar import parse
from phalanx.frameworks.shell.invocation import ControlExit
from phalanx.frameworks.shell.nodes import (
    DECLARES,
    NAME,
    REFERENCE,
    Assignment,
    CaseCommand,
    Chain,
    CommandPipeline,
    For,
    Function,
    GroupCommand,
    If,
    Node,
    SimpleCommand,
    Test,
    While,
)
from phalanx.frameworks.shell.scope import LONGEST_LOOP, WORD, Scope, is_open, plain, unknown

_QUERIES = frozenset(
    ("command", "which", "type", "hash", "grep", "pgrep", "nvidia-smi", "lspci", "ping", "nc", "diff")
)
STEP = 100
"""Work of a step, in characters copied: a script takes about a second at most."""


class ScriptFollower(Follower):
    """Follows commands."""

    def node(self, node: Node, scope: Scope) -> bool | None:
        scope.budget.spend(STEP)
        match node:
            case SimpleCommand():
                return self.command(node, scope)
            case Chain():
                return self.chain(node, scope)
            case CommandPipeline():
                return self.pipeline(node, scope)
            case Test():
                return self.decided(holds(node, scope))
            case If():
                return branches.conditional(self, node, scope)
            case For():
                return branches.for_loop(self, node, scope)
            case While():
                return branches.while_loop(self, node, scope)
            case CaseCommand():
                return branches.case(self, node, scope)
            case Function():
                scope.functions[node.name] = node.body
                return True
            case GroupCommand():
                inner = scope.copy() if node.subshell else scope
                try:
                    status = self.chain(node.body, inner)
                except ControlExit as left:
                    if not node.subshell or left.how not in ("exit", "return"):
                        raise
                    status = left.status
                return status

    def chain(self, chain: Chain, scope: Scope) -> bool | None:
        status: bool | None = True
        for operator, pipeline in chain.links:
            if operator != ";" and status is (operator == "||"):
                continue
            if operator != ";" and status is None:
                before = scope.copy()
                other = branches.attempt(self, pipeline, before)
                branches.merge(self, scope, before, scope.copy(), self._line(pipeline), "depends on the machine")
                status = None if other is None else status
                continue
            status = self.pipeline(pipeline, scope)
        return status

    def _line(self, node: Node) -> int:
        if isinstance(node, CommandPipeline):
            return self._line(node.parts[0])
        return getattr(node, "line", 0)

    def decided(self, answer: TestOutcome) -> bool | None:
        self.unset = answer.unset
        return answer.holds

    def pipeline(self, node: CommandPipeline, scope: Scope) -> bool | None:
        if len(node.parts) == 1:
            status = self.node(node.parts[0], scope)
        else:
            status = True
            given: str | None = ""
            for part in node.parts:
                inner = scope.copy()
                if isinstance(part, SimpleCommand):
                    words = expand_all(part.words, inner)
                    if words[:1] in (["bash"], ["sh"]) and len(words) == 1 and given:
                        self.text(given, inner)
                        continue
                    status = self.command(part, inner, given)
                    given = output.command_output(self, words, part.redirects, given, inner)
                    if words[:1] == ["tee"] and given is not None and len(words) > 1:
                        self.files[plain(words[-1])] = given
                else:
                    status, given = self.node(part, inner), None
        return status if not node.negated or status is None else not status

    def command(self, node: SimpleCommand, scope: Scope, given: str | None = "") -> bool | None:
        scope.budget.spend(STEP + len(node.words))
        if not node.words:
            for assignment in node.assignments:
                self.assign(assignment, scope)
            return True
        words = expand_all(node.words, scope)
        declares = bool(words) and words[0] in DECLARES
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
        self.redirected(words, node, given, local)
        names = set(REFERENCE.findall(" ".join(node.words)))
        return self.words(words, names, node, local if node.assignments else scope)

    def redirected(self, words: list[str], node: SimpleCommand, given: str | None, scope: Scope) -> None:
        """Keep the text of a file that the script writes. `given`: what a pipeline puts into the command."""
        writes = [redirect for redirect in node.redirects if redirect.operator in (">", ">>", ">|", "&>")]
        if words[:1] and words[0] in output.WRITERS:
            targets = [(plain(text_of(r.target, scope)), r.operator == ">>") for r in writes]
            targets += [(plain(words[-1]), False)] if words[0] == "sed" and "-i" in words else []
            text = output.command_output(self, words, node.redirects, given, scope) if targets else None
            for target, appends in targets:
                if text is not None:
                    earlier = self.files.get(target, "") if appends else ""
                    scope.budget.spend(len(earlier) + len(text))
                    self.files[target] = earlier + text

    def words(self, words: list[str], names: set[str], node: SimpleCommand, scope: Scope) -> bool | None:
        """Follow a command by its expanded words."""
        if not words:
            return True
        name, line = words[0], node.line
        if name in scope.functions:
            return programs.call(self, words, names, scope)
        if name in ("[", "test"):
            inner = words[1:-1] if name == "[" else words[1:]
            return self.decided(test_holds(inner, scope))
        if name in ("exit", "return", "break", "continue"):
            if name == "exit" and words[1:2] not in ([], ["0"]):  # a guard, which a run that succeeds passes
                return True
            fails = name == "return" and len(words) > 1 and words[1].isdigit() and words[1] != "0"
            raise ControlExit(name, not fails)
        if name in (":", "true", "false"):
            return name != "false"
        if name in ("cd", "pushd"):
            self.enter(words[1:], scope)
            return True
        if name == "set":
            if "--" in words:
                scope.arguments, scope.called = words[words.index("--") + 1 :], True
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
            return programs.source(self, words[1:], line, scope)
        if name in _QUERIES:
            return None
        return programs.start(self, words, names, node, scope)

    def read(self, words: list[str], node: SimpleCommand, scope: Scope) -> None:
        """Set the variables that `read` takes from a text that is known, else leave them open."""
        whole = "-d" in words and words.index("-d") + 1 < len(words) and words[words.index("-d") + 1] == ""
        names = [word for word in words if re.fullmatch(NAME, word) and word not in ("d", "r", "a")] or ["REPLY"]
        given = next((text_of(r.target, scope) for r in node.redirects if r.operator == "<<<"), None)
        if (text := programs.document_of(node, scope)) is not None:
            given = text if whole else text.partition("\n")[0]
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

    def text(self, text: str, scope: Scope) -> bool | None:
        scope.budget.spend(len(text))
        chain, notes = parse(text)
        self.notes += notes
        return self.chain(chain, scope)

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
        self.references.setdefault(name, set()).update(REFERENCE.findall(" ".join(raws)))
        if isinstance(assignment.value, tuple):
            pairs = [(raw, re.match(r"\[([^\]]*)\]=", raw)) for raw in assignment.value]
            for raw, key in pairs:
                if key:
                    self.assign_element(name, key[1], text_of(raw[key.end() :], scope), scope)
            if any(key for _, key in pairs):
                return
            values = [word for raw in assignment.value for word in expand(raw, scope)]
            earlier = scope.variables.get(name, []) if assignment.append else []
            scope.budget.spend(WORD * (len(earlier) + len(values)))
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
        if place is None or not 0 <= place < LONGEST_LOOP:
            scope.variables[name] = [unknown(name)]
            return
        values += [""] * (place + 1 - len(values))
        values[place] = value
