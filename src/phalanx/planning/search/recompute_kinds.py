"""Kinds of recomputation that a search offers under a stack: those that it supports and that differ for the model."""

from __future__ import annotations

from phalanx.frameworks.stack import Stack
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.recompute import encode, parse, written

UNDOCUMENTED = ("none", "selective", "full", "every:2", "every:4")
"""Default for an unknown stack."""
_COUNTED = ("block:1", "block:2", "block:4", "block:8")


def searched(stack: Stack | None, model: ModelSpec, flash: bool, by_operation: bool) -> tuple[str, ...]:
    """Return the kinds that a search chooses from. With `flash` attention, whose core keeps nothing, plain selective
    recomputation frees nothing, unless the stack recomputes `by_operation`."""
    if stack is None:
        return tuple(kind for kind in UNDOCUMENTED if not (flash and kind == "selective"))
    entry = stack.strategy["recompute"]
    kinds = [kind for kind in (*UNDOCUMENTED, *_COUNTED, *stack.recipes) if entry.allows(kind)]
    return tuple(written(encode(kind)) for kind in kinds if _differs(kind, stack, model, flash and not by_operation))


def _differs(kind: str, stack: Stack, model: ModelSpec, nothing_in_core: bool) -> bool:
    """Whether a kind frees memory in this model under this stack that other kinds do not."""
    if kind == "selective":
        return not nothing_in_core
    x = model.experts
    has = {
        "mlp": x is None or bool(x.dense_layers),
        "moe": x is not None,
        "moe_act": x is not None,
        "mla_up_proj": model.latent is not None,
    }
    return all(name in stack.modules and has.get(name, True) for name in parse(kind).modules)
