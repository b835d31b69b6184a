"""Conditions, cases and loops of a script.

Where the script does not decide which of two branches is taken, both are followed: variables that have one value
behind both are known, the others are open.
"""

import fnmatch
import re

from phalanx.frameworks.shell.expansion import arithmetic, expand_all, text_of
from phalanx.frameworks.shell.follower import Follower
from phalanx.frameworks.shell.invocation import ControlExit, Fork
from phalanx.frameworks.shell.nodes import NAME, REFERENCE, CaseCommand, Chain, For, If, Node, SimpleCommand, While
from phalanx.frameworks.shell.scope import LONGEST_LOOP, Scope, is_open, plain, unknown


def attempt(m: Follower, node: Node, scope: Scope) -> bool | None:
    """Follow a branch that may not be taken: what ends a script ends only the branch."""
    try:
        return m.node(node, scope)
    except ControlExit:
        return None


def merge(m: Follower, scope: Scope, taken: Scope, other: Scope, line: int, reason: str) -> None:
    """Leave open what differs between two branches, and note it."""
    differing = differing_names(taken, other)
    for name in differing:
        scope.variables[name] = [unknown(name)]
    for name, values in taken.variables.items():
        if name not in differing:
            scope.variables[name] = values
    scope.exported |= taken.exported | other.exported
    scope.functions |= other.functions | taken.functions
    if differing:
        m.forks.append(Fork(line, reason, *_texts(differing, taken, other)))


def differing_names(a: Scope, b: Scope) -> list[str]:
    """Return the variables that differ between two shells."""
    names = {*a.variables, *b.variables}
    return sorted(n for n in names if a.variables.get(n) != b.variables.get(n))


def _texts(names: list[str], a: Scope, b: Scope) -> tuple[dict[str, str], dict[str, str]]:
    """Return some variables of two shells, as a note shows them."""
    first, second = ({n: plain(" ".join(s.variables.get(n, []))) for n in names} for s in (a, b))
    return first, second


def conditional(m: Follower, node: If, scope: Scope) -> bool | None:
    """Follow `if`: the branch that is taken, or both where only a running shell could tell."""
    for place, (condition, body) in enumerate(node.branches):
        m.unset = set()
        status = attempt(m, condition, scope)
        unset = m.unset
        rest = If(node.branches[place + 1 :], node.otherwise, node.line) if place + 1 < len(node.branches) else None
        instead: Node | None = rest or node.otherwise
        if status is None:
            first, second = scope.copy(), scope.copy()
            attempt(m, body, first)
            if instead is not None:
                attempt(m, instead, second)
            merge(m, scope, first, second, node.line, "the condition depends on the machine, so both are open")
            return None
        other = instead if status else body
        untaken = scope.copy() if unset else None
        if untaken is not None and other is not None:
            _silently(m, other, untaken)
        if status:
            result = m.chain(body, scope)
            _note_unset(m, node.line, unset, scope, untaken)
            return result
        if rest is None:
            result = m.node(node.otherwise, scope) if node.otherwise else True
            _note_unset(m, node.line, unset, scope, untaken)
            return result
    return True


def _silently(m: Follower, node: Node, scope: Scope) -> None:
    """Follow a branch that is not taken, for the variables that it would set: no program of it is recorded."""
    kept = len(m.invocations), len(m.forks), len(m.notes), dict(m.files)
    attempt(m, node, scope)
    del m.invocations[kept[0] :], m.forks[kept[1] :], m.notes[kept[2] :]
    m.files = kept[3]


def _note_unset(m: Follower, line: int, unset: set[str], scope: Scope, untaken: Scope | None) -> None:
    """Note what the branch that is not taken would set otherwise, where variables that are not set decided."""
    if untaken is None or not (differing := differing_names(scope, untaken)):
        return
    places = [f"${name}" for name in sorted(unset) if name.isdigit()]
    names = [name for name in sorted(unset) if not name.isdigit()]
    whose = [f"{', '.join(names)} of the environment"] if names else []
    whose += [f"{', '.join(places)} of the command line"] if places else []
    reason = f"{' and '.join(whose)} decides, taken as unset"
    m.forks.append(Fork(line, reason, *_texts(differing, scope, untaken)))


def for_loop(m: Follower, node: For, scope: Scope) -> bool | None:
    """Follow `for`, each round by itself."""
    status: bool | None = True
    if node.arithmetic is not None:
        start, condition, step = node.arithmetic
        arithmetic(start, scope)
        for _ in range(LONGEST_LOOP):
            if not (arithmetic(condition, scope) if condition.strip() else 1):
                return status
            ends, status = _round(m, node.body, scope)
            if ends:
                return status
            arithmetic(step, scope)
        return None
    values = scope.arguments if node.words is None else expand_all(node.words, scope)
    m.references[node.name] = set(REFERENCE.findall(" ".join(node.words or ())))
    for value in values[:LONGEST_LOOP]:
        scope.assign(node.name, value)
        ends, status = _round(m, node.body, scope)
        if ends:
            break
    return status


def _round(m: Follower, body: Chain, scope: Scope) -> tuple[bool, bool | None]:
    """Follow a loop's body once; return (whether the loop ends with it, its status)."""
    try:
        return False, m.chain(body, scope)
    except ControlExit as left:
        if left.how not in ("break", "continue"):
            raise
        return left.how == "break", left.status


def while_loop(m: Follower, node: While, scope: Scope) -> bool | None:
    """Follow `while` or `until`; its body is a branch where the condition depends on the machine."""
    last: bool | None = True
    for _ in range(LONGEST_LOOP):
        status = m.chain(node.condition, scope)
        if status is None or _reads_input(node.condition):
            before = scope.copy()
            attempt(m, node.body, scope)
            merge(m, scope, scope.copy(), before, node.line, "the loop depends on the machine")
            return None
        if status is node.until:
            return last
        ends, last = _round(m, node.body, scope)
        if ends:
            return last
    return None


def _reads_input(condition: Chain) -> bool:
    """Whether a condition takes lines of its input, `while read line`."""
    return any(
        isinstance(part, SimpleCommand) and part.words[:1] == ("read",)
        for _, line in condition.links
        for part in line.parts
    )


def case(m: Follower, node: CaseCommand, scope: Scope) -> bool | None:
    """Follow the arm of `case` that fits; the last one where the word is open."""
    word = text_of(node.word, scope)
    if is_open(word):
        name = re.fullmatch(rf"[\"']?\$\{{?({NAME})\}}?[\"']?", node.word)
        last = node.arms[-1][1] if node.arms and "*" in node.arms[-1][0] else None
        untaken = scope.copy()
        if last is not None:
            m.chain(last, scope)
        _note_unset(m, node.line, {name[1] if name else plain(word)}, scope, untaken)
        return None
    for patterns, body in node.arms:
        if any(fnmatch.fnmatchcase(word, text_of(pattern, scope)) for pattern in patterns):
            return m.chain(body, scope)
    return True
