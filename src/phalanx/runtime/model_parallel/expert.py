"""Expert parallelism: tokens travel to the ranks that hold their experts, and the results back (Lepikhin et al. 2020,
"GShard").

    counts     all-to-all: how many rows each rank sends to each expert of each other rank
    dispatch   all-to-all of one row for every choice of a token; parts are as uneven as the choices
    combine    all-to-all back; a token's result is the weighted sum of its rows

Backward, gradients travel the same ways in reverse. An expert over etp ranks is treated as etp experts with a part of
its width each: all of them get the token, and their results are summed at its home. So ep and etp form one group,
with one all-to-all each way.

Rows of a rank's own tokens are ordered by expert, which is by destination. Rows that arrive are ordered by source and
then by expert; they are reordered by expert.
"""

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
from phalanx.runtime.tracing import host_values
from phalanx.spec.model.mechanisms import Experts

Rows = list[tuple[int, ...]]
"""Row counts by rank, then by expert of that rank."""
BalancedCounts = Callable[[int | None], Sequence[int]]
"""(global rank, or None for this one) -> rows of each expert under balanced routing, for tensors without values."""


@dataclass
class Route:
    """Routing of one layer's rows.

    `slots`     (rows,): the index of each row's choice in the flattened (tokens, width), ordered by expert
    `places`    (tokens, width): the row of each choice; None where experts choose the tokens
    `rows_per_expert`      rows of each of this rank's experts
    `sends`, `receives`    rows for each rank of the group, and from each
    `order`     (rows,): the permutation that orders arriving rows by expert; None if they are
    `copies`    ranks that share an expert (etp)
    """

    tokens: int
    width: int
    slots: Tensor
    places: Tensor | None
    rows_per_expert: tuple[int, ...]
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    order: Tensor | None = None
    copies: int = 1
    underway: list[tuple[Tensor, Tensor, Handle]] = field(default_factory=list)
    """(rows sent, rows arriving, handle) of an all-to-all in flight, overlapped with computation."""

    @property
    def token(self) -> Tensor:
        """The token of each row, (rows,)."""
        return self.slots.div(self.width, rounding_mode="floor")

    def forget(self) -> None:
        """Free the tensors once the gradients are back: graph nodes hold this object until backward is over."""
        self.slots, self.places, self.order = self.slots.new_empty(0), None, None


class ExpertParallel:
    """A rank's place among the ranks that share the experts of its layers; one object for all layers. `balanced`:
    tokens go to experts in turn, regardless of the router."""

    def __init__(self, inner: LayerComm, experts: Experts, ep: int, etp: int, balanced: bool = False) -> None:
        self.inner, self.experts, self.ep, self.etp, self.balanced = inner, experts, ep, etp, balanced
        self.ranks = ep * etp
        self.axis = "ep" if etp == 1 else "ep+etp"
        self.counting = False
        """Whether passes count towards `loads`."""
        self.loads: dict[int, Tensor] = {}
        """Counts of this step by block, (count + 3,): choices of each expert, dropped choices, two losses."""

    def count(self, block: int, load: Tensor, dropped: Tensor, losses: Tensor) -> None:
        """Add to the loads of a block, of this rank's tokens: choices of each expert, (count,), dropped choices, and
        the auxiliary losses, (2,)."""
        self.loads[block] += torch.cat([load.double(), dropped.double()[None], losses])

    def exchanged(self, unit: str, counts: Tensor, otherwise: BalancedCounts) -> tuple[Rows, Rows]:
        """Exchange row counts. Returns (rows that leave for the experts of every rank, rows that come from every rank
        for own experts)."""
        ranks, here = self.ranks, self.experts.here
        sent = counts.view(self.ep, 1, here).expand(-1, self.etp, -1).flatten()
        got = torch.empty_like(sent)
        self.inner.all_to_all(got, sent, self.axis, unit, "F").wait()
        table = host_values.read(torch.cat([sent, got]), lambda: self._even(otherwise))
        leaving, coming = (_table(part, here) for part in (table[: ranks * here], table[ranks * here :]))
        return leaving, coming

    def _even(self, otherwise: BalancedCounts) -> list[int]:
        """Return the exchanged counts for tensors without values: (sent, received)."""
        group = self.inner.comm.ranks(self.axis)
        place = group.index(self.inner.comm.world.rank)
        leaving = [self._of(otherwise(None), rank) for rank in range(self.ranks)]
        coming = [self._of(otherwise(rank), place) for rank in group]
        return [n for of in (*leaving, *coming) for n in of]

    def _of(self, counts: Sequence[int], rank: int) -> list[int]:
        """Return the counts of the experts on the group's `rank`, from the counts of all experts."""
        begins = rank // self.etp * self.experts.here
        return list(counts[begins : begins + self.experts.here])

    def all_to_all(self, route: Route, rows: Tensor, back: bool, unit: str, phase: Any) -> tuple[Tensor, Handle]:
        """Start to send rows, (n, hidden), to the ranks of their experts, or `back`. Returns (rows arriving,
        handle)."""
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
    otherwise: BalancedCounts,
    experts: Experts,
) -> Route:
    """Plan where the rows of a layer go; all ranks of the group together.

    `slots`: the choices in order of their experts, of which the first sum(counts) become rows; `counts` (count,):
    rows of each expert; `otherwise`: the counts of a rank for tensors without values.
    """
    chosen = experts.chooser == "tokens"
    if ep is None or ep.ranks == 1:
        rows_per_expert = host_values.read(counts, lambda: list(otherwise(None)))
        rows = sum(rows_per_expert)
        return Route(tokens, width, slots[:rows], _places(slots, rows, tokens, width, chosen), tuple(rows_per_expert))
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
    """Return the row of each choice, (tokens, width); `rows`, one past the last, for dropped choices."""
    if not chosen:
        return None
    places = torch.empty_like(slots)
    places[slots] = torch.arange(len(slots), device=slots.device)
    return places.clamp_(max=rows).view(tokens, width)


