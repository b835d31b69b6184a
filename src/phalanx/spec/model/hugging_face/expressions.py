"""The expressions of families.toml: how a field follows from the keys of a config.json.

    "num_attention_heads"                       a key
    "num_key_value_heads | num_attention_heads" the first that is not null
    "has(q_lora_rank)"                          whether the key is there, null or not
    "n_shared_experts * moe_intermediate_size"  + - * / // %, comparisons, in, and or not, int len min max sqrt
    "1 if sliding_window else 2"                one of two
    "listed(moe_topk)"                          whether it is a list or a text, with an entry for each layer
    "text(i)"                                   it as text
    "first(moe_topk)"                           the first of a list for each layer, or the value that all have
    "layer_types[i]", "rope_parameters.factor"  an entry of a list, which may depend on the layer i; of a table
    "spec.layers"                               a field of the model that was read before
    "'softmax'", "true", "none"                 constants

They are a part of Python's, parsed by its own parser and walked here: nothing else of Python can be reached.
"""

import ast
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_CONSTANTS: Mapping[str, Any] = {"true": True, "false": False, "none": None}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{"text": str, "int": int, "len": len, "min": min, "max": max, "sqrt": math.sqrt},
    "listed": lambda value: isinstance(value, list | str),
    "first": lambda value: value[0] if isinstance(value, list) else value,
}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: _number(a) * _number(b),
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: _number(a) % b,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def evaluate(text: str, keys: Mapping[str, Any], **more: Any) -> Any:
    """Return the value of an expression. `more`: names that shadow keys, such as the layer `i`."""
    return _value(_parsed(text), {**_CONSTANTS, **keys, **more}, keys)


@lru_cache(maxsize=4096)
def names(text: str) -> frozenset[str]:
    """Return the keys that an expression reads."""
    read = {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)}
    return frozenset(read - {*_CONSTANTS, *_FUNCTIONS, "has", "spec", "i"})


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _number(value: Any) -> Any:
    """Return a number. Raises TypeError for what a product would repeat: text and lists."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _value(node: ast.expr, names: Mapping[str, Any], keys: Mapping[str, Any]) -> Any:
    def of(part: ast.expr) -> Any:
        return _value(part, names, keys)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names.get(name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return value if (value := of(left)) is not None else of(right)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](of(left), of(right))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(of(part) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            return any(of(part) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not of(part)
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return -of(part)
        case ast.IfExp(test=test, body=body, orelse=other):
            return of(body) if of(test) else of(other)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARISONS[type(op)](of(left), of(right))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [of(part) for part in parts]
        case ast.Attribute(value=table, attr=name):
            return (of(table) or {}).get(name)
        case ast.Subscript(value=part, slice=place):
            return None if (entries := of(part)) is None else entries[of(place)]
        case ast.Call(func=ast.Name(id="has"), args=[ast.Name(id=name)]):
            return name in keys
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(of(part) for part in args))
    raise SyntaxError(f"{ast.unparse(node)} is not an expression of a row")
