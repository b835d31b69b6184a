"""One decoder for every family: what differs between them is data in ModelSpec.

    tokens (batch, seq) -> embed -> blocks.0 .. blocks.L-1 -> head -> logits, or the summed loss

Module paths are the parameter names of `spec.model.parameters`; the units are the top-level modules in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from phalanx.nn import functional, vocab_parallel
from phalanx.nn.attention import Attention, Cache
from phalanx.nn.mla import LatentAttention
from phalanx.nn.mlp import MLP
from phalanx.nn.moe import MoE
from phalanx.nn.norms import make_norm
from phalanx.nn.rotary import rotary_table
from phalanx.runtime.autograd import deferred_weight_grads, recompute
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.model_parallel import tensor
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.sequence import Rows
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.spec.model.spec import ModelSpec, chunks, units
from phalanx.spec.strategy.spec import Recompute


class Block(nn.Module):
    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        tp: TensorParallel | None = None,
        cp: ContextParallel | None = None,
        ep: ExpertParallel | None = None,
        tokens: SequenceTokens | None = None,
    ) -> None:
        super().__init__()
        self.residual, self.window = spec.residual, spec.window_of(index)
        self.unit, self.tp = f"blocks.{index}", tp
        self.norm1 = make_norm(spec)
        self.attention = (Attention if spec.latent is None else LatentAttention)(spec, index, tp, cp)
        if self.residual != "parallel_one_norm":
            self.norm2 = make_norm(spec)
        self.mlp: MLP | MoE
        if spec.experts is not None and index not in spec.experts.dense_layers:
            width = spec.experts.shared_ffn
            shared = MLP(spec, width, index, tp) if width else None
            self.mlp = MoE(spec, index, tp, ep, tokens or SequenceTokens(), shared)
        else:
            self.mlp = MLP(spec, spec.ffn, index, tp)
        self.repeats: LayerComm | None = None  # what a repeated forward pass communicates through

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """x: (batch, seq, hidden). `mask` is added to the logits of attention; without one it is causal. Over cp
        ranks it says what each query sees first (runtime/context_parallel.py)."""
        if self.repeats is not None and recompute.pays(x):
            return recompute.repeated(self._region, self.repeats, x, *(angles or (None, None)), mask)
        return self._pass(x, angles, mask, cache)

    def _region(self, made: bool, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
        return self._pass(x, None if cos is None or sin is None else (cos, sin), mask, None, made)

    def _pass(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        cache: Cache | None,
        made: bool = True,
    ) -> Tensor:
        if self.tp is not None:
            return self._over_ranks(self.tp, x, angles, mask, cache, made)
        if self.residual == "serial":
            x = x + self.attention(self.norm1(x), angles, mask, cache)
            return recompute.add(x, self.mlp(self.norm2(x), made), made)
        normed = self.norm1(x)
        out = recompute.add(x, self.attention(normed, angles, mask, cache, made), made)
        other = self.mlp(normed if self.residual == "parallel_one_norm" else self.norm2(x), made)
        return recompute.add(out, other, made)

    def _over_ranks(
        self,
        tp: TensorParallel,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        cache: Cache | None,
        made: bool,
    ) -> Tensor:
        """The same where tp ranks have a term each of what attention and MLP add to the stream."""
        o = self.attention.o
        normed = self.norm1(x)
        if self.residual == "serial":
            term = self.attention(normed, angles, mask, cache)
            del normed
            x = x + tensor.summed(tp, self.unit, (term,), (o,))
            del term
            if isinstance(self.mlp, MoE):  # which puts the ranks' parts together itself
                return recompute.add(x, self.mlp(self.norm2(x), made), made)
            down = self.mlp.down
            other = tensor.summed(tp, self.unit, (self.mlp(self.norm2(x), made),), (down,), made)
            return recompute.add(x, other, made)
        term = self.attention(normed, angles, mask, cache, made)
        other = self.mlp(normed if self.residual == "parallel_one_norm" else self.norm2(x), made)
        layers = (o, self.mlp.down)
        return recompute.add(x, tensor.summed(tp, self.unit, (term, other), layers, made), made)


class Embed(nn.Module):
    def __init__(self, spec: ModelSpec, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.token = _table(spec.vocab, spec.hidden)
        if spec.position == "learned" and "embed" in units(spec):
            self.position = _table(spec.max_seq, spec.hidden)

    def forward(self, tokens: Tensor, start: int = 0, positions: Tensor | None = None) -> Tensor:
        if self.tp is None:
            x = functional.embedding(tokens, self.token.weight)  # (batch, seq, hidden)
        else:
            x = vocab_parallel.embedding(self.tp, tokens, self.token.weight)
        if hasattr(self, "position"):
            if self.tp is not None and self.tp.rows is not None:
                return x + functional.embedding(_places(self.tp.rows, tokens, positions), self.position.weight)
            if deferred_weight_grads.owners(self.position.weight):
                if positions is None:
                    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
                return x + functional.embedding(positions, self.position.weight)
            here = self.position.weight[start : start + tokens.shape[1]] if positions is None else None
            x = x + (self.position(positions) if here is None else here)
        return x


def _table(rows: int, width: int) -> nn.Embedding:
    """Not yet filled: a draw by torch on the meta device would only import its compiler, nearly two seconds."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _places(rows: Rows, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Of own tokens, (own,), the places in their sequences, or in their documents."""
    if positions is not None:
        return rows.of(positions.expand(tokens.shape).reshape(-1))
    return rows.of(torch.arange(rows.tokens, device=tokens.device)).remainder_(rows.seq)


