"""One decoder for every model family: what differs between families is data in ModelSpec.

    tokens (batch, seq) -> embed -> blocks.0 .. blocks.L-1 -> head -> logits, or the summed loss

Module paths are the parameter names of `spec.model.parameters`; the units are the top-level modules in order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.nn import functional, vocab_parallel
from phalanx.nn.attention import Angles, Attention, Cache, CausalAttention
from phalanx.nn.experts.mlp import MLP
from phalanx.nn.experts.moe import MoE
from phalanx.nn.factorised import FactorisedAttention
from phalanx.nn.mla import LatentAttention
from phalanx.nn.norms import make_norm
from phalanx.nn.recurrences.recurrence import RECURRENCES, PastMixer
from phalanx.nn.recurrences.short_conv import ShortConvolution
from phalanx.nn.rotary import rotary_table
from phalanx.runtime.autograd import deferred_weight_grads, recompute
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.autograd.windowed_attention import band_mask
from phalanx.runtime.model_parallel import tensor
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.sequence import RankRows
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.schedule.layers.head import sliced, slices_over_ranks
from phalanx.schedule.layers.windows import banded
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Conv, Rotary, Router, Scan
from phalanx.spec.model.spec import ModelSpec, chunks, units
from phalanx.spec.strategy.spec import Recompute

_SAME = nn.Identity()


@dataclass(frozen=True)
class TokenFacts:
    """Positions, masks and cache of the tokens that the mixers of a block read."""

    angles: Angles = None
    mask: Tensor | None = None
    """Added to the logits of attention, which without one is causal; with cp it is `lowest`, the first position that
    each query sees (runtime/model_parallel/context.py)."""
    places: Tensor | None = None
    """(batch, seq): the place of each token in its document, with cp for recurrences that of entire sequences; None:
    tokens of a sequence are one document."""
    cache: Cache | None = None


class DecoderBlock(nn.Module):
    """A block as the model's architecture lists it: sublayers (attention, a recurrence, an MLP, experts), each with a
    norm before it, after it or both, added to the residual stream."""

    attention: CausalAttention | PastMixer
    mlp: MLP | MoE
    norm1: nn.Module
    norm2: nn.Module

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
        block = architecture(spec).blocks[index]
        self.residual, self.unit, self.tp = block.residual, f"blocks.{index}", tp
        attend = block.first(Attend)
        self.attends, self.scans, self.filters, self.turns = (
            block.first(kind) is not None for kind in (Attend, Scan, Conv, Rotary)
        )
        self.window = None if attend is None else attend.window
        self.names = tuple(sublayer.name for sublayer in block.sublayers)
        for i, sublayer in enumerate(block.sublayers, start=1):
            if sublayer.norm is not None:
                setattr(self, f"norm{i}", make_norm(spec))
            setattr(self, sublayer.name, _sublayer(spec, sublayer, index, tp, cp, ep, tokens or SequenceTokens()))
            if sublayer.after is not None:
                setattr(self, f"norm{i}_after", make_norm(spec))
        self.repeats: LayerComm | None = None  # set where the block is recomputed: how the repeated pass communicates

    def forward(self, x: Tensor, known: TokenFacts) -> Tensor:
        """Return the stream after the block; x: (batch, seq, hidden), or with sequence parallelism (rows, hidden)."""
        if self.repeats is not None and recompute.needs_backward(x):
            angles = known.angles or (None, None)
            return recompute.recomputed(self._region, self.repeats, x, *angles, known.mask, known.places)
        return self.compute(x, known)

    def _region(self, needed: bool, x: Tensor, *known: Tensor | None) -> Tensor:
        cos, sin, mask, places = known
        angles = None if cos is None or sin is None else (cos, sin)
        return self.compute(x, TokenFacts(angles, mask, places), needed)

    def compute(self, x: Tensor, known: TokenFacts, needed: bool = True) -> Tensor:
        """Return the stream after the block; `needed`: whether it is used, or its gradients alone are."""
        if self.residual != "serial":
            return self._parallel(x, known, needed)
        last = len(self.names)
        for i, name in enumerate(self.names, start=1):
            mixer: nn.Module = getattr(self, name)
            after: nn.Module | None = getattr(self, f"norm{i}_after", None)
            wanted = needed or i < last
            term = self._term(mixer, getattr(self, f"norm{i}", _SAME)(x), known, wanted or after is not None)
            if self.tp is not None and not isinstance(mixer, MoE):  # which adds up the ranks' terms itself
                term = tensor.sum_terms(self.tp, self.unit, (term,), (_last(mixer),), wanted or after is not None)
            x = recompute.add(x, term if after is None else after(term), wanted)
            del term
        return x

    def _term(self, mixer: nn.Module, x: Tensor, known: TokenFacts, needed: bool) -> Any:
        """Return a sublayer's output for the normed stream x; with tp this rank's term of it."""
        if isinstance(mixer, CausalAttention):
            return mixer(x, known.angles, known.mask, known.cache, needed)
        if isinstance(mixer, PastMixer):
            return mixer(x, known.places, known.cache, needed)
        return mixer(x, needed)

    def _parallel(self, x: Tensor, known: TokenFacts, needed: bool) -> Tensor:
        """Run `compute` for a block whose attention and MLP both read its input; with tp they share one sum over
        ranks."""
        normed = self.norm1(x)
        term = self._term(self.attention, normed, known, needed)
        if self.tp is None:
            term = recompute.add(x, term, needed)
        other = self.mlp(normed if self.residual == "parallel_one_norm" else self.norm2(x), needed)
        if self.tp is None:
            return recompute.add(term, other, needed)
        layers = (_last(self.attention), _last(self.mlp))
        return recompute.add(x, tensor.sum_terms(self.tp, self.unit, (term, other), layers, needed), needed)


def _sublayer(
    spec: ModelSpec,
    sublayer: Sublayer,
    block: int,
    tp: TensorParallel | None,
    cp: ContextParallel | None,
    ep: ExpertParallel | None,
    tokens: SequenceTokens,
) -> nn.Module:
    """Make the module of a sublayer."""
    scan = sublayer.first(Scan)
    if scan is not None:
        return RECURRENCES[scan.kind](spec, sublayer, block, tp, cp)
    if sublayer.first(Conv) is not None:
        return ShortConvolution(spec, sublayer, block, tp, cp)
    if sublayer.first(Attend) is not None:
        into = {out.name for out in products_of(sublayer)[0].y}  # what it makes of the block's input
        kind = Attention if "q" in into and "k" in into else FactorisedAttention if "k" in into else LatentAttention
        return kind(spec, sublayer, block, tp, cp)
    if sublayer.first(Router) is None:
        return MLP(spec, products_of(sublayer)[-1].into.size, block, tp)
    return MoE(spec, block, tp, ep, tokens)


def _last(mixer: nn.Module) -> nn.Linear:
    """Return the product whose terms are summed over tp."""
    last: nn.Linear = mixer.down if isinstance(mixer, MLP) else mixer.o  # type: ignore[assignment]
    return last


class Embed(nn.Module):
    """Token embedding, plus position embedding where positions are learned."""

    def __init__(self, spec: ModelSpec, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.token = _table(spec.vocab, spec.hidden)
        if spec.position == "learned" and "embed" in units(spec):
            self.position = _table(spec.max_seq, spec.hidden)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed tokens (batch, seq) int64, which begin at position 0 or have `positions`. Returns the stream, (batch,
        seq, hidden); with sequence parallelism this rank's rows, (rows, hidden)."""
        if self.tp is None:
            x = functional.embedding(tokens, self.token.weight)  # (batch, seq, hidden)
        else:
            x = vocab_parallel.embedding(self.tp, tokens, self.token.weight)
        if hasattr(self, "position"):
            if self.tp is not None and self.tp.rows is not None:
                return x + functional.embedding(_places(self.tp.rows, tokens, positions), self.position.weight)
            if deferred_weight_grads.owners(self.position.weight):
                if positions is None:
                    positions = torch.arange(tokens.shape[1], device=tokens.device)
                return x + functional.embedding(positions, self.position.weight)
            here = self.position.weight[: tokens.shape[1]] if positions is None else None
            x = x + (self.position(positions) if here is None else here)
        return x


