"""What can be broken: every change of one operator, constant, statement, argument or return of a file."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MODULE = "mutant_switch"
"""The name of switch.py beside phalanx."""
_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
COMPARED = dict([*_PAIRS, *(pair[::-1] for pair in _PAIRS)])
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div},
    **{ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
}
EITHER_WAY = ("max", "min", "maximum", "minimum")
"""Functions whose first two arguments may change places."""


@dataclass(frozen=True, eq=False)
class Mutant:
    """One place of a file, changed. `line`: of the place, from 1."""

    file: str
    line: int
    kind: str
    node: ast.expr | ast.stmt
    changed: ast.expr | ast.stmt

    def __str__(self) -> str:
        before, after = (" ".join(ast.unparse(n).split())[:90] for n in (self.node, self.changed))
        return f"{self.file}:{self.line} {self.kind}: {before} -> {after}"


def mutants(file: str, tree: ast.Module) -> Iterator[Mutant]:
    """Yield all mutants of a parsed file."""
    for node in _changeable(tree):
        for kind, changed in _changes(node):
            yield Mutant(file, node.lineno, kind, node, changed)


def switched(source: str, numbered: Mapping[int, int]) -> str:
    """Return a file's source with mutants in it, each behind the switch of its number. `numbered`: their places among
    all mutants of the file. Raises SyntaxError where one cannot stand in its place: a value in a pattern."""
    tree = ast.parse(source)
    every = list(mutants("", tree))
    new = _Switches({number: every[place] for number, place in numbered.items()}).visit(tree)
    begin = sum(isinstance(s, ast.Expr) or getattr(s, "module", "") == "__future__" for s in new.body[:2])
    new.body.insert(begin, ast.parse(f"from {MODULE} import switch as _switch_").body[0])
    text = ast.unparse(ast.fix_missing_locations(new))
    compile(text, "mutants", "exec")
    return text


class _Switches(ast.NodeTransformer):
    def __init__(self, numbered: Mapping[int, Mutant]) -> None:
        self._numbered = numbered

    def visit(self, node: ast.AST) -> ast.AST:
        new = self.generic_visit(node)
        for number, mutant in self._numbered.items():
            if mutant.node is node:
                on = ast.parse(f"_switch_({number})", mode="eval").body
                if isinstance(node, ast.expr):
                    new = ast.IfExp(on, mutant.changed, new)
                else:
                    new = ast.If(on, [mutant.changed], [new])
        return new


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
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if ast.dump(node.args[0]) != ast.dump(node.args[1]) and name not in EITHER_WAY:
                yield "arguments", changed(lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1]))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement", ast.Pass()
        case ast.Return(value=ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return", ast.Return(ast.Constant(None))
