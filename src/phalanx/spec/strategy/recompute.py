"""The grammar of `recompute`: the activations that the backward pass computes again instead of keeping them.

none              nothing
selective         attention's core (Korthikanti et al. 2022), the same as selective:core_attn
selective:a+b     these modules of every block: core_attn, mlp, moe, moe_act, layernorm, mla_up_proj,
                  shared_experts, mhc, mlp_act
full              every block, from its input
every:k           blocks 0, k, 2k, ...
block:n           the first n blocks of each chunk (Megatron's recompute_method=block)
uniform:n         every block, from the input of each n-th one (Megatron's recompute_method=uniform)
"""

import re
from dataclasses import dataclass
from typing import Any

from phalanx.spec.errors import InputError, nearest

MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts", "mhc", "mlp_act")
"""Parts of a block, named as Megatron-Core names them (`--recompute-modules`, transformer_config.py); it has no
mlp_act, the activation inside the dense MLP."""
_COUNTED = ("every", "block", "uniform")


@dataclass(frozen=True)
class Recomputation:
    """A parsed `recompute`. `kind`: none, selective, full, every, block or uniform; `count`: the number after a
    counted kind, 1 for full; `modules`: of selective."""

    kind: str
    count: int = 0
    modules: tuple[str, ...] = ()


def parse(text: str) -> Recomputation:
    """Parse the value of `recompute`. Raises InputError."""
    kind, colon, rest = text.partition(":")
    if kind in ("none", "selective", "full") and not colon:
        return Recomputation(kind, int(kind == "full"), ("core_attn",) if kind == "selective" else ())
    if kind in _COUNTED and re.fullmatch(r"[1-9]\d{0,5}", rest):
        return Recomputation(kind, int(rest))
    if kind == "selective" and rest:
        names = tuple(rest.split("+"))
        for name in names:
            if name not in MODULES:
                raise InputError("strategy.recompute", text, f"{name!r} is not a module", nearest(name, MODULES))
        if len(set(names)) < len(names):
            raise InputError("strategy.recompute", text, "names a module twice")
        return Recomputation(kind, 0, names)
    remedy = "use none, selective, selective:MODULE+MODULE, full, every:k, block:n or uniform:n"
    raise InputError("strategy.recompute", text, "is not known", remedy)


KINDS = ("none", "selective", "full", "every", "block", "uniform")
_COUNT_AT, _MODULES_AT = 3, 23


def encode(text: str) -> int:
    """Return a value of `recompute` as one integer, for columns: kind, count and modules in its bits; none is 0."""
    how = parse(text)
    modules = sum(1 << MODULES.index(name) for name in how.modules)
    return KINDS.index(how.kind) | how.count << _COUNT_AT | modules << _MODULES_AT


def decode(codes: Any) -> tuple[Any, Any, Any]:
    """Return (index into KINDS, count, bits of MODULES) of codes, numbers or columns."""
    return codes & 7, (codes >> _COUNT_AT) & ((1 << _MODULES_AT - _COUNT_AT) - 1), codes >> _MODULES_AT


def to_text(code: int) -> str:
    """Return the value of `recompute`, such as `every:2`, from its integer: the inverse of `encode`."""
    kind, count, bits = decode(code)
    modules = [name for i, name in enumerate(MODULES) if bits >> i & 1]
    if KINDS[kind] in _COUNTED:
        return f"{KINDS[kind]}:{count}"
    return KINDS[kind] if modules in ([], ["core_attn"]) else f"selective:{'+'.join(modules)}"
