"""A thing has the name of a thing: no name in the code is a verb in the past (CONTRIBUTING, words)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = {"found", "told", "begun", "made", "lent"}


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of what a file names: variables, parameters, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def test_no_name_is_a_verb_in_the_past() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in ("src", "calibration", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line in _names(ast.parse(path.read_text()))
        if name in WORDS
    ]
    assert not wrong, "\n".join(wrong)


def test_such_a_name_is_seen() -> None:
    assert [name for name, _ in _names(ast.parse("def told(found): begun = lent")) if name in WORDS] == [
        "told",
        "found",
        "begun",
    ]
