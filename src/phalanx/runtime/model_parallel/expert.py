"""Expert parallelism: tokens travel to the ranks that have their experts, and the results back (Lepikhin et al. 2020,
"GShard").

    counts     all-to-all: how many rows every rank gets of each of its experts from each other
    dispatch   all-to-all of a row for every choice of a token, in parts as uneven as the choices
    combine    the same way back; a token's result is the weighted sum of its rows

Backward the gradients travel the same ways round. An expert over etp ranks is as many experts with a part of its
width each: all get the token, and their results are summed where they come back. So ep and etp are one group here,
and there is one all-to-all each way.

Rows of a rank's own tokens lie by expert, which is by destination; those that come by source, and within by expert:
they are put in order of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import recompute
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.observe import host_values
from phalanx.spec.model.mechanisms import Experts

Rows = list[tuple[int, ...]]
"""Of every rank, and there of each of its experts."""
Otherwise = Callable[[int | None], Sequence[int]]


@dataclass
class Route:
    """Where the rows of one layer's tokens go. `slots` (rows,): of the flattened (tokens, width) weights, by expert;
    `places` (tokens, width): the row of each choice, or none: `tokens` choose; `held` of the own experts, their rows.
    `order`: in which rows that come are read by expert; None: as they come."""

    tokens: int
    width: int
    slots: Tensor
    places: Tensor | None
    held: tuple[int, ...]
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    order: Tensor | None = None
    copies: int = 1
    underway: list[tuple[Tensor, Tensor, Handle]] = field(default_factory=list)
    """What leaves and what comes, while something else is computed."""

    @property
    def token(self) -> Tensor:
        """(rows,): whose rows they are."""
        return self.slots.div(self.width, rounding_mode="floor")

    def forget(self) -> None:
        """The rows' gradients are home: the nodes of the graph have this until the whole backward pass is over."""
        self.slots, self.places, self.order = self.slots.new_empty(0), None, None


class ExpertParallel:
    """A rank's place among those that share the experts of its layers. `balanced`: tokens go to experts in turn, and
    not where the router says."""

    def __init__(self, inner: LayerComm, experts: Experts, ep: int, etp: int, balanced: bool = False) -> None:
        self.inner, self.experts, self.ep, self.etp, self.balanced = inner, experts, ep, etp, balanced
        self.ranks = ep * etp
        self.axis = "ep" if etp == 1 else "ep+etp"
        self.counting = False
        """Whether passes count what is chosen."""
        self.loads: dict[int, Tensor] = {}
        """By block, what was counted since the step began, (count + 3,)."""

    def count(self, block: int, load: Tensor, dropped: Tensor, losses: Tensor) -> None:
        """Of own tokens: how many choose each expert of a block, (count,), how many choices it dropped, and its own
        losses, (2,)."""
        self.loads[block] += torch.cat([load.double(), dropped.double()[None], losses])

    def exchanged(self, unit: str, counts: Tensor, otherwise: Otherwise) -> tuple[Rows, Rows]:
        """Rows that leave for the experts of every rank, and that come from each for own ones."""
        ranks, here = self.ranks, self.experts.here
        sent = counts.view(self.ep, 1, here).expand(-1, self.etp, -1).flatten()
        got = torch.empty_like(sent)
        self.inner.all_to_all(got, sent, self.axis, unit, "F").wait()
        told = host_values.read(torch.cat([sent, got]), lambda: self._even(otherwise))
        leaving, coming = (_table(part, here) for part in (told[: ranks * here], told[ranks * here :]))
        return leaving, coming

    def _even(self, otherwise: Otherwise) -> list[int]:
        """What is exchanged where tensors hold nothing: counts that leave, and that come."""
        group = self.inner.comm.ranks(self.axis)
        place = group.index(self.inner.comm.world.rank)
        leaving = [self._of(otherwise(None), rank) for rank in range(self.ranks)]
        coming = [self._of(otherwise(rank), place) for rank in group]
        return [n for of in (*leaving, *coming) for n in of]

    def _of(self, counts: Sequence[int], rank: int) -> list[int]:
        """Of the counts of all experts those of the group's `rank`."""
        begins = rank // self.etp * self.experts.here
        return list(counts[begins : begins + self.experts.here])

    def all_to_all(self, route: Route, rows: Tensor, back: bool, unit: str, phase: Any) -> tuple[Tensor, Handle]:
        """Start sending rows, (n, hidden), to their experts' ranks, or back."""
        h = rows.shape[-1]
        sends, receives = (route.receives, route.sends) if back else (route.sends, route.receives)
        target = rows.new_empty(sum(receives), h)
        parts = [n * h for n in sends], [n * h for n in receives]
        return target, self.inner.all_to_all(target.view(-1), rows.view(-1), self.axis, unit, phase, *parts)


