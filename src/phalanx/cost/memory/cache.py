"""What a layer keeps of a sequence that is generated: keys and values, latents, keys of an index, the state of a
recurrence, the last inputs of a convolution. Numbers of elements, on all tensor-parallel ranks together; of a rank's
part of a model, on that rank."""

from dataclasses import dataclass

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import Attend, Conv, Expand, Index, Scan


@dataclass(frozen=True)
class LayerCache:
    """What one sublayer keeps of a sequence."""

    token: int = 0
    """Elements of a token in attention."""
    window: int | None = None
    """Most tokens of which these are kept, the last ones; None: all."""
    heads: int = 1
    """Groups that tensor parallelism deals them in; 1: every rank has all."""
    state: int = 0
    """Elements of a recurrence's state, whatever the length."""
    inputs: int = 0
    """Elements of a convolution's last inputs: one tap less than it has."""


def of_layer(s: Sublayer) -> LayerCache | None:
    """Return what a sublayer keeps; None: nothing, as it mixes no tokens."""
    state = inputs = 0
    for op in s.operators:
        match op:
            case Attend():
                return LayerCache(op.cache, op.window, op.kv.count if op.cache_splits else 1)
            case Scan():
                state = op.y.dim.size * op.state
            case Conv():
                inputs = (op.taps - 1) * sum(channels.size for channels in op.channels)
    return LayerCache(state=state, inputs=inputs) if state or inputs else None


def latents(s: Sublayer) -> tuple[int, int]:
    """Return (elements of the latent that a token's keys and values come from, of its rotary part); (0, 0) where
    these are cached themselves."""
    attend, expand, index = s.first(Attend), s.first(Expand), s.first(Index)
    if attend is None or expand is None:
        return 0, 0
    rope = attend.key - expand.nope
    return attend.cache - rope - (index.each if index is not None else 0), rope
