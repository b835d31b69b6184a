"""What a document lacks of an OpenAPI schema, as Kubernetes publishes them, or of a JSON schema, as SkyPilot does."""

from __future__ import annotations

import re
from typing import Any


def violations(schema: Any, value: Any, where: str = "") -> list[str]:
    """What a value lacks of an OpenAPI schema; a field that the schema does not have counts: Kubernetes drops it."""
    named = schema.get("type")
    allowed = named if isinstance(named, list) else [named] if named else []
    if allowed and not any(_is(kind, value) for kind in allowed):
        return [f"{where} is no {' or '.join(allowed)}"]
    for one_of in filter(None, (schema.get("anyOf"), schema.get("oneOf"))):
        each = [violations(one, value, where) for one in one_of]
        if all(each):
            return min(each, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} = {value}"]
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return [f"{where} = {value}"]
    if isinstance(value, list):
        return [w for i, x in enumerate(value) for w in violations(schema.get("items", {}), x, f"{where}[{i}]")]
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    known, rest = schema.get("properties"), schema.get("additionalProperties")
    patterns = schema.get("patternProperties", {})
    wrong = [f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, inner in value.items():
        if known is not None and name in known:
            wrong += violations(known[name], inner, f"{where}.{name}")
        elif named_by := [one for pattern, one in patterns.items() if re.search(pattern, name)]:
            wrong += violations(named_by[0], inner, f"{where}.{name}")
        elif isinstance(rest, dict):
            wrong += violations(rest, inner, f"{where}.{name}")
        elif (known is not None or patterns) and not rest:
            wrong.append(f"{where}.{name} is unknown")
    return wrong


_KINDS = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def _is(kind: str, value: Any) -> bool:
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return kind == "boolean"
    return kind not in _KINDS or isinstance(value, _KINDS[kind])
