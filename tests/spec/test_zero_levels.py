"""The number of a ZeRO level means something in one file alone: everybody else asks its row what it shards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import phalanx
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS, level_columns

SOURCE = Path(phalanx.__file__).parent
ALLOWED = {"spec/strategy/zero_levels.py"}
_KINDS = ("state", "gradients", "parameters")


def _is_level(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("zero", "effective_zero", "zero_stage")


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_number, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def questions(text: str) -> Iterator[int]:
    """Yield the lines that compare a level with a number, or take an object's level for a truth value."""
    for node in ast.walk(ast.parse(text)):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_is_level, sides)) and any(map(_is_number, sides)):
                yield node.lineno
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            asked = [node.test]
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):  # `or` gives what is left open a default
            asked = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            asked = [node.operand]
        for side in asked:
            if isinstance(side, ast.Attribute) and _is_level(side):
                yield node.lineno


def test_no_other_file_compares_a_level_with_a_number() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in ALLOWED
        if "zero" in (text := path.read_text())
        for line in questions(text)
    ]
    assert not found, found


@pytest.mark.parametrize(
    "line", ["s.zero == 3", "2 <= engine.zero", "zero in (1, 2)", "a if s.zero else b", "not s.zero", "s.zero and x"]
)
def test_a_question_by_number_is_found(line: str) -> None:
    assert list(questions(line)) == [1]


@pytest.mark.parametrize(
    "line", ["s.zero in levels", "zero=s.zero", "s.level.state", "s.zero is None", "s.zero or 0"]
)
def test_what_asks_no_number_is_left_alone(line: str) -> None:
    assert not list(questions(line))


def test_columns_of_levels_hold_the_rows_of_the_table() -> None:
    """A level shards all that the level below does, which columns rely on."""
    columns = level_columns(np.arange(len(ZERO_LEVELS)))
    for kind in _KINDS:
        assert getattr(columns, kind).tolist() == [getattr(row, kind) for row in ZERO_LEVELS]