class Head(nn.Module):
    """Final norm and projection to the vocabulary; with targets, the summed cross-entropy."""

    def __init__(self, spec: ModelSpec, tied: nn.Parameter | None, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.norm = make_norm(spec)
        self.linear = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if tied is not None:
            self.linear.weight = tied

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.tp is not None:
            (logits,) = tensor.columns(self.tp, "head", self.norm(x), (self.linear,))
            if targets is None:
                return logits
            return vocab_parallel.cross_entropy(self.tp, logits.view(-1, logits.shape[-1]), targets.reshape(-1))
        logits = recompute.linear(self.linear, self.norm(x))  # (batch, seq, vocab)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Decoder(nn.Module):
    """tokens (batch, seq) int64 -> logits (batch, seq, vocab); with targets, the loss summed over tokens.

    With `tp`, one of several ranks' part of a model: `spec` is what it holds, logits are those of its own rows of the
    vocabulary, and the loss is whole (runtime/tensor_parallel.py). With `cp`, tokens, targets and loss are those of
    this rank's part of the sequences (runtime/context_parallel.py). With `ep`, it has some of the experts
    (runtime/expert_parallel.py). Of a pipeline rank it has some units, and runs a chunk of them at a time: from the
    stream `x` that the chunk before it gave, to that which the next one gets."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        tp: TensorParallel | None = None,
        cp: ContextParallel | None = None,
        ep: ExpertParallel | None = None,
        tokens: SequenceTokens | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.tp, self.cp, self.ep = spec, tp, cp, ep
        self.chunks = chunks(spec)
        held = units(spec)
        if "embed" in held or (spec.tied and "head" in held):  # the head's own copy has the embedding's name
            self.embed = Embed(spec, tp)
        # By number, as in the whole model.
        self.blocks = nn.ModuleDict(
            {
                n: Block(spec, int(n), tp, cp, ep, tokens)
                for n in (u.split(".")[1] for u in held if u.startswith("blocks"))
            }
        )
        if "head" in held:
            self.head = Head(spec, self.embed.token.weight if spec.tied else None, tp)
        if spec.position == "rotary":
            cos, sin = rotary_table(spec)
            self.register_buffer("cos", cos.to(dtype), persistent=False)
            self.register_buffer("sin", sin.to(dtype), persistent=False)
        self._kept: tuple[int, Tensor] | None = None
        if dtype != torch.get_default_dtype():
            self.to(dtype)

    def prepare(self, seq: int) -> None:
        """Make now what a forward pass over packed sequences of `seq` tokens would make and keep: the mask of a
        window."""
        self._masks(next(self.parameters()).new_empty(1, seq), 0, None, tuple(self._blocks().values()))

    def recompute(self, of: Callable[[int], Recompute], inner: LayerComm) -> None:
        """Which part of each block's forward pass is repeated in its backward pass, in place of being kept."""
        for unit, block in self._blocks().items():
            repeat = of(int(unit.split(".")[1]))
            block.repeats = inner if repeat == "full" else None
            block.attention.repeats = inner if repeat == "selective" else None

    def _blocks(self) -> dict[str, Block]:
        return {f"blocks.{n}": block for n, block in self.blocks.items()}  # type: ignore[misc]

    def units(self) -> dict[str, nn.Module]:
        """The modules that run, by unit name, in forward order."""
        return {unit: self.get_submodule(unit) for unit in units(self.spec)}

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        x: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """`positions` (batch, seq): the place of each token in its document, from 0; attention does not leave it.
        With `cp` (ulysses, batch, seq), of all ranks that share their heads. `chunk`: of those that are held."""
        held = self.chunks[chunk]
        start = cache.length if cache is not None else 0
        if self.tp is not None:
            self.tp.begin(*tokens.shape)
        places = positions if self.cp is None else self.cp.places(positions)
        if x is None:
            x = self.embed(tokens, start, places)
        blocks = [block for unit, block in self._blocks().items() if unit in held]
        angles = None
        if self.spec.position == "rotary" and blocks:
            here = slice(start, start + tokens.shape[1]) if positions is None else places
            # (seq, 1, rotary_width / 2), or with positions (batch, seq, 1, rotary_width / 2)
            angles = (self.cos[here].unsqueeze(-2), self.sin[here].unsqueeze(-2))
        masks = self._masks(x.new_empty(()).expand(tokens.shape), start, positions, blocks)
        for block in blocks:
            x = block(x, angles, masks[block.window], cache)
        return x if held[-1] != "head" else self.head(x, targets)  # type: ignore[no-any-return]

    def _masks(
        self, x: Tensor, start: int, positions: Tensor | None, blocks: Sequence[Block]
    ) -> dict[int | None, Tensor | None]:
        """What the new tokens may see of all so far, by the window of a block; None where causality alone says it."""
        windows, total = {block.window for block in blocks}, start + x.shape[1]
        if self.cp is not None:
            everywhere = {block.window for block in self._blocks().values()} if positions is None else windows
            return self.cp.lowest(everywhere, positions)
        hiding = {w: w if w is not None and w < total else None for w in windows}
        made = {w: self._mask(x, start, w, positions) for w in set(hiding.values())}
        return {w: made[hiding[w]] for w in windows}

    def _mask(self, x: Tensor, start: int, window: int | None, positions: Tensor | None) -> Tensor | None:
        """That of whole sequences is made once and kept: every block and step uses the same."""
        new = x.shape[1]
        if positions is not None:
            return hidden_from(x, start, window, positions)
        if window is None and (start == 0 or new == 1):
            return None
        if start or window is None:
            return hidden_from(x, start, window)
        if self._kept is None or self._kept[0] != new or self._kept[1].dtype != x.dtype:
            self._kept = (new, hidden_from(x, 0, window))
        return self._kept[1]


def hidden_from(x: Tensor, start: int, window: int | None, positions: Tensor | None = None) -> Tensor:
    """(new, start + new): -inf where a new token may not look, at later tokens and those before its window; else 0.
    With `positions` (batch, new), (batch, 1, new, new): nor at those before its document.
    x: (batch, new, ...), of whose type and device the mask is."""
    total = start + x.shape[1]
    at = torch.arange(start, total, device=x.device)[:, None]
    other = torch.arange(total, device=x.device)
    hidden = other > at
    if window is not None:
        hidden |= other <= at - window
    if positions is not None:
        hidden = hidden | (other < at - positions.unsqueeze(-1)).unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(hidden, -math.inf)
