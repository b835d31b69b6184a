"""A mixture of experts in place of the MLP (Shazeer et al. 2017; Dai et al. 2024, "DeepSeekMoE").

    router     logits of every token of the rank; its experts and their weights (routing.py)
    leave      rows of the rank's tokens start to travel to their experts' ranks (runtime/model_parallel/expert.py)
    shared     the MLP that all tokens go through, overlapped with that
    experts    the MLPs of the rank's experts, over the rows that arrived
    give back, combine    results return; each token's rows are summed by their weights

A rank routes its own tokens: with sequence parallelism its rows of the stream. Where all tp ranks have all tokens,
each routes an equal part, and their usual sum over tp puts the parts together. Capacity and balance are per sequence:
ranks that share a sequence exchange their choices.

With experts in a latent space (Nemotron 3) rows travel, and experts multiply, in a narrower width: a product down
before they leave, and one up after they are combined.

As in functional.py, docstrings say which tensors are kept for the backward pass.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from phalanx.nn.experts import routing
from phalanx.nn.experts.expert_mlps import ExpertMLPs
from phalanx.nn.experts.mlp import MLP
from phalanx.nn.experts.routing import Losses
from phalanx.nn.gated_norm import sigmoid_gate
from phalanx.runtime.autograd import recompute
from phalanx.runtime.model_parallel import expert, sequence, tensor
from phalanx.runtime.model_parallel.expert import ExpertParallel, Route
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens, Shape
from phalanx.schedule.layers.routing import balanced_choices, expert_capacity
from phalanx.spec.model.spec import ModelSpec

T = TypeVar("T")


class SharedExpert(MLP):
    """The MLP that every token passes; with `gated`, a sigmoid of the token scales its result."""

    def __init__(self, spec: ModelSpec, width: int, block: int, tp: TensorParallel | None, gated: bool) -> None:
        super().__init__(spec, width, block, tp)
        if gated:
            self.scale = nn.Linear(spec.hidden, 1, bias=False)

    def scaled(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y, the MLP's result for tokens x or a rank's term of it, times the scale of each token."""
        return sigmoid_gate(y, recompute.linear(self.scale, x)) if hasattr(self, "scale") else y

    def term(self, x: Tensor, needed: bool = True) -> Tensor:
        return self.scaled(super().term(x, needed or hasattr(self, "scale")), x)