def route(
    ep: ExpertParallel | None,
    unit: str,
    slots: Tensor,
    width: int,
    tokens: int,
    counts: Tensor,
    otherwise: Otherwise,
    experts: Experts,
) -> Route:
    """`slots`: those of all choices, by expert, of which the first sum(counts) are rows; `counts` (count,): rows of
    each expert; `otherwise`: the same of a rank where tensors hold nothing, None: of this one."""
    chosen = experts.chooser == "tokens"
    if ep is None or ep.ranks == 1:
        held = host_values.read(counts, lambda: otherwise(None))
        rows = sum(held)
        return Route(tokens, width, slots[:rows], _places(slots, rows, tokens, width, chosen), tuple(held))
    leaving, coming = ep.exchanged(unit, counts, otherwise)
    rows = sum(map(sum, leaving[:: ep.etp]))
    return Route(
        tokens,
        width,
        slots[:rows],
        _places(slots, rows, tokens, width, chosen),
        tuple(map(sum, zip(*coming, strict=True))),
        tuple(map(sum, leaving)),
        tuple(map(sum, coming)),
        _by_expert(coming, slots.device),
        ep.etp,
    )


def _table(flat: Sequence[int], width: int) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]


def _places(slots: Tensor, rows: int, tokens: int, width: int, chosen: bool) -> Tensor | None:
    """(tokens, width): where a choice's row is; `rows`, which is none, of those that were dropped."""
    if not chosen:
        return None
    found = torch.empty_like(slots)
    found[slots] = torch.arange(len(slots), device=slots.device)
    return found.clamp_(max=rows).view(tokens, width)


