"""The grammar of a shell script: text -> commands, pipelines, conditions, loops and functions (POSIX.1-2024, XCU
2.10, with bash's arrays, `[[ ]]`, `(( ))` and here-strings).

Words are kept as they are written, quotes included; expansion.py says what they expand to. Nothing is run.
"""

import re

from phalanx.frameworks.shell.nodes import (
    DECLARES,
    NAME,
    Assignment,
    CaseCommand,
    Chain,
    CommandPipeline,
    For,
    Function,
    GroupCommand,
    If,
    Node,
    Redirection,
    SimpleCommand,
    Test,
    While,
)
from phalanx.frameworks.shell.source import DEEPEST, PLACEHOLDER, ScriptText

_ASSIGNMENT = re.compile(rf"({NAME})(?:\[([^\]\n]*)\])?(\+?)=")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|&>>?|[;&|()\n]")
_REDIRECT = re.compile(r"(\d*|\{\w+\})(<<<|<<-?|<>|>>|>\||>&|<&|&>>|&>|[<>])")
_CONTINUED = re.compile(r"\\[ \t]+(?=\n)")
_ARITHMETIC = re.compile(r"\(\((?P<text>.*?)\)\)", re.S)


def parse(text: str) -> tuple[Chain, tuple[str, ...]]:
    """Return a script's commands, and notes of what its author will not have meant. Raises InputError for one that a
    shell would refuse, with its line."""
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    notes: tuple[str, ...] = ()
    if spaced := _CONTINUED.search(text):
        line = text.count("\n", 0, spaced.start()) + 1
        notes = (f"line {line} ends in a backslash and a space, where a shell ends the command: it is read on",)
        text = _CONTINUED.sub(r"\\", text)
    source = ScriptText(text)
    commands = _chain(source, ())
    if source.at < len(text):
        source.fail(f"{text[source.at]!r} is where no command can begin")
    return commands, notes


def _chain(source: ScriptText, ends: tuple[str, ...], close: str = "") -> Chain:
    """Take commands up to one of the reserved words, or to the character `close`."""
    source.depth += 1
    if source.depth > DEEPEST:
        source.fail(f"is nested more than {DEEPEST} deep")
    links: list[tuple[str, CommandPipeline]] = []
    operator = ";"
    while True:
        source.blanks(lines=True)
        start = source.at
        if start >= len(source.text) or (close and source.text[start] == close) or source.ended(ends):
            break
        if source.text.startswith(";;", start):
            break
        if source.text[start] in ";&":  # an empty command, as people write it
            source.at += 1
            continue
        pipeline = _pipeline(source)
        if source.at == start:
            break
        links.append((operator, pipeline))
        source.blanks()
        match = _OPERATOR.match(source.text, source.at)
        operator = ";"
        if match and match[0] in ("&&", "||", ";", "&"):
            source.at = match.end()
            operator = match[0] if match[0] in ("&&", "||") else ";"
        elif match and match[0] == "\n":
            source.newline()
    source.depth -= 1
    return Chain(tuple(links))


def _pipeline(source: ScriptText) -> CommandPipeline:
    negated = bool(source.reserved("!"))
    source.blanks()
    parts = [_node(source)]
    while True:
        source.blanks()
        match = _OPERATOR.match(source.text, source.at)
        if not match or match[0] not in ("|", "|&"):
            return CommandPipeline(tuple(parts), negated)
        source.at = match.end()
        source.blanks(lines=True)
        parts.append(_node(source))


def _node(source: ScriptText) -> Node:
    """Take a simple or a compound command."""
    line = source.line()
    if source.text.startswith("[[", source.at) and source.text[source.at + 2 : source.at + 3] in (" ", "\t", "\n"):
        return _test(source, line)
    if source.text.startswith("((", source.at) and (match := _ARITHMETIC.match(source.text, source.at)):
        source.at = match.end()
        return Test((), match["text"], line)
    if source.text.startswith("(", source.at):
        source.at += 1
        body = _chain(source, (), close=")")
        source.close(")")
        return GroupCommand(body, True, _redirects(source))
    word = source.reserved("{", "if", "for", "select", "while", "until", "case", "function")
    if word == "{":
        body = _chain(source, ("}",))
        source.require("}")
        return GroupCommand(body, False, _redirects(source))
    if word == "if":
        return _branches(source, line)
    if word in ("for", "select"):
        return _loop(source)
    if word in ("while", "until"):
        condition = _chain(source, ("do",))
        body = _body(source)
        _redirects(source)
        return While(condition, body, word == "until", line)
    if word == "case":
        return _arms(source, line)
    named = re.compile(rf"\s*({NAME.replace('_]', '_:.-]')})\s*\(\s*\)").match(source.text, source.at)
    if word == "function":
        named = re.compile(r"\s*([\w:.-]+)\s*(?:\(\s*\))?").match(source.text, source.at)
        if named is None:
            source.fail("a function has no name")
    if named:
        source.at = named.end()
        source.blanks(lines=True)
        return Function(named[1], _node(source))
    return _command(source, line)


