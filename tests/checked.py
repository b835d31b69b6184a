"""A test that passes without having checked anything is an error of the suite.

Each check counts when it has passed: an `assert`, `with pytest.raises`, a call of what CHECKERS names, and
`run(..., check=True)`, in test files and in support/. The count is one more statement after each, written where
pytest rewrites asserts: its own hook, `pytest_assertion_pass`, formats every value that was compared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.assertion import rewrite

CHECKERS = ("assert_", "check", "examine", "prove", "require_")
"""How names of functions begin that raise where something is wrong, and are called for that alone."""

rewrite.checks = 0  # type: ignore[attr-defined]  # where @pytest_ar, which each rewritten file imports, finds it
rewrite.PYC_TAIL = rewrite.PYC_TAIL.replace(".", ".counted-", 1)  # compiled files of others count nothing
_rewrite_asserts = rewrite.rewrite_asserts


def _is_check(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):
        names = [_called(item.context_expr) for item in statement.items]
        return "raises" in names or "warns" in names
    if isinstance(statement, ast.Expr):
        keywords = statement.value.keywords if isinstance(statement.value, ast.Call) else ()
        return _called(statement.value).startswith(CHECKERS) or any(k.arg == "check" for k in keywords)
    return isinstance(statement, ast.Assert)


def _called(node: ast.expr) -> str:
    """Return the last name of the function that an expression calls, "" if it calls none."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _counting(module: ast.Module, *rest: Any) -> None:
    for node in list(ast.walk(module)):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [each for one in statements for each in _counted(one)])
    _rewrite_asserts(module, *rest)


def _counted(statement: ast.stmt) -> Iterator[ast.stmt]:
    yield statement
    if _is_check(statement):
        target = ast.Attribute(ast.Name("@pytest_ar", ast.Load()), "checks", ast.Store())
        count = ast.copy_location(ast.AugAssign(target, ast.Add(), ast.Constant(1)), statement)
        yield ast.fix_missing_locations(count)


rewrite.rewrite_asserts = _counting
pytest.register_assert_rewrite("support")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    before = rewrite.checks  # type: ignore[attr-defined]
    result = yield
    if rewrite.checks == before and pyfuncitem.config.getoption("assertmode") == "rewrite":  # type: ignore[attr-defined]
        pytest.fail("it passed, and checked nothing", pytrace=False)
    return result
