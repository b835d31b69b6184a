"""Multi-matrix factorisation attention (spec/model/blocks/factorised.py): queries from a normed latent that every tp
rank computes. Each makes the queries of its own heads, so gradients of the latent are terms of sums over tp."""

from torch import Tensor, nn

from phalanx.nn import functional
from phalanx.nn.attention import Angles, Attention
from phalanx.nn.norms import RMSNorm
from phalanx.runtime.autograd import recompute
from phalanx.runtime.model_parallel import tensor
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.spec import ModelSpec


class FactorisedAttention(Attention):
    """Attention with queries from a latent. Communicates over tp as Attention does."""

    q_down: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(
        self,
        spec: ModelSpec,
        sublayer: Sublayer,
        block: int,
        tp: TensorParallel | None,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(spec, sublayer, block, tp, cp)
        up = products_of(sublayer)[1]
        self.q_norm: RMSNorm = RMSNorm(up.into.size, spec.norm_eps)
        self.q_up = nn.Linear(up.into.size, up.y[0].dim.size, bias=False)

    def heads(self, x: Tensor, angles: Angles, mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
        down, k, v = tensor.columns(self.tp, self.unit, x, [self.q_down, self.k, self.v])
        q = recompute.linear(self.q_up, self.q_norm(down))
        q, k, v = (each.view(*each.shape[:2], -1, self.head_dim) for each in (q, k, v))
        if angles is not None:
            q, k = functional.rotary(q, *angles), functional.rotary(k, *angles)
        return q, k, v, mask