def _test(source: ScriptText, line: int) -> Test:
    source.at += 2
    words: list[str] = []
    while True:
        source.blanks(lines=True)
        if source.at >= len(source.text):
            source.fail("]] is missing")
        operator = re.compile(r"&&|\|\||[()<>]").match(source.text, source.at)
        if operator and not (words and words[-1] == "=~"):
            words.append(operator[0])
            source.at = operator.end()
            continue
        if words and words[-1] == "=~":  # a regular expression has brackets of its own
            end = re.compile(r"(?:\\.|\$\{[^}]*\}|\S)+").match(source.text, source.at)
            word = end[0] if end else ""
            source.at += len(word)
        else:
            word = source.word()
        if word == "]]":
            return Test(tuple(words), None, line)
        if not word:
            source.fail(f"{source.text[source.at]!r} stands in [[ ]]")
        words.append(word)


def _branches(source: ScriptText, line: int) -> If:
    branches, otherwise = [], None
    while True:
        condition = _chain(source, ("then",))
        source.require("then")
        branches.append((condition, _chain(source, ("elif", "else", "fi"))))
        word = source.require("elif", "else", "fi")
        if word == "else":
            otherwise = _chain(source, ("fi",))
            source.require("fi")
        if word != "elif":
            _redirects(source)
            return If(tuple(branches), otherwise, line)


def _body(source: ScriptText) -> Chain:
    if source.reserved("{"):
        body = _chain(source, ("}",))
        source.require("}")
        return body
    source.require("do")
    body = _chain(source, ("done",))
    source.require("done")
    return body


def _loop(source: ScriptText) -> For:
    source.blanks()
    if source.text.startswith("((", source.at) and (match := _ARITHMETIC.match(source.text, source.at)):
        source.at = match.end()
        parts = match["text"].split(";")
        if len(parts) != 3:
            source.fail("for (( )) has not three parts")
        source.blanks()
        source.at += source.text.startswith(";", source.at)
        loop = For("", (), _body(source), (parts[0], parts[1], parts[2]))
    else:
        name, words = source.word(), None
        if source.reserved("in"):
            words = _words_to_end(source)
        source.blanks()
        source.at += source.text.startswith(";", source.at)
        loop = For(name, words, _body(source))
    _redirects(source)
    return loop


def _words_to_end(source: ScriptText) -> tuple[str, ...]:
    words: list[str] = []
    while True:
        source.blanks()
        if not (word := source.word()):
            return tuple(words)
        words.append(word)


def _arms(source: ScriptText, line: int) -> CaseCommand:
    source.blanks()
    word = source.word()
    source.require("in")
    arms = []
    while not source.reserved("esac"):
        source.blanks(lines=True)
        source.at += source.text.startswith("(", source.at)
        patterns = []
        while True:
            source.blanks()
            patterns.append(source.word() or source.fail("a pattern of case is missing"))
            source.blanks()
            if not source.text.startswith("|", source.at):
                break
            source.at += 1
        source.close(")")
        body = _chain(source, ("esac",))
        arms.append((tuple(patterns), body))
        if match := re.compile(r";;&?|;&").match(source.text, source.at):
            source.at = match.end()
        elif not source.ended(("esac",)):
            source.fail(";; or esac is missing")
    _redirects(source)
    return CaseCommand(word, tuple(arms), line)


def _redirects(source: ScriptText) -> tuple[Redirection, ...]:
    redirects: list[Redirection] = []
    while True:
        source.blanks()
        if not (redirect := _redirect(source)):
            return tuple(redirects)
        redirects.append(redirect)


def _redirect(source: ScriptText) -> Redirection | None:
    """Take a redirection if one is next, with the text of its here-document."""
    match = _REDIRECT.match(source.text, source.at)
    if not match or (match[2] in "<>" and source.text.startswith("(", match.end())):
        return None
    if PLACEHOLDER.match(source.text, source.at):
        return None
    source.at = match.end()
    source.blanks()
    target = source.word()
    if not match[2].startswith("<<") or match[2] == "<<<":
        return Redirection(match[2], target)
    end = re.sub(r"[\\'\"]", "", target)
    return Redirection("<<", "", source.document(end, match[2] == "<<-"), end != target)


def _command(source: ScriptText, line: int) -> Node:
    words: list[str] = []
    assignments: list[Assignment] = []
    redirects: list[Redirection] = []
    while True:
        source.blanks()
        if redirect := _redirect(source):
            redirects.append(redirect)
        elif assignment := _assignment(source, words):
            assignments.append(assignment)
        elif word := source.word():
            words.append(word)
        else:
            break
    return SimpleCommand(tuple(words), tuple(assignments), tuple(redirects), line)


def _assignment(source: ScriptText, words: list[str]) -> Assignment | None:
    """Take an assignment in front of a command, or behind `export` and its kin."""
    if words and words[0] not in DECLARES:
        return None
    match = _ASSIGNMENT.match(source.text, source.at)
    if not match:
        return None
    source.at = match.end()
    if not source.text.startswith("(", source.at):
        return Assignment(match[1], source.word(), bool(match[3]), match[2] or "")
    source.at += 1
    values: list[str] = []
    while True:
        source.blanks(lines=True)
        if source.at >= len(source.text):
            source.fail(f"the array {match[1]} does not end", match.start())
        if source.text[source.at] == ")":
            source.at += 1
            return Assignment(match[1], tuple(values), bool(match[3]))
        values.append(source.word() or source.fail(f"{source.text[source.at]!r} stands in an array"))