class MoE(nn.Module):
    """Routed experts, along with shared ones, in place of a block's MLP."""

    balance: Tensor | None
    """(count,): the bias added to scores when experts are chosen; None without bias balancing."""
    noted: list[tuple[Tensor, Tensor | None]] | None = None
    """If set, receives (scores, balance bias) of every pass; the parity examination looks for near-ties in them."""

    def __init__(
        self,
        spec: ModelSpec,
        block: int,
        tp: TensorParallel | None,
        ep: ExpertParallel | None,
        tokens: SequenceTokens,
    ) -> None:
        super().__init__()
        assert spec.experts is not None
        x = spec.experts
        self.x, self.block, self.tp, self.ep, self.tokens = x, block, tp, ep, tokens
        self.unit = f"blocks.{block}"
        self.router = nn.Linear(spec.hidden, x.count, bias=x.router_bias)
        width = x.latent or spec.hidden
        if x.latent:
            self.narrow = nn.Linear(spec.hidden, width, bias=False)
        if x.shared_ffn:
            self.shared = SharedExpert(spec, x.shared_ffn, block, tp, x.shared_gate)
        self.experts = ExpertMLPs(x.here, width, x.ffn, spec.gated)
        if x.latent:
            self.wide = nn.Linear(width, spec.hidden, bias=False)
        balance = None if x.balance_bias is None else torch.zeros(x.count)
        self.register_buffer("balance", balance)

    def forward(self, x: Tensor, needed: bool = True) -> Tensor:
        """Return the experts' output, to be added to the stream, in the shape of x: (batch, seq, hidden), or with
        sequence parallelism this rank's rows, (own, hidden). `needed`: whether the value is used
        (runtime/autograd/recompute.py)."""
        tp = self.tp
        if tp is not None and tp.rows is not None:
            return self._own_rows(tp, x, needed)
        batch, seq, hidden = x.shape
        if tp is None:
            routed, shared = self._routed(x.view(-1, hidden), (batch, seq), self._shared(x, needed), needed)
            routed = routed.view(x.shape)
            return routed if shared is None else recompute.add(routed, shared, needed)
        # All tp ranks have all tokens: each routes a part of them, and has a part of the shared experts' width.
        x = tensor.copy_to_ranks(tp, self.unit, x)
        own = self.tokens.part(x.view(-1, hidden), tp)
        routed, term = self._routed(own, (batch, seq), self._shared(x, needed), needed)
        placed = self.tokens.placed(routed, (batch, seq), tp, needed)
        del routed
        term = placed if term is None else recompute.add(placed, term, needed)
        del placed
        layers = (self.shared.down,) if hasattr(self, "shared") else ()
        return tensor.sum_terms(tp, self.unit, (term,), layers, needed)

    def _own_rows(self, tp: TensorParallel, x: Tensor, needed: bool) -> Tensor:
        assert tp.rows is not None
        shared = (lambda: self.shared(x, needed)) if hasattr(self, "shared") else None
        routed, factors = self._routed(x, (tp.rows.batch, tp.rows.seq), shared, needed)
        if factors is None:
            return routed
        wanted = needed or hasattr(self.shared, "scale")
        shared_rows = self.shared.scaled(sequence.sum_terms(tp.rows, self.unit, (factors,), wanted), x)
        return recompute.add(routed, shared_rows, needed)

    def _shared(self, x: Tensor, needed: bool = True) -> Callable[[], Tensor] | None:
        return (lambda: self.shared.term(x, needed)) if hasattr(self, "shared") else None

    def _routed(
        self, x: Tensor, shape: Shape, shared: Callable[[], T] | None, needed: bool
    ) -> tuple[Tensor, T | None]:
        """Return (the routed experts' output for this rank's tokens, x (tokens, hidden); the result of `shared`,
        which runs while rows travel). `shape`: (batch, seq) of the part that the ranks of tp divide."""
        weights, route = self._chosen(recompute.linear(self.router, x), shape)
        sent = recompute.linear(self.narrow, x) if self.x.latent else x
        rows = expert.send_rows(self.ep, self.unit, route, sent)
        del sent
        shared_output = None if shared is None else shared()
        rows = expert.receive_rows(self.ep, self.unit, route, rows)
        rows = self.experts(rows, route.rows_per_expert)
        rows = expert.return_results(self.ep, self.unit, route, rows)
        if not self.x.latent:
            return expert.combine(route, rows, weights, needed), shared_output
        combined = expert.combine(route, rows, weights, True)
        return recompute.linear(self.wide, combined, needed), shared_output

    def _chosen(self, logits: Tensor, shape: Shape) -> tuple[Tensor, Route]:
        """Choose experts for this rank's tokens by logits (tokens, count). Returns (weights, the route of their
        rows)."""
        x, tokens, width = self.x, len(logits), self.x.top_k
        losses = Losses(z=x.z_loss, seed=self.tokens.seed)
        with torch.no_grad():
            p = routing.scores(logits, x)
            if x.chooser == "tokens":
                chosen, key = self._by_tokens(p, shape, losses)
            else:
                chosen, width = None, x.count
                key = self._by_experts(p, shape)
            slots = key.argsort(stable=True)
            counts = _counts(key, x.count + 1)[: x.count]
        if self.ep is not None and self.ep.counting and not self.ep.inner.again:
            self._count(p, chosen, counts, logits, losses)
        weights = routing.weights(logits, p, chosen, x, losses)

        def otherwise(rank: int | None) -> list[int]:
            return balanced_choices(tokens if rank is None else self.tokens.of(shape, rank), x)

        return weights, expert.route(self.ep, self.unit, slots, width, tokens, counts, otherwise, x)

    def _by_tokens(self, p: Tensor, shape: Shape, losses: Losses) -> tuple[Tensor, Tensor]:
        """Let tokens choose experts. Returns (the experts of this rank's tokens, (tokens, top_k); the same, flat,
        with `count` in place of dropped choices)."""
        x, seq = self.x, self.tokens.seq(shape)
        if self.noted is not None:
            self.noted.append((p, None if self.balance is None else self.balance.clone()))
        choices = routing.choose(p, x, self.balance)
        if self._even:
            choices = routing.even_token_choices(len(p), x, p.device)
        limit = expert_capacity(x, seq)
        if limit is None and not x.balance_loss:
            return choices, choices.flatten()
        everyone = self.tokens.gather(choices.int(), shape, self.unit).long()  # (batch, seq, top_k)
        if x.balance_loss:
            of = torch.arange(len(everyone), device=p.device).view(-1, 1, 1) * x.count
            share = _counts((everyone + of).flatten(), len(everyone) * x.count).view(-1, x.count) / (seq * x.top_k)
            losses.even = share.mul_(x.balance_loss * x.count).to(p.dtype)[self.tokens.sequence(shape, p.device)]
        if limit is None:
            return choices, choices.flatten()
        if self._even:
            kept = routing.within_capacity(choices[None], x.count, expert_capacity(x, len(p)) or 0)[0]
        else:
            kept = self.tokens.own(routing.within_capacity(everyone, x.count, limit), shape)
        return choices, choices.masked_fill(kept.logical_not_(), x.count).flatten()

    def _by_experts(self, p: Tensor, shape: Shape) -> Tensor:
        """Let experts choose tokens. Returns (tokens x count,): for each of this rank's tokens and each expert the
        expert if it takes the token, else `count`."""
        x, limit = self.x, expert_capacity(self.x, self.tokens.seq(shape)) or 0
        taken = self.tokens.own(routing.take_tokens(self.tokens.gather(p, shape, self.unit), limit), shape)
        if self._even:
            taken = routing.even_expert_choices(len(p), x, p.device)
        experts = torch.arange(x.count, device=p.device).expand(p.shape)
        return experts.masked_fill(taken.logical_not_(), x.count).flatten()

    @property
    def _even(self) -> bool:
        return self.ep is not None and self.ep.balanced

    @torch.no_grad()
    def _count(self, p: Tensor, chosen: Tensor | None, counts: Tensor, logits: Tensor, losses: Losses) -> None:
        """Add this rank's tokens to the layer's loads in the metrics."""
        assert self.ep is not None
        load = counts if chosen is None else _counts(chosen.flatten(), self.x.count)
        dropped = load.sum() - counts.sum()
        self.ep.count(self.block, load, dropped, routing.losses(logits, p, losses))


def _counts(key: Tensor, n: int) -> Tensor:
    """Count how often each of 0 .. n - 1 is in `key`: (n,)."""
    return torch.zeros(n, dtype=torch.int64, device=key.device).index_add_(0, key, torch.ones_like(key))
