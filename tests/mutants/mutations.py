"""What can be broken: every change of one operator, constant, statement, argument or return of a file."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutant:
    """A file with one place changed. `line`: of the place, from 1; `before`, `after`: its text."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    source: str
    """The whole file as changed."""


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of a file; those that do not compile are left out."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    for node in _changeable(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        for kind, changed in _changes(node):
            text = ast.unparse(ast.fix_missing_locations(changed))
            after = f"({text})" if isinstance(changed, ast.expr) else text
            whole = (raw[:begin] + after.encode() + raw[end:]).decode()
            try:
                compile(whole, file, "exec")
            except SyntaxError:
                continue
            before = " ".join(raw[begin:end].decode().split())
            yield Mutant(file, node.lineno, kind, before, text, whole)


def _changeable(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield nodes inside functions, in order: no annotations, texts with values (whose places are not known) or
    asserts. What a module or a class defines is read when it is imported, before any line is covered by a test."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inner = {f for g in functions for f in ast.walk(g) if f is not g}
    waiting: list[ast.AST] = [s for f in functions if f not in inner for s in f.body]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom | ast.Raise):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                waiting += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield (kind, changed copy)."""

    def changed(change: Callable[[ast.AST], None]) -> ast.AST:
        twin = copy.deepcopy(node)
        change(twin)
        return twin

    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                other = COMPARED[type(op)]()
                yield "comparison", changed(lambda n, i=i, o=other: n.ops.__setitem__(i, o))
        case ast.BinOp() if type(node.op) in CALCULATED:
            yield "arithmetic", changed(lambda n: setattr(n, "op", CALCULATED[type(n.op)]()))
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", changed(lambda n: setattr(n, "op", other))
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", copy.deepcopy(node.operand)
        case ast.If() | ast.While():
            pass  # its test is a comparison, a boolean or a call
        case ast.IfExp():
            yield "boolean", changed(lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test)))
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1 if node.value in (0, 1) else 2 * node.value)
        case ast.Call() if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            if ast.dump(node.args[0]) != ast.dump(node.args[1]):
                yield "arguments", changed(lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1]))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement", ast.Pass()
        case ast.Return(value=ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return", ast.Return(ast.Constant(None))
