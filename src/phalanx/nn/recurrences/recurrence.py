"""Linear recurrences as mixers of a block: Mamba-2 (Dao & Gu 2024), the gated delta net (Yang et al. 2024), Kimi
delta attention (Moonshot 2025) and lightning attention (Qin et al. 2024).

    products of x, each part divided over tp by heads     z, x, b, c, dt     q, k, v, z, beta, alpha
    convolution, SiLU, recurrence                         ssd.py             delta_rule.py
    norm and gate                                         gate, then a norm  a norm of every head, then the gate
                                                          of each group
    last product, a term of a sum over tp

    Kimi          channel_delta.py; decay and z from numbers in low rank, which every tp rank computes
    lightning     lightning.py; no convolution, no gates of the recurrence; one norm over all heads

Their operators (spec/model/blocks) say names, sizes and which axis divides them. Where fewer groups than tp ranks
have B and C, neighbours hold copies; the norm of a group that spans ranks adds up one number a token, in both passes.

Over cp, ranks exchange tokens for heads before the convolution, and heads for tokens before the norm
(runtime/model_parallel/whole_sequences.py).

Kept for the backward pass: the projected parts (with cp, of the rank's heads after the exchange, and z), the
recurrence's result, one number for each token and norm, and what the products keep. A recurrence always computes its
inside again, so that selective recomputation changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from phalanx.nn.attention import Cache, SlotGroup
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.gated_norm import Gate, gated_rms_norm
from phalanx.nn.norms import RMSNorm
from phalanx.nn.recurrences import chunked
from phalanx.nn.recurrences.channel_delta import ChannelDelta
from phalanx.nn.recurrences.chunked import RecurrenceSizes
from phalanx.nn.recurrences.convolution import Filter, Places
from phalanx.nn.recurrences.delta_rule import DeltaRule
from phalanx.nn.recurrences.lightning import Lightning
from phalanx.nn.recurrences.ssd import StateSpace
from phalanx.runtime.autograd import recompute
from phalanx.runtime.model_parallel import sequence, tensor, whole_sequences
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.sequence import ProductTerm
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.whole_sequences import WholeSequences
from phalanx.schedule.event import Phase
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.operators import Conv, Norm, Scan
from phalanx.spec.model.spec import ModelSpec


class Filters(nn.Module):
    """The weights (channels, taps), and biases, of one part's convolution."""

    bias: nn.Parameter | None

    def __init__(self, channels: int, taps: int, biased: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.register_parameter("bias", nn.Parameter(torch.empty(channels)) if biased else None)

    def of(self, wide: torch.dtype) -> Filter:
        """Return the filter in `wide`, the type in which the convolution is computed."""
        return Filter.of(self.weight, self.bias, wide)


class PastMixer(nn.Module):
    """A mixer that reads earlier tokens through a convolution, a recurrence or both; subclasses define `mixed` and
    `generated`."""

    o: nn.Linear

    def __init__(self, spec: ModelSpec, sublayer: Sublayer, block: int, tp: TensorParallel | None) -> None:
        super().__init__()
        self.block, self.unit, self.tp = block, f"blocks.{block}", tp
        into, *ups, last = products_of(sublayer)
        conv = sublayer.first(Conv)
        biased = {w.name for op in (into, conv, last) if op is not None for w in op.weights}
        for out in into.y:
            setattr(self, out.name, nn.Linear(spec.hidden, out.dim.size, bias=f"{out.name}.bias" in biased))
        self.projected = tuple(out.name for out in into.y)
        self.ups = [(up.weights[0].name.rpartition(".")[0], up.x, up.y[0].name) for up in ups]
        """Products of one projected part: the module, the part, the result."""
        for (name, _, _), up in zip(self.ups, ups, strict=True):
            setattr(self, name, nn.Linear(up.into.size, up.y[0].dim.size, bias=False))
        if conv is not None:
            sizes = {part: dim.size for part, dim in zip(conv.x, conv.channels, strict=True)}
            filters = {part: Filters(n, conv.taps, f"conv.{part}.bias" in biased) for part, n in sizes.items()}
            self.conv = nn.ModuleDict(filters)
        self.o = nn.Linear(last.into.size, spec.hidden, bias="o.bias" in biased)

    def mixed(self, parts: Mapping[str, Tensor], begins: Tensor | None) -> Tensor:
        """Return the input of the last product, (batch, seq, channels), from all projected parts."""
        raise NotImplementedError

    def generated(self, cache: Cache, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the same in a step of generation, (1, tokens, channels), from what `cache` keeps of earlier
        tokens."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, begins: Tensor | None = None, cache: Cache | None = None, needed: bool = True
    ) -> Tensor | ProductTerm:
        """Return the mixer's output, to be added to the stream, (batch, seq, hidden): with tp this rank's term of it,
        with sequence parallelism that term's factors. x: (batch, seq, hidden), or this rank's rows, (rows, hidden).
        `needed`: whether the value is used (runtime/autograd/recompute.py). `begins` (batch, seq): the place of each
        token in its document, of entire sequences if there is a recurrence; None: they are one. `cache`: of a step of
        generation."""
        layers = [getattr(self, name) for name in self.projected]
        parts = dict(zip(self.projected, tensor.columns(self.tp, self.unit, x, layers), strict=True))
        for name, part, result in self.ups:
            parts[result] = recompute.linear(getattr(self, name), parts.pop(part))
        out = self.mixed(parts, begins) if cache is None else self.generated(cache, parts)
        del parts
        if self.tp is not None and self.tp.rows is not None:
            return sequence.factors(out, self.o)
        return recompute.linear(self.o, out, needed) if self.tp is None else tensor.rows(out, self.o, needed)

    @property
    def filters(self) -> list[Filters]:
        """The filters of the parts that are convolved, in order."""
        return cast("list[Filters]", list(self.conv.values())) if hasattr(self, "conv") else []


def slot_tokens(part: Tensor, slots: SlotGroup) -> Tensor:
    """Return the tokens of a group of slots, (slots, new, channels), out of the (1, tokens, channels) of a step."""
    return part[:, slots.rows].view(len(slots.seats), -1, part.shape[2])


class Recurrence(PastMixer):
    """A mixer with a recurrence; subclasses define its sizes and where its gate is."""

    gating: Gate

    def __init__(
        self,
        spec: ModelSpec,
        sublayer: Sublayer,
        block: int,
        tp: TensorParallel | None,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(spec, sublayer, block, tp)
        conv, scan, norm = sublayer.first(Conv), sublayer.first(Scan), _last_norm(sublayer)
        assert scan is not None
        self.scan, self.opens, self.layers = scan, norm.gate or "gate", spec.layers
        for w in scan.weights:
            self.register_parameter(w.name, nn.Parameter(torch.empty(w.shape[0].size)))
        self.norm = RMSNorm(norm.weights[0].shape[0].size, spec.norm_eps)
        # Groups of heads that are normed together, and the ranks that have a part of one.
        self.groups = _groups(sublayer) if tp is None else _groups(tp.sublayer(block, sublayer.name))
        self.ranks = 1 if tp is None else max(1, tp.split.tp // self.groups)
        self.groups_here = self.groups if tp is None else max(1, self.groups // tp.split.tp)
        outs = {out.name: out.dim for product in products_of(sublayer) for out in product.y}
        low = {part for _, part, _ in self.ups}
        dims = {name: dim for name, dim in outs.items() if name not in ("y", self.opens, *low)}
        self.read = tuple(dims)
        """The parts that the recurrence reads, convolved ones first."""
        self.whole: WholeSequences | None = None
        self.places: Places = ()
        self.ways = 1
        """Ranks among which heads are dealt while the recurrence runs."""
        if cp is not None:
            self.whole = WholeSequences(cp, self.unit, [dim.count for dim in dims.values()])
            self.ways = self.whole.ranks
            channels = [self.whole.place(dims[part].count, dims[part].each) for part in (conv.x if conv else ())]
            biases = [place if f.bias is not None else None for place, f in zip(channels, self.filters, strict=True)]
            gates = [self.whole.place(w.shape[0].count, w.shape[0].each) for w in scan.weights]
            self.places = (*channels, *biases, *gates)

    @property
    def sizes(self) -> RecurrenceSizes:
        """Sizes of the recurrence on this rank."""
        raise NotImplementedError

    def mixed(self, parts: Mapping[str, Tensor], begins: Tensor | None) -> Tensor:
        read: Sequence[Tensor] = [parts[name] for name in self.read]
        if self.whole is None:
            return self._normed(self._scanned(read, begins), parts[self.opens])
        return self._normed(self._over_ranks(self.whole, read, begins), parts[self.opens])

    def _over_ranks(self, whole: WholeSequences, read: Sequence[Tensor], begins: Tensor | None) -> Tensor:
        heads = self.scan.y.dim.count
        return whole_sequences.to_own_tokens(
            whole, self._scanned(whole_sequences.to_whole_sequences(whole, read), begins), heads
        )

    def _scanned(self, read: Sequence[Tensor], begins: Tensor | None) -> Tensor:
        filters = [f.weight for f in self.filters], [f.bias for f in self.filters]
        return chunked.scan(self.sizes, read, *filters, self._gates, self.places, begins)

    def generated(self, cache: Cache, parts: Mapping[str, Tensor]) -> Tensor:
        read = [parts[name] for name in self.read]
        filters = [f.of(accumulate_dtype(read[0].dtype)) for f in self.filters]
        widths, results = [part.shape[2] for part in read[: len(filters)]], []
        for slots in cache.continuations():
            inputs, state = cache.recall(self.block, slots)
            new, past = [slot_tokens(part, slots) for part in read], inputs.shape[1]
            seen = [torch.cat(pair, 1) for pair in zip(inputs.split(widths, 2), new, strict=False)]
            y, state = self.sizes.over([*seen, *new[len(seen) :]], filters, self._gates, past).run(state)
            if seen:
                inputs = torch.cat([part[:, part.shape[1] - past :] for part in seen], 2)
            cache.keep(self.block, slots, inputs, state)
            results.append(y.reshape(1, -1, y.shape[2]))
        return self._normed(torch.cat(results, 1), parts[self.opens])

    def _normed(self, y: Tensor, z: Tensor) -> Tensor:
        total = self._total if self.ranks > 1 else None
        return gated_rms_norm(y, z, self.norm.weight, self.groups_here, self.norm.eps, self.gating, self.ranks, total)

    def _total(self, numbers: Tensor, phase: Phase) -> Tensor:
        """Add up the numbers (batch, seq, 1) of the ranks that share this rank's group: all ranks reduce one number
        for every group."""
        assert self.tp is not None
        own = self.tp.split.index // self.ranks
        every = numbers.new_zeros(*numbers.shape[:-1], self.groups)
        every[..., own] = numbers[..., 0]
        self.tp.all_reduce(every, self.unit, phase).wait()
        return every[..., own : own + 1]

    @property
    def _gates(self) -> list[Tensor]:
        return [getattr(self, w.name) for w in self.scan.weights]


def _last_norm(sublayer: Sublayer) -> Norm:
    """Return the norm of the recurrence's result."""
    return next(op for op in sublayer.operators if isinstance(op, Norm) and op.y.name == "o")


def _groups(sublayer: Sublayer) -> int:
    """Return the number of groups of heads that are normed separately."""
    norm = _last_norm(sublayer)
    return norm.y.dim.count // norm.spans


class Mamba(Recurrence):
    """Mamba-2."""

    gating = "before"

    @property
    def sizes(self) -> RecurrenceSizes:
        heads, groups = self.scan.y.dim, self.scan.groups
        here = heads.count // self.ways, heads.each, max(1, groups.count // self.ways), groups.each
        return StateSpace(*here, self.scan.chunk)


class GatedDeltaNet(Recurrence):
    """A gated delta net."""

    gating = "after"

    @property
    def sizes(self) -> RecurrenceSizes:
        heads, keys, ways = self.scan.y.dim, self.scan.groups, self.ways
        return DeltaRule(keys.count // ways, heads.count // ways, keys.each, heads.each, self.scan.chunk)


class KimiDelta(Recurrence):
    """Kimi delta attention."""

    gating = "sigmoid"

    @property
    def sizes(self) -> RecurrenceSizes:
        return ChannelDelta(self.scan.y.dim.count // self.ways, self.scan.state, self.scan.chunk)


class LightningAttention(Recurrence):
    """Lightning attention."""

    gating = "sigmoid"

    @property
    def sizes(self) -> RecurrenceSizes:
        ranks, index = (1, 0) if self.tp is None else (self.tp.split.tp, self.tp.split.index)
        heads = self.scan.y.dim.count
        first = index * heads + (0 if self.whole is None else self.whole.place(heads, 1)[0])
        scale = 1 - self.block / (self.layers - 1 + 1e-5) + 1e-5
        return Lightning(heads // self.ways, self.scan.state, self.scan.chunk, first, heads * ranks, scale)


RECURRENCES: dict[str, type[Recurrence]] = {
    "ssd": Mamba,
    "delta": GatedDeltaNet,
    "channel_delta": KimiDelta,
    "lightning": LightningAttention,
}
"""The mixer of each kind of recurrence."""
