"""What a layer caches of a sequence in generation: keys and values, latents, keys of an index, the state of a
recurrence, the last inputs of a convolution. In elements, on all tensor-parallel ranks together; for a rank's part of
a model, on that rank."""

from dataclasses import dataclass

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import Attend, Conv, Expand, Index, Scan


@dataclass(frozen=True)
class LayerCache:
    """The elements that one sublayer caches of a sequence."""

    token: int = 0
    """Elements per token in attention."""
    window: int | None = None
    """Number of last tokens that are cached; None: all."""
    heads: int = 1
    """Number of groups of `token` that tensor parallelism divides among ranks; 1: every rank has all elements."""
    state: int = 0
    """Elements of a recurrence's state, whatever the length."""
    inputs: int = 0
    """Elements of a convolution's last inputs: one input fewer than it has taps."""


def layer_cache(s: Sublayer) -> LayerCache | None:
    """Return the cache of a sublayer; None if it mixes no tokens and caches nothing."""
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
    """Return the elements per token of the latent from which keys and values come, and of its rotary part; (0, 0) if
    keys and values themselves are cached."""
    attend, expand, index = s.first(Attend), s.first(Expand), s.first(Index)
    if attend is None or expand is None:
        return 0, 0
    rope = attend.key - expand.nope
    return attend.cache - rope - (index.each if index is not None else 0), rope
