"""The blocks whose live bytes the walks know. Other blocks are refused by name, never priced."""

from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.cost.memory.recurrence import WALKED
from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Block, Sublayer
from phalanx.spec.model.blocks.operators import (
    GATED,
    Activate,
    Attend,
    Conv,
    Dispatch,
    Expand,
    Index,
    Linear,
    Norm,
    Operator,
    Scan,
)

_UNDERIVED = "has live bytes that are not derived yet"


def require_derived(block: Block, p: PassSizes) -> None:
    """Raise InputError for a block whose live bytes are not known."""
    if block.streams > 1:
        raise InputError("model.streams", block.streams, _UNDERIVED)
    for s in block.sublayers:
        if s.after is not None and (s.norm is None or block.residual != "serial"):
            reason = f"alone, or with parallel residuals, {_UNDERIVED}"
            raise InputError("model.norms", "after", reason, "use before or both")
        for op in s.operators:
            if _unknown(op, s, p):
                raise InputError("model", f"{type(op).__name__} of {s.name}", _UNDERIVED)


def _unknown(op: Operator, s: Sublayer, p: PassSizes) -> bool:
    """Whether the live bytes of an operator in its sublayer are not known."""
    scan = s.first(Scan)
    if scan is not None or s.first(Conv) is not None:
        return (op == scan and scan.kind not in WALKED) or (isinstance(op, Activate) and op.kind == "silu_gate")
    match op:
        case Norm():
            return bool(op.gate) or op.kind != "rms" or (op.spans > 1 and p.tp > 1)
        case Attend():
            keys = op.key < op.core and s.first(Expand) is None
            return keys or bool(op.compressed) or op.top is not None
        case Activate():
            gate = op.kind == "sigmoid_gate" and p.repeat == "selective"
            return gate or (op.y.rows == "received" and op.kind not in GATED)
        case Linear():
            names = [y.name for y in op.y]
            return "shared.scale" in names or ("k" in names and ("v" not in names or "q_down" in names))
        case Dispatch():
            return op.width != p.hidden
        case _:
            return isinstance(op, Index)
