"""What a document lacks of an OpenAPI schema, as Kubernetes publishes them."""

from __future__ import annotations

import re
from typing import Any


def violations(schema: Any, value: Any, where: str = "") -> list[str]:
    """What a value lacks of an OpenAPI schema; a field that the schema does not have counts: Kubernetes drops it."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema.get("type")
    if kind in kinds and not isinstance(value, kinds[kind]):
        return [f"{where} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} = {value}"]
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return [f"{where} = {value}"]
    if isinstance(value, list):
        return [w for i, x in enumerate(value) for w in violations(schema.get("items", {}), x, f"{where}[{i}]")]
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    known, rest = schema.get("properties"), schema.get("additionalProperties")
    wrong = [f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, inner in value.items():
        if known is not None and name in known:
            wrong += violations(known[name], inner, f"{where}.{name}")
        elif isinstance(rest, dict):
            wrong += violations(rest, inner, f"{where}.{name}")
        elif known is not None and not rest:
            wrong.append(f"{where}.{name} is unknown")
    return wrong
