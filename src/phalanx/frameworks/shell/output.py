"""What commands print, where the script decides it: for `$( )`, pipelines and files that it writes."""

import re
from collections.abc import Callable

from phalanx.frameworks.shell import filters
from phalanx.frameworks.shell.expansion import document, expand_all, text_of
from phalanx.frameworks.shell.follower import Follower
from phalanx.frameworks.shell.grammar import parse
from phalanx.frameworks.shell.nodes import DECLARES, CommandPipeline, GroupCommand, Node, Redirection, SimpleCommand
from phalanx.frameworks.shell.scope import DEEPEST, Scope

WRITERS = frozenset(("cat", "echo", "printf", "sed", "envsubst"))
"""Programs with which scripts write files that others read: from a template, as often as not."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def capture(m: Follower, text: str, scope: Scope) -> str | None:
    """Return what a command substitution prints; None where only a shell could tell."""
    if m.depth >= DEEPEST:
        return None
    return _outputs(m, parse(text)[0].links, scope.copy())


def _outputs(m: Follower, links: tuple[tuple[str, CommandPipeline], ...], scope: Scope) -> str | None:
    """Return what commands print one after the other."""
    result = ""
    for operator, pipeline in links:
        if operator == "||" and result:
            continue
        printed: str | None = ""
        for part in pipeline.parts:
            printed = _output(m, part, printed, scope)
        if printed is None:
            return None
        result += printed
    return result


def _output(m: Follower, part: Node, given: str | None, scope: Scope) -> str | None:
    """Return what a command of a substitution prints for its input."""
    m.depth += 1
    try:
        if not isinstance(part, SimpleCommand):
            return None
        for assignment in part.assignments:
            m.assign(assignment, scope)
        words = expand_all(part.words, scope)
        if not words:
            return ""
        if words[0] in scope.functions:
            body = scope.functions[words[0]]
            links = body.body.links if isinstance(body, GroupCommand) else ()
            inner = scope.copy()
            inner.arguments, inner.called = words[1:], True
            return _outputs(m, links, inner)
        if words[0] in ("cd", "set", "true", ":", *DECLARES):
            return ""
        return command_output(m, words, part.redirects, given, scope)
    finally:
        m.depth -= 1


def command_output(
    m: Follower, words: list[str], redirects: tuple[Redirection, ...], given: str | None, scope: Scope
) -> str | None:
    """Return what a command prints for its words, its redirections and its input."""
    given = _redirected(m, redirects, given, scope)
    if not words:
        return None
    return _PROGRAMS.get(words[0], _filtered)(m, words, given, scope)


def _redirected(m: Follower, redirects: tuple[Redirection, ...], given: str | None, scope: Scope) -> str | None:
    """Return a command's input: `given` by the pipeline, or of its last redirection that reads."""
    for redirect in redirects:
        if redirect.operator == "<<":
            given = redirect.document if redirect.quoted else document(redirect.document or "", scope)
        elif redirect.operator == "<<<":
            given = text_of(redirect.target, scope) + "\n"
        elif redirect.operator == "<":
            given = m.contents(text_of(redirect.target, scope), scope)
    return given


def _scontrol(m: Follower, words: list[str], given: str | None, scope: Scope) -> str | None:
    nodes = scope.value("SLURM_JOB_NUM_NODES") or ""
    if words[1:3] not in (["show", "hostnames"], ["show", "hostname"]) or not re.fullmatch(r"\d{1,4}", nodes):
        return None
    return "".join(f"node{i}\n" for i in range(int(nodes)))


def _cat(m: Follower, words: list[str], given: str | None, scope: Scope) -> str | None:
    if len(words) == 1:
        return _filtered(m, words, given, scope)
    texts = [m.contents(word, scope) for word in words[1:]]
    return None if None in texts else "".join(text or "" for text in texts)


def _sed(m: Follower, words: list[str], given: str | None, scope: Scope) -> str | None:
    if len(words) > 2 and words[-2] != "-e":
        words, given = words[:-1], m.contents(words[-1], scope)
    return _filtered(m, words, given, scope)


def _envsubst(m: Follower, words: list[str], given: str | None, scope: Scope) -> str | None:
    return given if given is None else _VARIABLE.sub(lambda v: scope.value(v[1] or v[2]) or v[0], given)


def _filtered(m: Follower, words: list[str], given: str | None, scope: Scope) -> str | None:
    """Return what a program prints that reads its words and its input alone."""
    scope.budget.spend(len(given or "") + sum(map(len, words)))
    return filters.program_output(words, given)


_PROGRAMS: dict[str, Callable[[Follower, list[str], str | None, Scope], str | None]] = {
    "scontrol": _scontrol,
    "cat": _cat,
    "sed": _sed,
    "envsubst": _envsubst,
}
"""Programs that also read files or variables: (words, input) -> output, None where it is open."""