def _by_expert(coming: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """(rows,): in which order rows that came by source and expert are read by expert and source."""
    ranks, here = len(coming), len(coming[0])
    if here == 1:
        return None
    sizes = [coming[r][e] for e in range(here) for r in range(ranks)]
    came = [0, *accumulate(n for of in coming for n in of)]
    begins = [came[r * here + e] for e in range(here) for r in range(ranks)]
    reads = [0, *accumulate(sizes)]
    shift = torch.tensor([a - b for a, b in zip(begins, reads, strict=False)], device=device)
    total = reads[-1]
    shifts = shift.repeat_interleave(torch.tensor(sizes, device=device), output_size=total)
    return shifts.add_(torch.arange(total, device=device))


def _arrived(route: Route) -> Tensor:
    """What was under way is here, and what has left is not needed any more."""
    _, target, handle = route.underway.pop()
    handle.wait()
    return target


class _Leave(torch.autograd.Function):
    """Tokens' rows set out; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel | None, unit: str, route: Route, x: Tensor) -> Tensor:
        ctx.ep, ctx.route = ep, route
        rows = x.index_select(0, route.token)
        if ep is None or ep.ranks == 1:
            return rows
        if route.copies > 1:
            rows = torch.cat(
                [part for part in rows.split(list(route.sends[:: route.copies])) for _ in range(route.copies)]
            )
        target, handle = ep.all_to_all(route, rows, False, unit, "F")
        route.underway.append((rows, target, handle))
        return target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None, Tensor]:
        route: Route = ctx.route
        if route.sends:
            g = _arrived(route)
        d_x = _summed(route, g, None)
        route.forget()
        return None, None, None, d_x


class _Come(torch.autograd.Function):
    """Rows are here, in order of experts; their gradients set out."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, unit: str, route: Route, rows: Tensor) -> Tensor:
        ctx.ep, ctx.unit, ctx.route = ep, unit, route
        _arrived(route)
        return rows.view_as(rows) if route.order is None else rows.index_select(0, route.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None, Tensor]:
        route: Route = ctx.route
        rows = _as_they_came(route, g)
        route.underway.append((rows, *ctx.ep.all_to_all(route, rows, True, ctx.unit, "B")))
        return None, None, None, recompute.nothing(g, g.shape)


class _Return(torch.autograd.Function):
    """Results go back to where their tokens are."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, unit: str, route: Route, y: Tensor) -> Tensor:
        ctx.ep, ctx.unit, ctx.route = ep, unit, route
        target, handle = ep.all_to_all(route, _as_they_came(route, y), True, unit, "F")
        handle.wait()
        return target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None, Tensor]:
        route: Route = ctx.route
        target, handle = ctx.ep.all_to_all(route, g.contiguous(), False, ctx.unit, "B")
        handle.wait()
        return None, None, None, target if route.order is None else target.index_select(0, route.order)


def _as_they_came(route: Route, rows: Tensor) -> Tensor:
    if route.order is None:
        return rows.contiguous()
    return torch.empty_like(rows).index_copy_(0, route.order, rows)


class _Combine(torch.autograd.Function):
    """Σ of a token's rows by their weights."""

    @staticmethod
    def forward(ctx: Any, route: Route, made: bool, y: Tensor, weights: Tensor) -> Tensor:
        ctx.route = route
        ctx.save_for_backward(y, weights)
        if not made:
            return recompute.nothing(y, (route.tokens, y.shape[-1]))
        return _summed(route, y, weights.to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor, Tensor]:
        y, weights = ctx.saved_tensors
        route: Route = ctx.route
        d_y = g.index_select(0, route.token)  # (rows, hidden)
        dots = _dots(_copies(route, y), d_y)
        d_w = torch.zeros_like(weights).view(-1)
        d_w[route.slots] = dots.to(weights.dtype)
        d_y.mul_(weights.view(-1)[route.slots].to(y.dtype).unsqueeze(-1))
        if route.copies > 1:
            parts = d_y.split(list(route.sends[:: route.copies]))
            d_y = torch.cat([part for part in parts for _ in range(route.copies)])
        return None, None, d_y, d_w.view(weights.shape)


def _dots(own: Sequence[Tensor], g: Tensor) -> Tensor:
    """(rows,): the sum of each row's products with its gradient, over what came of it from each rank."""
    each = [(part * g).sum(-1) for part in own]
    return torch.stack(each).sum(0) if len(each) > 1 else each[0]


def _copies(route: Route, y: Tensor) -> list[Tensor]:
    """What came back of each token's rows from the ranks that share an expert: as many tensors, (rows, hidden)."""
    if route.copies == 1:
        return [y]
    parts = y.split(list(route.sends))
    return [torch.cat(parts[i :: route.copies]) for i in range(route.copies)]


def _summed(route: Route, rows: Tensor, weights: Tensor | None) -> Tensor:
    """(tokens, hidden): the sum of each token's rows, by their weights, (tokens, width), if there are any."""
    own = _copies(route, rows)
    out = rows.new_zeros(route.tokens, rows.shape[-1])
    if not len(own[0]):
        return out
    for part in own:
        if route.places is None:
            here = part if weights is None else part * weights.view(-1)[route.slots].unsqueeze(-1)
            out.index_add_(0, route.token, here)
            continue
        dropped = len(part) < route.places.numel()
        for choice in range(route.width):
            at = route.places[:, choice]
            factor = None if weights is None else weights[:, choice].unsqueeze(-1)
            if dropped:
                there = (at < len(part)).to(part.dtype).unsqueeze(-1)
                factor, at = there if factor is None else there.mul_(factor), at.clamp(max=len(part) - 1)
            row = part.index_select(0, at)
            out.add_(row) if factor is None else out.addcmul_(row, factor)
    return out


def leave(ep: ExpertParallel | None, unit: str, route: Route, x: Tensor) -> Tensor:
    """Start sending the rows of own tokens, x (tokens, hidden), to their experts. What comes is there after `come`;
    in the backward pass what is called in between runs while gradients travel. Keeps nothing."""
    return _Leave.apply(ep, unit, route, x)  # type: ignore[no-any-return]


def come(ep: ExpertParallel | None, unit: str, route: Route, rows: Tensor) -> Tensor:
    """The rows of own experts, one expert's after the other's."""
    if ep is None or ep.ranks == 1:
        return rows
    return _Come.apply(ep, unit, route, rows)  # type: ignore[no-any-return]


def give_back(ep: ExpertParallel | None, unit: str, route: Route, y: Tensor) -> Tensor:
    """The results of own tokens' rows, of those of own experts, y. Keeps nothing."""
    if ep is None or ep.ranks == 1:
        return y
    return _Return.apply(ep, unit, route, y)  # type: ignore[no-any-return]


def combine(route: Route, y: Tensor, weights: Tensor, made: bool) -> Tensor:
    """(tokens, hidden): the sum of each token's rows by its weights; `made`: whether anybody reads it. Keeps rows and
    weights."""
    return _Combine.apply(route, made, y, weights)  # type: ignore[no-any-return]
