"""Linear recurrences as mixers of a block: Mamba-2 (Dao & Gu 2024) and the gated delta net (Yang et al. 2024).

    products of x, each part divided over tp by heads     z, x, b, c, dt       q, k, v, z, beta, alpha
    convolution, SiLU, recurrence                         ssd.py               delta_rule.py
    norm and gate by z                                    gate, then a norm    a norm of every head, then the gate
                                                          of each group
    last product, a term of a sum over tp

Their operators (spec/model/blocks) say names, sizes and which axis divides them. Where fewer groups than tp ranks
have B and C, neighbours hold copies; a group's norm then adds up one number a token, in both passes.

Over cp, ranks exchange tokens for heads before the convolution, and heads for tokens before the norm
(runtime/model_parallel/whole_sequences.py).

Kept for the backward pass: the projected parts (with cp, of the rank's heads after the exchange, and z), the
recurrence's result, one number for each token and norm, and what the products keep. A recurrence always computes its
inside again, so that selective recomputation changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.nn import delta_rule, ssd
from phalanx.nn.attention import Cache
from phalanx.nn.convolution import Filter, Places
from phalanx.nn.delta_rule import DeltaRule
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.gated_norm import Gate, gated_rms_norm
from phalanx.nn.norms import RMSNorm
from phalanx.nn.ssd import StateSpace
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

    def __init__(self, channels: int, taps: int, biased: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.register_parameter("bias", nn.Parameter(torch.empty(channels)) if biased else None)


class Recurrence(nn.Module):
    """What the two mixers share; subclasses define `scanned` and where the gate is."""

    o: nn.Linear
    gate: Gate

    def __init__(
        self,
        spec: ModelSpec,
        sublayer: Sublayer,
        block: int,
        tp: TensorParallel | None,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.block, self.unit, self.tp = block, f"blocks.{block}", tp
        into, last = products_of(sublayer)
        conv, scan, norm = sublayer.first(Conv), sublayer.first(Scan), _gated(sublayer)
        assert conv is not None
        assert scan is not None
        self.scan = scan
        biased = {w.name for op in (into, conv, last) for w in op.weights}
        for out in into.y:
            setattr(self, out.name, nn.Linear(spec.hidden, out.dim.size, bias=f"{out.name}.bias" in biased))
        self.projected = tuple(out.name for out in into.y)
        self.conv = nn.ModuleDict(
            {
                part: Filters(dim.size, conv.taps, f"conv.{part}.bias" in biased)
                for part, dim in zip(conv.x, conv.channels, strict=True)
            }
        )
        for w in scan.weights:
            self.register_parameter(w.name, nn.Parameter(torch.empty(w.shape[0].size)))
        self.gates = tuple(w.name for w in scan.weights)
        self.norm = RMSNorm(norm.weights[0].shape[0].size, spec.norm_eps)
        # Groups of heads that are normed together, and the ranks that have a part of one.
        self.groups = _groups(sublayer) if tp is None else _groups(tp.sublayer(block, sublayer.name))
        self.ranks = 1 if tp is None else max(1, tp.split.tp // self.groups)
        self.groups_here = self.groups if tp is None else max(1, self.groups // tp.split.tp)
        self.o = nn.Linear(last.into.size, spec.hidden, bias="o.bias" in biased)
        self.whole: WholeSequences | None = None
        self.places: Places = ()
        self.ways = 1
        """Ranks among which heads are dealt while the recurrence runs."""
        if cp is not None:
            dims = {out.name: out.dim for out in into.y if out.name != "z"}
            self.whole = WholeSequences(cp, self.unit, [dim.count for dim in dims.values()])
            self.ways = self.whole.ranks
            channels = [self.whole.place(dims[part].count, dims[part].each) for part in conv.x]
            biases = channels if any(w.role == "conv_bias" for w in conv.weights) else [None] * len(channels)
            heads = self.whole.place(scan.y.dim.count, 1)
            self.places = (*channels, *biases, *(heads for _ in self.gates))

    def scanned(self, parts: Sequence[Tensor], begins: Tensor | None) -> Tensor:
        """Return the recurrence's result, (batch, seq, channels), of the projected parts but z. `begins`: as
        `forward`."""
        raise NotImplementedError

    def run(self, parts: Sequence[Tensor], state: Tensor | None, past: int) -> tuple[Tensor, Tensor]:
        """Return the recurrence's result for the tokens after the first `past` of `parts`, and the state after them,
        as ssd.run and delta_rule.run."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, begins: Tensor | None = None, cache: Cache | None = None, needed: bool = True
    ) -> Tensor | ProductTerm:
        """Return what the mixer adds to the stream, (batch, seq, hidden): with tp this rank's term, with sequence
        parallelism the factors of it. x: (batch, seq, hidden), or this rank's rows, (rows, hidden). `needed`: whether
        the value is used (runtime/autograd/recompute.py). `begins` (batch, seq): the place of
        each token of entire sequences in its document; None: they are one. `cache`: of a step of generation."""
        parts = tensor.columns(self.tp, self.unit, x, [getattr(self, name) for name in self.projected])
        out = self._core(begins, *parts) if cache is None else self._continued(cache, parts)
        del parts
        if self.tp is not None and self.tp.rows is not None:
            return sequence.factors(out, self.o)
        return self._term(out, needed)

    def _term(self, out: Tensor, needed: bool) -> Tensor:
        return recompute.linear(self.o, out, needed) if self.tp is None else tensor.rows(out, self.o, needed)

    def _core(self, begins: Tensor | None, *parts: Tensor) -> Tensor:
        """Return the gated and normed result, (batch, seq, channels), of all projected parts."""
        z = parts[self.projected.index("z")]
        read: Sequence[Tensor] = [part for part in parts if part is not z]
        if self.whole is None:
            return self._normed(self.scanned(read, begins), z)
        return self._normed(self._over_ranks(self.whole, read, begins), z)

    def _over_ranks(self, whole: WholeSequences, read: Sequence[Tensor], begins: Tensor | None) -> Tensor:
        heads = self.scan.y.dim.count
        return whole_sequences.back(whole, self.scanned(whole_sequences.there(whole, read), begins), heads)

    def _continued(self, cache: Cache, parts: Sequence[Tensor]) -> Tensor:
        """`_core` from states and inputs of the convolution that `cache` keeps, (1, tokens, channels)."""
        z = parts[self.projected.index("z")]
        read = [part for part in parts if part is not z]
        filtered = len(self.conv)
        widths, results = [part.shape[2] for part in read[:filtered]], []
        for of in cache.continued():
            inputs, state = cache.recall(self.block, of)
            new = [part[:, of.rows].view(len(of.seats), -1, part.shape[2]) for part in read]
            seen = [torch.cat(pair, 1) for pair in zip(inputs.split(widths, 2), new, strict=False)]
            past = inputs.shape[1]
            y, state = self.run([*seen, *new[filtered:]], state, past)
            cache.keep(self.block, of, torch.cat([part[:, part.shape[1] - past :] for part in seen], 2), state)
            results.append(y.reshape(1, -1, y.shape[2]))
        return self._normed(torch.cat(results, 1), z)

    def _normed(self, y: Tensor, z: Tensor) -> Tensor:
        total = self._total if self.ranks > 1 else None
        return gated_rms_norm(y, z, self.norm.weight, self.groups_here, self.norm.eps, self.gate, self.ranks, total)

    def _total(self, numbers: Tensor, phase: Phase) -> Tensor:
        """Add up the numbers (batch, seq, 1) of the ranks that share this rank's group: all ranks reduce one number
        for every group."""
        assert self.tp is not None
        own = self.tp.split.index // self.ranks
        every = numbers.new_zeros(*numbers.shape[:-1], self.groups)
        every[..., own] = numbers[..., 0]
        self.tp.all_reduce(every, self.unit, phase).wait()
        return every[..., own : own + 1]

    def _filters(self) -> list[Tensor]:
        return [filters.weight for filters in self.conv.values()]  # type: ignore[misc]

    def _biases(self) -> list[Tensor | None]:
        return [filters.bias for filters in self.conv.values()]  # type: ignore[misc]

    def _filters_of(self, parts: Sequence[Tensor]) -> list[Filter]:
        wide = accumulate_dtype(parts[0].dtype)
        return [Filter.of(*of, wide) for of in zip(self._filters(), self._biases(), strict=True)]

    def _gates(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.gates]


