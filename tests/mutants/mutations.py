"""What can be broken: every change of one operator, constant, statement, argument or return of a file."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
OTHER: dict[type[ast.AST], Any] = {
    **dict([*_PAIRS, *(pair[::-1] for pair in _PAIRS)]),
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And},
}
EITHER_WAY = ("max", "min", "maximum", "minimum", "gcd")
_LEFT_ALONE = (ast.Assert, ast.JoinedStr, ast.arg, ast.Import, ast.ImportFrom, ast.Raise)


def places(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Yield (kind, node, changed copy) of all that can be broken inside functions: what a module or a class defines
    is read when it is imported, whatever a test does."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node in {id(n): n for f in functions for s in f.body for n in _inside(s)}.values():
        yield from ((kind, node, changed) for kind, changed in _changes(copy.deepcopy(node)))


def with_change(tree: ast.Module, node: ast.AST, changed: ast.AST) -> str:
    """Return the source of a tree, one of its nodes changed. Raises ValueError where it cannot stand there."""
    node.__class__, node.__dict__ = type(changed), vars(changed)
    compile(text := ast.unparse(tree), "mutant", "exec")
    return text


def _inside(node: Any) -> Iterator[Any]:
    if not isinstance(node, _LEFT_ALONE) and getattr(node, "arg", "") != "strict":  # zip's is an assertion
        yield node
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    yield from _inside(child)


def _changes(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, what a node becomes)."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                (other := copy.deepcopy(node)).ops[i] = OTHER[type(op)]()
                yield "comparison", other
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            node.op = OTHER[type(op)]()
            yield "arithmetic" if isinstance(node, ast.BinOp) else "boolean", node
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", node.operand
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
            yield "boolean", node
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1 if value in (0, 1) else 2 * value)
        case ast.Call(func=func, args=[first, second, *_]) if ast.dump(first) != ast.dump(second):
            if getattr(func, "attr", getattr(func, "id", "")) not in EITHER_WAY:  # else either way is right
                node.args[:2] = second, first
                yield "arguments", node
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement", ast.Pass()
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", ast.Return(ast.Constant(None))