def _table(rows: int, width: int) -> nn.Embedding:
    """Return an uninitialized embedding: torch's initialization on the meta device imports its compiler, which takes
    nearly two seconds."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return table


def _places(rows: RankRows, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Return the positions of this rank's tokens, (rows,), in their sequences, or in their documents."""
    if positions is not None:
        return rows.of(positions.expand(tokens.shape).reshape(-1))
    return rows.of(torch.arange(rows.tokens, device=tokens.device)).remainder_(rows.seq)


class Head(nn.Module):
    """Final norm and projection to the vocabulary: logits (batch, seq, vocab); with targets, the summed
    cross-entropy."""

    masked = False
    """Whether targets may be negative: such tokens have none."""

    def __init__(self, spec: ModelSpec, tied: Tensor | None, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.norm = make_norm(spec)
        self.linear = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if tied is not None:
            self.linear.weight = tied

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of the stream, (batch, seq, vocab), with tp over this rank's part of the vocabulary;
        with targets (batch, seq), return the loss summed over tokens, ()."""
        if self.tp is not None:
            normed, weight = self.norm(x), self.linear.weight
            if targets is not None and not deferred_weight_grads.may_defer(weight):
                rows, hidden = weight.shape
                slices = int(slices_over_ranks(targets.numel(), rows, hidden, x.element_size()))
                if slices > 1:
                    own = normed.view(-1, x.shape[-1])
                    to = targets.reshape(-1)
                    return vocab_parallel.linear_cross_entropy(self.tp, own, weight, to, slices, self.masked)
            (logits,) = tensor.columns(self.tp, "head", normed, (self.linear,))
            if targets is None:
                return logits
            flat = logits.view(-1, logits.shape[-1])
            return vocab_parallel.cross_entropy(self.tp, flat, targets.reshape(-1), self.masked)
        x = self.norm(x)
        weight = self.linear.weight
        if targets is not None and not deferred_weight_grads.may_defer(weight):
            x, tokens = x.view(-1, x.shape[-1]), targets.reshape(-1)
            if sliced(len(x), len(weight), x.shape[-1], x.element_size()):
                return functional.linear_cross_entropy(x, weight, tokens, self.masked)
        logits = recompute.linear(self.linear, x)  # (batch, seq, vocab)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), self.masked)


class Decoder(nn.Module):
    """tokens (batch, seq) int64 -> logits (batch, seq, vocab); with targets, the loss summed over tokens.

    It is one rank's part of a model (runtime/model_parallel), and `spec` describes that part:

    tp          a part of every layer; logits cover its rows of the vocabulary, the loss is complete
    cp          tokens, targets and loss cover its part of the sequences
    ep          some of the experts
    pipeline    some units, run a chunk at a time, from the stream `x` of the chunk before
    """

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
        names = units(spec)
        if "embed" in names or (spec.tied and "head" in names):  # a tied head has its name too
            self.embed = Embed(spec, tp)
        # Numbered as in the full model.
        self.blocks = nn.ModuleDict(
            {
                n: DecoderBlock(spec, int(n), tp, cp, ep, tokens)
                for n in (u.split(".")[1] for u in names if u.startswith("blocks"))
            }
        )
        if "head" in names:
            self.head = Head(spec, self.embed.token.weight if spec.tied else None, tp)
        if spec.position == "rotary":
            cos, sin = rotary_table(spec)
            self.register_buffer("cos", cos.to(dtype), persistent=False)
            self.register_buffer("sin", sin.to(dtype), persistent=False)
        self._kept: dict[tuple[int, int], Tensor] = {}  # masks by (tokens, window)
        if dtype != torch.get_default_dtype():
            self.to(dtype)

    def prepare(self, seq: int) -> None:
        """Build and cache the window masks for packed sequences of `seq` tokens ahead of the first forward pass."""
        self._masks(next(self.parameters()).new_empty(1, seq), None, tuple(self._blocks().values()))

    def recompute(self, of: Callable[[int], Recompute], inner: LayerComm) -> None:
        """Set the recomputation of each block, by block number; `inner`: the communication of recomputed passes."""
        for unit, block in self._blocks().items():
            repeat = of(int(unit.split(".")[1]))
            block.repeats = inner if repeat == "full" else None
            for mixer in block.children():
                if isinstance(mixer, CausalAttention):
                    mixer.repeats = inner if repeat == "selective" else None

    def _blocks(self) -> dict[str, DecoderBlock]:
        return {f"blocks.{n}": block for n, block in self.blocks.items()}  # type: ignore[misc]

    def units(self) -> dict[str, nn.Module]:
        """Return the modules that run, by unit name, in forward order."""
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
        """Run a chunk: tokens (batch, seq) int64, or the stream `x` of the chunk before, to the stream; or from the
        head to logits, or with `targets` the loss summed over tokens.

        `positions` (batch, seq): the place of each token in its document, from 0; attention stays inside documents.
        With cp (ulysses, batch, seq), for all ranks of the Ulysses group. `chunk`: the index among local chunks.
        `cache`: the tokens, (1, tokens), belong to a step of generation; logits cover `cache.wanted`, (1, wanted,
        vocab), and the stream is returned if that is None.
        """
        names = self.chunks[chunk]
        if cache is not None:
            return self._generate(tokens, x, names, cache)
        if self.tp is not None:
            self.tp.begin(*tokens.shape)
        places = positions if self.cp is None else self.cp.places(positions)
        if x is None:
            x = self.embed(tokens, places)
        blocks = [block for unit, block in self._blocks().items() if unit in names]
        angles = None
        if any(block.turns for block in blocks):
            here = slice(tokens.shape[1]) if positions is None else places
            # (seq, 1, rotary_width / 2), or with positions (batch, seq, 1, rotary_width / 2)
            angles = (self.cos[here].unsqueeze(-2), self.sin[here].unsqueeze(-2))
        masks = self._masks(x.new_empty(()).expand(tokens.shape), positions, blocks)
        begins = whole = None if positions is None else places
        if positions is not None and self.cp is not None and any(block.scans for block in blocks):
            whole = self.cp.whole(positions)
        for block in blocks:
            mask = masks[block.window] if block.attends else None
            of_block = whole if block.scans else begins if block.filters else None
            x = block(x, TokenFacts(angles if block.turns else None, mask, of_block))
        return x if names[-1] != "head" else self.head(x, targets)

    def _generate(self, tokens: Tensor, x: Tensor | None, names: Sequence[str], cache: Cache) -> Tensor:
        """Run the units `names` over the tokens of a step of generation."""
        if self.tp is not None:
            self.tp.begin(*tokens.shape)
        if x is None:
            x = self.embed(tokens, cache.positions)
        angles = None
        if self.spec.position == "rotary":  # (1, tokens, 1, rotary_width / 2)
            angles = (self.cos[cache.positions].unsqueeze(-2), self.sin[cache.positions].unsqueeze(-2))
        for unit, block in self._blocks().items():
            if unit in names:
                x = block(x, TokenFacts(angles, cache=cache))
        if names[-1] != "head" or cache.wanted is None:
            return x
        logits: Tensor = self.head(x[:, cache.wanted])
        return logits

    def _masks(
        self, x: Tensor, positions: Tensor | None, blocks: Sequence[DecoderBlock]
    ) -> dict[int | None, Tensor | None]:
        """Return the mask by window of attention; None where plain causality is enough."""
        if self.cp is not None and positions is None:
            blocks = tuple(self._blocks().values())
        windows, total = {block.window for block in blocks if block.attends}, x.shape[1]
        if self.cp is not None:
            return self.cp.lowest(windows, positions)
        hiding = {w: w if w is not None and w < total else None for w in windows}
        masks = {w: self._mask(x, w, positions) for w in set(hiding.values())}
        return {w: masks[hiding[w]] for w in windows}

    def _mask(self, x: Tensor, window: int | None, positions: Tensor | None) -> Tensor | None:
        """Return the mask of one window. For full sequences it is built once and shared by all blocks and steps."""
        new = x.shape[1]
        if positions is not None:
            return attention_mask(x, window, positions)
        if window is None:
            return None
        key = new, window
        if key not in self._kept or self._kept[key].dtype != x.dtype:
            self._kept = {size: mask for size, mask in self._kept.items() if size[0] == new}
            self._kept[key] = band_mask(window, x) if banded(new, window) else attention_mask(x, window)
        return self._kept[key]


def attention_mask(x: Tensor, window: int | None, positions: Tensor | None = None) -> Tensor:
    """Return the mask (seq, seq): -inf where a token may not look (later tokens, those before its window), else 0.
    With `positions` (batch, seq): (batch, 1, seq, seq), which also hides tokens before its document.

    x: (batch, seq, ...), which gives the mask's type and device.
    """
    other = torch.arange(x.shape[1], device=x.device)
    at = other[:, None]
    hidden = other > at
    if window is not None:
        hidden |= other <= at - window
    if positions is not None:
        hidden = hidden | (other < at - positions.unsqueeze(-1)).unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(hidden, -math.inf)
