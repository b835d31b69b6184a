"""Effect of a strategy's `recompute` on the blocks of a rank, as numbers or columns.

`full`: the share of blocks that run again as a whole: ceil(L/k)/L with every:k; min(n, c)/c with block:n, over chunks
of c blocks. The named modules run again in every block. `group`: blocks between two inputs that are kept, n with
uniform:n.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.spec.strategy.recompute import KINDS, MODULES, decode

_SELECTIVE, _FULL, _EVERY_NTH, _BLOCK, _UNIFORM = (
    KINDS.index(name) for name in ("selective", "full", "every", "block", "uniform")
)


@dataclass(frozen=True)
class Modules:
    """Modules of every block: 1 if it is recomputed in the backward pass."""

    mlp: Column = 0.0
    moe: Column = 0.0
    moe_act: Column = 0.0
    layernorm: Column = 0.0
    mla_up_proj: Column = 0.0
    shared_experts: Column = 0.0
    mhc: Column = 0.0
    mlp_act: Column = 0.0

    @property
    def any(self) -> bool:
        """Whether any row recomputes any module."""
        return any(bool(np.any(part)) for part in vars(self).values())


NO_MODULES = Modules()


@dataclass(frozen=True)
class RecomputationColumns:
    """Recomputation of blocks, as fields of LayoutColumns."""

    full: Column
    selective: Column
    """1 if attention's core is recomputed."""
    group: Column
    modules: Modules


def recomputation_of(codes: Column, layers: Column, chunks: Column) -> RecomputationColumns:
    """Decode `recompute` (spec/strategy/recompute.py) for a model of `layers` blocks in `chunks` chunks over all
    pipeline ranks."""
    kind, count, bits = decode(codes)
    count = np.maximum(count, 1)
    chunk = np.ceil(layers / chunks)
    every = np.ceil(layers / count) / layers
    full = np.where((kind == _FULL) | (kind == _UNIFORM), 1.0, np.where(kind == _EVERY_NTH, every, 0.0))
    full = np.where(kind == _BLOCK, np.minimum(count, chunk) / chunk, full)
    core = 1.0 * ((kind == _SELECTIVE) & (bits & 1 > 0))
    modules = NO_MODULES
    if np.any(bits > 1):
        flags = {name: 1.0 * (bits >> i & 1) for i, name in enumerate(MODULES) if name != "core_attn"}
        modules = Modules(**flags)
    return RecomputationColumns(full, core, np.where(kind == _UNIFORM, count, 1.0), modules)
