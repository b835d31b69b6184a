"""YAML of others as plain tables: no tag is followed, and an alias cannot make a small file large.

Aliases let a few lines represent more values than memory holds (each line ten times the line before it), or for a
table that holds itself. So the document is composed first, and the values of its nodes are counted, each as often as
it is referred to, before any value is made (yaml.org/spec/1.1, 3.2.1: node graph).
"""

from __future__ import annotations

from typing import Any

import yaml  # type: ignore[import-untyped]

LARGEST = 2**18
"""Characters of the longest document: PyYAML reads some 50 KB a second."""
_MOST = 100_000  # values of a document
_PLAIN = "tag:yaml.org,2002:"


def parse(text: str) -> Any:
    """Return a document's value. Raises ValueError or yaml.YAMLError with the reason."""
    if len(text) > LARGEST:
        raise ValueError(f"has {len(text):,} characters; at most {LARGEST:,} of YAML are read")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(loader, node, {}) > _MOST:
            raise ValueError(f"its aliases make more than {_MOST:,} values of it")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values(loader: Any, node: Any, counted: dict[int, int]) -> int:
    """Count the values that a node represents; 0 in `counted` marks one that is being counted."""
    known = counted.get(id(node))
    if known == 0:
        raise ValueError("a table in it holds itself")
    if known:
        return known
    counted[id(node)] = 0
    _require_no_tag(loader, node)
    total = 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_values(loader, k, counted) + _values(loader, v, counted) for k, v in node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_values(loader, item, counted) for item in node.value)
    counted[id(node)] = total
    return total


def _require_no_tag(loader: Any, node: Any) -> None:
    """Require that a node is of the kind that its text says. Raises ValueError."""
    if isinstance(node, yaml.ScalarNode):
        usual = {loader.resolve(yaml.ScalarNode, node.value, (True, False)), f"{_PLAIN}str"}
    else:
        usual = {f"{_PLAIN}map" if isinstance(node, yaml.MappingNode) else f"{_PLAIN}seq"}
    if node.tag not in usual:
        raise ValueError(f"the tag {node.tag} at line {node.start_mark.line + 1} is not followed")