def _gated(sublayer: Sublayer) -> Norm:
    """Return the norm that z gates."""
    return next(op for op in sublayer.operators if isinstance(op, Norm) and op.gate)


def _groups(sublayer: Sublayer) -> int:
    """Return the groups of heads that the norm is over."""
    norm = _gated(sublayer)
    return norm.y.dim.count // norm.spans


class Mamba(Recurrence):
    """Mamba-2."""

    gate = "before"

    @property
    def sizes(self) -> StateSpace:
        """Sizes of the recurrence on this rank."""
        heads, groups = self.scan.y.dim, self.scan.groups
        here = heads.count // self.ways, heads.each, max(1, groups.count // self.ways), groups.each
        return StateSpace(*here, self.scan.chunk)

    def scanned(self, parts: Sequence[Tensor], begins: Tensor | None) -> Tensor:
        return ssd.scan(self.sizes, parts, self._filters(), self._biases(), self._gates(), self.places, begins)

    def run(self, parts: Sequence[Tensor], state: Tensor | None, past: int) -> tuple[Tensor, Tensor]:
        (x, b, c, dt), (dt_bias, a_log, d) = parts, self._gates()
        return ssd.run(self.sizes, x, b, c, dt, self._filters_of(parts), dt_bias, a_log, d, state, past)


class GatedDeltaNet(Recurrence):
    """A gated delta net."""

    gate = "after"

    @property
    def sizes(self) -> DeltaRule:
        """Sizes of the recurrence on this rank."""
        heads, keys, ways = self.scan.y.dim, self.scan.groups, self.ways
        return DeltaRule(keys.count // ways, heads.count // ways, keys.each, heads.each, self.scan.chunk)

    def scanned(self, parts: Sequence[Tensor], begins: Tensor | None) -> Tensor:
        return delta_rule.scan(self.sizes, parts, self._filters(), self._gates(), self.places, begins)

    def run(self, parts: Sequence[Tensor], state: Tensor | None, past: int) -> tuple[Tensor, Tensor]:
        q, k, v, beta, alpha = parts
        filters, (dt_bias, a_log) = self._filters_of(parts), self._gates()
        return delta_rule.run(self.sizes, q, k, v, beta, alpha, filters, dt_bias, a_log, state, past)
