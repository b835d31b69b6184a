"""Classes of units: units of a class have equal passes, in work, memory and messages."""

from __future__ import annotations

from phalanx.spec.model.spec import ModelSpec, units
from phalanx.spec.strategy.spec import Recompute, Strategy


def unit_classes(spec: ModelSpec, s: Strategy) -> dict[str, tuple[str, ...]]:
    """Return the units of each class, in forward order: `embed`, `head`, and classes of `blocks` that differ in what
    they recompute and in whether they have experts."""
    classes: dict[str, tuple[str, ...]] = {}
    for unit in units(spec):
        name = unit_class(spec, s, unit)
        classes[name] = (*classes.get(name, ()), unit)
    return classes


def unit_class(spec: ModelSpec, s: Strategy, unit: str) -> str:
    """Return the class of a unit, which names its terms."""
    kind, _, index = unit.partition(".")
    repeat, x = repeat_of(s, unit), spec.experts
    dense = ", dense" if x is not None and kind == "blocks" and int(index) in x.dense_layers else ""
    return kind + dense if repeat == "none" else f"{kind}{dense}, {repeat}"


def repeat_of(s: Strategy, unit: str) -> Recompute:
    """Return the part of a unit's forward pass that its backward pass recomputes."""
    kind, _, index = unit.partition(".")
    return s.recompute_of(int(index)) if kind == "blocks" else "none"