def _by_expert(coming: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """Return the permutation, (rows,), from order by source and expert to order by expert and source."""
    ranks, here = len(coming), len(coming[0])
    if here == 1:
        return None
    sizes = [coming[r][e] for e in range(here) for r in range(ranks)]
    starts = [0, *accumulate(n for of in coming for n in of)]
    begins = [starts[r * here + e] for e in range(here) for r in range(ranks)]
    reads = [0, *accumulate(sizes)]
    shift = host_values.to_device([a - b for a, b in zip(begins, reads, strict=False)], device)
    total = reads[-1]
    shifts = shift.repeat_interleave(host_values.to_device(sizes, device), output_size=total)
    return shifts.add_(torch.arange(total, device=device))


def _arrived(route: Route) -> Tensor:
    """Wait for the all-to-all in flight, and return the rows that arrived."""
    _, target, handle = route.underway.pop()
    handle.wait()
    return target


class _SendRows(torch.autograd.Function):
    """Starts to send the tokens' rows; backward, receives their gradients."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel | None, unit: str, route: Route, x: Tensor) -> Tensor:
        ctx.ep, ctx.route = ep, route
        rows = x.index_select(0, route.token)
        if ep is None or ep.ranks == 1:
            return rows
        rows = _for_each_copy(route, rows)
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


class _ReceiveRows(torch.autograd.Function):
    """Receives the rows and orders them by expert; backward, starts to send their gradients."""

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
        return None, None, None, recompute.placeholder(g, g.shape)


class _ReturnResults(torch.autograd.Function):
    """Sends results back to the ranks of their tokens."""

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
    """Adds up each token's rows by their weights."""

    @staticmethod
    def forward(ctx: Any, route: Route, needed: bool, y: Tensor, weights: Tensor) -> Tensor:
        ctx.route = route
        ctx.save_for_backward(y, weights)
        if not needed:
            return recompute.placeholder(y, (route.tokens, y.shape[-1]))
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
        return None, None, _for_each_copy(route, d_y), d_w.view(weights.shape)


def _for_each_copy(route: Route, rows: Tensor) -> Tensor:
    """Return the rows in the order of their destinations, once for each of the ranks that share an expert."""
    if route.copies == 1:
        return rows
    parts = rows.split(list(route.sends[:: route.copies]))
    return torch.cat([part for part in parts for _ in range(route.copies)])


def _dots(own: Sequence[Tensor], g: Tensor) -> Tensor:
    """Return the dot product of each row with its gradient, (rows,), summed over the ranks that share its expert."""
    each = [(part * g).sum(-1) for part in own]
    return torch.stack(each).sum(0) if len(each) > 1 else each[0]


def _copies(route: Route, y: Tensor) -> list[Tensor]:
    """Split returned rows by the ranks that share an expert: `copies` tensors (rows, hidden), the terms of each
    row."""
    if route.copies == 1:
        return [y]
    parts = y.split(list(route.sends))
    return [torch.cat(parts[i :: route.copies]) for i in range(route.copies)]


def _summed(route: Route, rows: Tensor, weights: Tensor | None) -> Tensor:
    """Add up each token's rows, weighted by weights (tokens, width) if given. Returns (tokens, hidden)."""
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


def send_rows(ep: ExpertParallel | None, unit: str, route: Route, x: Tensor) -> Tensor:
    """Start to send the rows of own tokens, x (tokens, hidden), to their experts; `receive_rows` waits for arriving
    ones. Computation in between overlaps with the rows, and in the backward pass with their gradients. Autograd keeps
    nothing."""
    return _SendRows.apply(ep, unit, route, x)  # type: ignore[no-any-return]


def receive_rows(ep: ExpertParallel | None, unit: str, route: Route, rows: Tensor) -> Tensor:
    """Wait for the rows of own experts and return them ordered by expert, (rows, hidden)."""
    if ep is None or ep.ranks == 1:
        return rows
    return _ReceiveRows.apply(ep, unit, route, rows)  # type: ignore[no-any-return]


def return_results(ep: ExpertParallel | None, unit: str, route: Route, y: Tensor) -> Tensor:
    """Send the results of this rank's experts, y (rows, hidden), back; return the results of its tokens' rows.
    Autograd keeps nothing."""
    if ep is None or ep.ranks == 1:
        return y
    return _ReturnResults.apply(ep, unit, route, y)  # type: ignore[no-any-return]


def combine(route: Route, y: Tensor, weights: Tensor, needed: bool) -> Tensor:
    """Add up each token's rows by its weights, (tokens, width). Returns (tokens, hidden); `needed`: whether the value
    is used (autograd/recompute.py). Autograd keeps rows and weights."""
    return _Combine.apply(route, needed, y, weights)  # type: ignore[no-any-return]
