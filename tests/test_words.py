"""The words of code, messages and docs are the field's (CONTRIBUTING, words): none of the dialect below."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIALECT = {
    r"besides?": "alongside, along with, overlapped with, in addition to",
    r"so many": "the name of the number",
    r"mends?": "fix, remedy",
    r"told": "the name of the callback",
    r"held against": "compared with",
    r"stands? for": "represents, means",
    r"contentless|imagined": "fake",
    r"(?:no|some|any)body": "the rank, the caller, the user",
    r"those of": "the noun again, or a possessive",
    r"as (?:it is|they are)(?= *[.,;:)\"]|$)": "unchanged",
}
"""Pattern of what is not written -> what is."""
PAST = {"begun", "found", "lent", "made", "told"}
"""Names that are verbs in the past: nowhere."""
NAMES = PAST | {"beside", "besides", "contentless", "imagined", "mend", "mends"}
"""What nothing is called: a name is a noun."""
PRONOUNS = {
    "all", "any", "apart", "asked", "beside", "each", "every", "few", "given", "gone", "held", "here", "it", "its",
    "kept", "known", "least", "left", "less", "more", "most", "of", "one", "ones", "other", "others", "own", "part",
    "said", "seen", "some", "that", "theirs", "them", "there", "these", "this", "those", "wanted", "what", "where",
    "which", "who", "why",
}  # fmt: skip
PREPOSITIONS = {"at", "by", "in", "of", "on", "with"}
"""What no function, class or constant of a module is called, and what no constant begins with: each has a noun."""

FOLLOWING = (
    # Rooms that are being rewritten: take each out of this list as its last such word goes.
    "docs",
)


def _follows(path: Path) -> bool:
    return any(path.relative_to(ROOT).is_relative_to(room) for room in FOLLOWING)


def _names(source: str) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of what a file names: variables, fields, parameters, functions, classes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def _prose(source: str) -> Iterator[tuple[str, int]]:
    """Yield (text, line) of a file's comments and strings: docstrings, messages, help texts; none of a file that has
    no such word anywhere, which takes no tokens to see."""
    if not _ANY.search(source):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.string, token.start[0]


_USES = {
    re.compile(rf"\b(?:{pattern})(?!\w)".replace(" ", r"(?:\s+#?\s*)"), re.IGNORECASE): instead
    for pattern, instead in DIALECT.items()
}
_ANY = re.compile("|".join(use.pattern for use in _USES), re.IGNORECASE)


def _dialect(texts: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yield `line: words; instead` for each use of the dialect. Words in backticks are names, and not prose."""
    for text, line in texts:
        plain = re.sub(r"`[^`\n]*`", "``", text)
        for use, instead in _USES.items() if _ANY.search(plain) else ():
            for match in use.finditer(plain):
                yield f"{line + plain.count(chr(10), 0, match.start())}: {match[0]}; write {instead}"


def _wrong_names(source: str, words: set[str]) -> Iterator[str]:
    if words.isdisjoint(name.strip("_") for name in re.findall(r"\w+", source)):
        return  # nothing to parse
    for name, line in _names(source):
        if name.strip("_") in words:
            yield f"{line}: {name}; a name is a noun"


def test_the_words_are_the_fields() -> None:
    wrong = []
    for folder in ("src", "calibration", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file, source = str(path.relative_to(ROOT)), path.read_text()
            words = PAST if _follows(path) else NAMES
            wrong += [f"{file}:{use}" for use in _wrong_names(source, words)]
            if folder == "src" and not _follows(path):
                wrong += [f"{file}:{use}" for use in _dialect(_prose(source))]
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if not _follows(path):
            wrong += [f"{path.relative_to(ROOT)}:{use}" for use in _dialect([(path.read_text(), 1)])]
    assert not wrong, "\n".join(wrong)


def _pronouns(source: str) -> Iterator[str]:
    """Yield `line: name` of what a module defines without a noun."""
    for match in _DEFINED.finditer(source):
        for name in re.findall(r"\w+", match[1] or match[2]):
            words = name.strip("_").lower().split("_")
            if (PRONOUNS.issuperset(words) and name != "__all__") or (match[2] and words[0] in PREPOSITIONS):
                yield f"{source.count(chr(10), 0, match.start()) + 1}: {name}"


_DEFINED = re.compile(r"^(?:def|class) (\w+)|^(\w+(?:, \w+)*)(?:: [^=\n]+)? = ", re.MULTILINE)
"""A module's functions and classes; its variables."""


def test_what_a_module_defines_is_named_by_a_noun() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    wrong = [f"{file.relative_to(ROOT)}:{name}" for file in files for name in _pronouns(file.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source", ["_MOST = 1", "_OF_PODS: int = 1", "A, _EACH = 1, 2", "def _said(): ...", "class Held: ..."]
)
def test_a_definition_without_a_noun_is_seen(source: str) -> None:
    assert len(list(_pronouns(source))) == 1


def test_a_room_leaves_the_list_when_it_passes() -> None:
    passing = []
    for room in FOLLOWING:
        path = ROOT / room
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.md")]
        uses = (
            use
            for text, python in ((f.read_text(), f.suffix == ".py") for f in files)
            for use in chain(
                _dialect(_prose(text) if python else [(text, 1)]), _wrong_names(text, NAMES) if python else ()
            )
        )
        if next(uses, None) is None:
            passing.append(room)
    assert not passing, f"take out of FOLLOWING: {', '.join(passing)}"


@pytest.mark.parametrize(
    "text",
    [
        '"""A table beside another."""',
        "x = 1  # over so many ranks",
        '"""Bytes are held\n    against the prediction."""',
        'y = f"{1} stand for it"',
        '"""What nobody\n    reads."""',
        '"""The bytes, and those of experts."""',
        '"""Kept as it is."""',
    ],
)
def test_such_a_word_is_seen(text: str) -> None:
    assert len(list(_dialect(_prose(text)))) == 1


def test_such_a_name_is_seen() -> None:
    source = "def told(found): begun = lent"
    assert [use.split(": ")[1] for use in _wrong_names(source, NAMES)] == [
        "told; a name is a noun",
        "found; a name is a noun",
        "begun; a name is a noun",
    ]
    assert not list(_wrong_names("beside: int = 0", PAST))


def test_what_is_right_is_not_seen() -> None:
    assert not list(_dialect(_prose('"""Read as it is written; `beside` is a name; besideline; no body."""')))
