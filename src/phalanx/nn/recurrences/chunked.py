"""A linear recurrence over tokens in chunks, one after another, with the causal convolution of what it reads: what
Mamba-2 (ssd.py), the gated delta rule (delta_rule.py), that of channels (channel_delta.py) and lightning attention
(lightning.py, which has no convolution) share.

    forward     each chunk from the state before it
    backward    the states before all chunks once more, then the chunks in reverse

Kept for the backward pass: the projected parts and the parameters. A pass holds its results and the work of one
chunk, backward also a state for each chunk. A chunk's work lives until its function returns, so that live bytes are
few numbers (cost/memory/recurrence.py).

Inside a chunk, tensors are token first. Of n tokens, with G = batch x groups and r heads for each group:

    x, y    (n, G, r, p)     heads as the batch of a product   (G r, n, p)
    b, c    (G, n, width)    state                             (G, width, r p)
    a number for each head   (G r, n), or to multiply x (n, G, r, 1)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.nn import documents
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.recurrences.convolution import Filter, FilterGradient, Places, all_rows, own_rows
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.autograd.deferred_weight_grads import Owners

Convolved = tuple[Tensor, Tensor]
"""(The tokens that a chunk's convolution reads, its results before SiLU), both (tokens, batch, channels)."""


@dataclass(frozen=True)
class ChunkDecays:
    """The decays of a chunk: base of each recurrence's record of a chunk, which gives their shapes."""

    left: Tensor
    """From each token to the chunk's end."""
    since: Tensor
    """From the chunk's start to each token."""
    over: Tensor
    """Over the entire chunk."""


class ChunkedScan(ABC):
    """A recurrence over given tokens: `heads` heads of width `each`, in `groups` groups that share keys of width
    `state`.

    `parts`: the three that are convolved, (batch, seq, channels). `past`: the first tokens of these, which only the
    convolution sees. `begins` (batch, seq): the place of each token in its document; None: all are of one."""

    writes: bool
    """Whether a chunk's backward pass needs the values that its tokens wrote into the state."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        filters: Sequence[Filter],
        past: int,
        groups: int,
        heads: int,
        state: int,
        each: int,
        chunk: int,
        begins: Tensor | None,
    ) -> None:
        self.begins = begins
        self.parts, self.filters, self.past, self.wide = parts, filters, past, accumulate_dtype(parts[0].dtype)
        self.batch, self.seq, self.heads = len(parts[0]), parts[0].shape[1] - past, heads
        self.G, self.r, self.n, self.p = self.batch * groups, heads // groups, state, each
        self.bounds = [(low, min(low + chunk, self.seq)) for low in range(0, self.seq, chunk)]

    # Chunks.

    @abstractmethod
    def step(self, low: int, high: int, state: Tensor, y: Tensor) -> Tensor:
        """Write the results of tokens low..high into `y`, (batch, tokens, channels); return the state after them."""

    @abstractmethod
    def written(self, low: int, high: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the values that tokens low..high write into the state, any tensor unless `writes`; the state after
        them)."""

    @abstractmethod
    def back(self, low: int, high: int, state: Tensor, written: Tensor, g: Tensor, d_state: Tensor) -> Tensor:
        """Return the gradient of the state before tokens low..high. `g`: of their results, (batch, tokens,
        channels); `d_state`: of the state after them. All other gradients are added up."""

    @abstractmethod
    def finished(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the parts that are not convolved, and of the gates."""

    # Passes.

    def first_state(self) -> Tensor:
        """Return a state of zeros, (G, width, r p)."""
        return self.parts[0].new_zeros(self.G, self.n, self.r * self.p, dtype=self.wide)

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (y, (batch, seq, channels), the state after the last token, (batch, groups, width, r p))."""
        y = self.parts[0].new_empty(self.batch, self.seq, self.heads * self.p)
        state = self.first_state() if state is None else state.flatten(0, 1)
        for low, high in self.bounds:
            state = self.step(low, high, state, y[:, low:high])
        return y, state.unflatten(0, (self.batch, -1))

    def gradients(self, g: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of all parts, and of the parameters: filters, their biases, gates."""
        before, written = [self.first_state()], []
        for low, high in self.bounds if self.writes else self.bounds[:-1]:
            wrote, state = self.written(low, high, before[-1])
            written.append(wrote)
            before.append(state)
        self.d_parts = [torch.zeros_like(part) for part in self.parts]
        self.d_filters = [FilterGradient.zero(f) for f in self.filters]
        d_state = torch.zeros_like(before[0])
        for i, (low, high) in reversed(list(enumerate(self.bounds))):
            wrote = written[i] if self.writes else before[i]
            d_state = self.back(low, high, before[i], wrote, g[:, low:high], d_state)
        more, gates = self.finished()
        dtype = self.parts[0].dtype
        filters = [of.as_given(dtype) for of in self.d_filters]
        weights, biases = ([of[i] for of in filters] for i in range(2))
        return [*self.d_parts, *more], [*weights, *biases, *(gate.to(dtype) for gate in gates)]

    # Layouts: the first four methods copy, the others return views.

    def per_head(self, numbers: Tensor) -> Tensor:
        """Turn (batch, seq, heads) into (G r, seq)."""
        turned = numbers.new_empty(self.batch, self.heads, numbers.shape[1], dtype=self.wide)
        return turned.copy_(numbers.transpose(1, 2)).flatten(0, 1)

    def per_token(self, numbers: Tensor) -> Tensor:
        """Undo `per_head`, in the parts' type."""
        turned = self.parts[0].new_empty(self.batch, numbers.shape[1], self.heads)
        return turned.copy_(numbers.unflatten(0, (self.batch, -1)).transpose(1, 2))

    def token_first(self, y: Tensor) -> Tensor:
        """Turn (batch, n, channels) into (n, batch, channels)."""
        turned = y.new_empty(y.shape[1], self.batch, y.shape[2], dtype=self.wide)
        return turned.copy_(y.transpose(0, 1))

    def chunk_of(self, y: Tensor) -> Tensor:
        """Turn (batch, n, channels) into (n, G, r, p)."""
        return self.token_first(y).view(-1, self.G, self.r, self.p)

    def token_numbers(self, numbers: Tensor) -> Tensor:
        """View (G r, n) as (n, G, r, 1)."""
        return _cut(numbers.t(), 1, self.G, self.r).unsqueeze(-1)

    def by_head(self, x: Tensor) -> Tensor:
        """View (n, G, r, p), in this order in memory, as (G r, n, p)."""
        return x.flatten(1, 2).transpose(0, 1)

    def of_heads(self, x: Tensor) -> Tensor:
        """Undo `by_head`."""
        return _cut(x, 0, self.G, self.r).permute(2, 0, 1, 3)

    def grouped(self, x: Tensor) -> Tensor:
        """View (n, G, r, p), in this order in memory, as (G, n, r p)."""
        return x.flatten(2).transpose(0, 1)

    def of_groups(self, x: Tensor) -> Tensor:
        """Undo `grouped`."""
        return _cut(x, 2, self.r, self.p).transpose(0, 1)

    # Shared by the passes of all recurrences.

    def convolved(self, low: int, high: int) -> list[Convolved]:
        """Return the convolution of tokens low..high of every part; without filters the tokens themselves."""
        if not self.filters:
            return [(x, x) for x in (self.token_first(part[:, low:high]) for part in self.parts)]
        begins = self._begins_first(low, high)
        low, high = low + self.past, high + self.past
        seen = [f.seen(part, low, high) for f, part in zip(self.filters, self.parts, strict=True)]
        return [(x, f.forward(x, begins)) for f, x in zip(self.filters, seen, strict=True)]

    def begins_of(self, low: int, high: int) -> Tensor | None:
        """Return the places of tokens low..high in their documents, (batch, n)."""
        return None if self.begins is None else self.begins[:, low:high]

    def _begins_first(self, low: int, high: int) -> Tensor | None:
        return None if self.begins is None else self.begins[:, low:high].t()

    def convolved_back(self, low: int, high: int, convolved: Sequence[Convolved], d: Sequence[Tensor]) -> None:
        """Add to the gradients of parts and filters. d: the gradient of each part after SiLU, (n, ..., width)."""
        for part, gradient in enumerate(d):
            self._part_back(low, high, part, *convolved[part], gradient)

    def _part_back(self, low: int, high: int, part: int, seen: Tensor, pre: Tensor, d: Tensor) -> None:
        turned = torch.empty_like(pre)
        turned.view(d.shape).copy_(d)
        d_pre = torch.ops.aten.silu_backward(turned, pre)
        if not self.filters:
            self.d_parts[part][:, low:high].copy_(d_pre.transpose(0, 1))
            return
        of = self.filters[part]
        d_seen = of.backward(seen, d_pre, self.d_filters[part], self._begins_first(low, high))
        of.add_seen(self.d_parts[part], d_seen, low, high)

    def decays(self, log: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the decays from each token to the chunk's end and from its start to each, (G r, n), and over it,
        (G r,)."""
        left, since = (
            documents.mask_to_end((log[:, -1:] - log).exp_(), begins),
            documents.mask_from_start(log.exp(), begins),
        )
        return left, since, documents.mask_across(log[:, -1].exp(), begins)

    def within(self, log: Tensor, begins: Tensor | None) -> Tensor:
        """Return the decay between two tokens, (G r, n, n), zero above the diagonal."""
        return documents.mask_between((log.unsqueeze(-1) - log.unsqueeze(-2)).exp_().tril_(), begins)

    def shared(self, of_group: Tensor, of_head: Tensor) -> Tensor:
        """Multiply (G, n, n) with (G r, n, n), each group with all its heads."""
        return (_cut(of_head, 0, self.G, self.r) * of_group.unsqueeze(1)).flatten(0, 1)

    def summed(self, of_head: Tensor) -> Tensor:
        """Add up the heads of a group."""
        return _cut(of_head, 0, self.G, self.r).sum(1)

    def decayed(self, state: Tensor, over: Tensor) -> Tensor:
        """Return a state that decays by `over`, (G r,)."""
        return (_cut(state, 2, self.r, self.p) * over.view(self.G, 1, self.r, 1)).flatten(2)


def _cut(x: Tensor, dim: int, *sizes: int) -> Tensor:
    """View a dimension as several."""
    out: Tensor = x.unflatten(dim, sizes)
    return out


class RecurrenceSizes(ABC):
    """Sizes of one rank's part of a recurrence."""

    @property
    @abstractmethod
    def scan(self) -> Callable[..., ChunkedScan]:
        """The recurrence, which takes these sizes first."""

    def over(
        self,
        parts: Sequence[Tensor],
        filters: Sequence[Filter],
        gates: Sequence[Tensor],
        past: int = 0,
        begins: Tensor | None = None,
    ) -> ChunkedScan:
        """Return the recurrence over projected parts, of which the first are convolved, or all where there are no
        filters. `past`, `begins`: as ChunkedScan."""
        return self.scan(self, parts, filters, gates, past, begins)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rule: RecurrenceSizes,
        parts: int,
        filters: int,
        owners: Owners,
        places: Places,
        begins: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.rule, ctx.parts, ctx.filters, ctx.owners, ctx.places = rule, parts, filters, owners, places
        ctx.save_for_backward(begins, *tensors)
        return _over(rule, tensors[:parts], own_rows(tensors[parts:], places), filters, begins).run()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        begins, *tensors = ctx.saved_tensors
        parts, parameters = tensors[: ctx.parts], tensors[ctx.parts :]
        own = own_rows(parameters, ctx.places)
        d_parts, d_own = _over(ctx.rule, parts, own, ctx.filters, begins).gradients(g)
        d_parameters = deferred_weight_grads.deliver(ctx.owners, *all_rows(d_own, parameters, ctx.places))
        return None, None, None, None, None, None, *d_parts, *d_parameters


def _over(
    rule: RecurrenceSizes, parts: Sequence[Tensor], parameters: Sequence[Any], filters: int, begins: Tensor | None
) -> ChunkedScan:
    wide, biases = accumulate_dtype(parts[0].dtype), parameters[filters : 2 * filters]
    own = [Filter.of(*each, wide) for each in zip(parameters[:filters], biases, strict=True)]
    return rule.over(parts, own, parameters[2 * filters :], 0, begins)


def scan(
    rule: RecurrenceSizes,
    parts: Sequence[Tensor],
    filters: Sequence[Tensor] = (),
    biases: Sequence[Tensor | None] = (),
    gates: Sequence[Tensor] = (),
    places: Places = (),
    begins: Tensor | None = None,
) -> Tensor:
    """Return y, (batch, seq, channels), of the projected parts of whole sequences. `filters`, `biases`: of the parts
    that are convolved, in order; `places`: the rows of filters, biases and gates that the parts belong to; `begins`
    (batch, seq): the place of each token in its document. Keeps parts and parameters, nothing else."""
    parameters = (*filters, *(biases or [None] * len(filters)), *gates)
    # Through views, as in model_parallel/tensor.py, so that gradients arrive in order.
    views = [None if p is None else p.view_as(p) for p in parameters]
    owners = deferred_weight_grads.owners(*parameters)
    return _Scan.apply(rule, len(parts), len(filters), owners, places, begins, *parts, *views)  # type: ignore[no-any-return]


def softplus(numbers: Tensor, bias: Tensor) -> Tensor:
    """Return softplus(numbers + bias); numbers: (batch x heads, seq), overwritten; bias: (heads,)."""
    numbers.unflatten(0, (-1, len(bias))).add_(bias.to(numbers.dtype).unsqueeze(-1))
    return F.softplus(numbers)
