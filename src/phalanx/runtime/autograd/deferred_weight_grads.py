"""Backward passes in two: gradients of inputs now, those of weights later (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism").

    I    while `active`, every layer's backward function computes the gradient of its input alone, and leaves what
         those of its weights are made of; to autograd it gives nothing for them
    W    what was left is made into gradients, unit by unit in the order of the backward pass; what one of them alone
         was made of is free when it is delivered
    B    while not `active` both at once, as ever

    put_off = PutOff(model.units(), inner)      once: parameters get an attribute by which layers find it
    put_off.active = True                       I: collectives are recorded as of this phase
    loss.backward()                             ... post-accumulate hooks of weights are called all the same: ignore
    put_off.active = False
    left = put_off.take()                       of this chunk and micro-batch
    for unit, gradients in left:                W: set inner.micro_batch before
        gradients(deliver)

Gradients of norms are small: they are made in I, and delivered with the others. Models without the attribute run as
if this file were not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Product(NamedTuple):
    """A gradient gᵀ x that is not made yet, of g (tokens, out) and x (tokens, in): whoever accumulates it multiplies
    right into its memory, in place of writing it, reading it and adding it."""

    g: Tensor
    x: Tensor

    def made(self) -> Tensor:
        return self.g.t().mm(self.x)

    def put(self, place: Tensor, add: bool) -> None:
        """Into `place`, or to what is there."""
        if place.dtype != self.g.dtype:
            place.add_(self.made()) if add else place.copy_(self.made())
        elif add:
            torch.addmm(place, self.g.t(), self.x, out=place)
        else:
            torch.mm(self.g.t(), self.x, out=place)


class Grouped(NamedTuple):
    """The same of several experts: of rows, in g (rows, out) and x (rows, in), that lie expert by expert, so many are
    `held` of each. The gradient is (experts, out, in)."""

    g: Tensor
    x: Tensor
    held: tuple[int, ...]

    def made(self) -> Tensor:
        gradient = self.g.new_empty(len(self.held), self.g.shape[1], self.x.shape[1])
        self.put(gradient, add=False)
        return gradient

    def put(self, place: Tensor, add: bool) -> None:
        parts = zip(place.view(len(self.held), -1), self.g.split(self.held), self.x.split(self.held), strict=True)
        for into, g, x in parts:
            if len(g):
                Product(g, x).put(into.view(g.shape[1], -1), add)
            elif not add:
                into.zero_()


Rows = list[tuple[Tensor, Tensor]]
Deliver = Callable[[nn.Parameter, Tensor | Product | Grouped | None, Rows], None]
"""Takes a parameter's gradient: a dense one; or (index, values) of rows of it, as an embedding's."""
Pay = Callable[[Deliver], None]
Owners = tuple[nn.Parameter, ...]


class Gradients:
    """What one unit has left. To be called once."""

    def __init__(self, left: Iterable[Pay]) -> None:
        self._left = deque(left)

    @torch.no_grad()
    def __call__(self, deliver: Deliver) -> None:
        while self._left:
            self._left.popleft()(deliver)


Left = list[tuple[str, Gradients]]


class PutOff:
    """What the layers of `units` leave in the passes that run while `active`. `inner`: what they communicate
    through."""

    def __init__(self, units: dict[str, nn.Module], inner: object | None = None) -> None:
        self.active = False
        self._left: dict[str, list[tuple[int, Pay]]] = {}
        self._places: dict[int, list[tuple[str, int]]] = {}  # of a parameter: a tied one has two
        for unit, module in units.items():
            for i, p in enumerate(module.parameters()):
                self._places.setdefault(id(p), []).append((unit, i))
                p.put_off = self  # type: ignore[attr-defined]
        if inner is not None:
            inner.put_off = self  # type: ignore[attr-defined]

    def leave(self, parameter: nn.Parameter, pay: Pay, rows: bool = False) -> None:
        """`pay` delivers the gradient, and maybe those of others. Of a tied parameter rows are the embedding's, and a
        product is the head's."""
        unit, place = self._places[id(parameter)][0 if rows else -1]
        self._left.setdefault(unit, []).append((place, pay))

    def made(self, parameter: nn.Parameter, gradient: Tensor | Grouped | None) -> None:
        """A gradient that is there already, or that whoever takes it makes; or none."""
        if gradient is not None:
            self.leave(parameter, partial(_deliver, parameter, gradient))

    def product(self, owners: Owners, g: Tensor, x: Tensor) -> None:
        """Those of a weight and maybe its bias, from the gradient of x Wᵀ + b, (tokens, out), and x, (tokens, in)."""
        weight, *bias = owners
        if bias:
            self.sum(bias[0], g)
        self.leave(weight, partial(_product, weight, g, x.detach()))

    def products(self, layers: Sequence[Owners], g: Sequence[Tensor], x: Tensor) -> None:
        """Those of several that read one x."""
        for owners, part in zip(layers, g, strict=True):
            self.product(owners, part, x)

    def sum(self, bias: nn.Parameter, g: Tensor) -> None:
        """That of a bias alone."""
        self.leave(bias, partial(_sum, bias, g))

    def rows(self, embedding: nn.Parameter, make: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """That of an embedding: (index, values)."""
        self.leave(embedding, partial(_rows, embedding, make), rows=True)

    def take(self) -> Left:
        """What was left since the last time: units in the order of the backward pass, gradients of each in that of
        the data-parallel engine's buckets."""
        left, self._left = self._left, {}
        return [(unit, Gradients(pay for _, pay in sorted(own, key=_last_first))) for unit, own in left.items()]


def _last_first(left: tuple[int, Pay]) -> int:
    return -left[0]


def _deliver(parameter: nn.Parameter, gradient: Tensor | Grouped, deliver: Deliver) -> None:
    deliver(parameter, gradient, [])


def _sum(bias: nn.Parameter, g: Tensor, deliver: Deliver) -> None:
    deliver(bias, g.sum(0), [])


def _rows(embedding: nn.Parameter, make: Callable[[], tuple[Tensor, Tensor]], deliver: Deliver) -> None:
    deliver(embedding, None, [make()])


def _product(weight: nn.Parameter, g: Tensor, x: Tensor, deliver: Deliver) -> None:
    deliver(weight, Product(g, x), [])


def beside(owner: Sequence[nn.Parameter], g: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of a weight, if it has an owner; nothing where the data-parallel engine takes products, which it
    then finds at the owner. The hook of that is called all the same."""
    return taken(owner, Product(g, x))


def taken(owner: Sequence[nn.Parameter], gradient: Product | Grouped) -> Tensor | None:
    """As `beside`."""
    products: list[Product | Grouped] | None = getattr(owner[0], "products_beside", None) if owner else None
    if products is None:
        return gradient.made()
    products.append(gradient)
    return None


def owners(*parameters: nn.Parameter | None) -> Owners:
    """Of a layer's parameters those that it has, for its backward function to put gradients off; none in a model that
    does not."""
    return tuple(p for p in parameters if hasattr(p, "put_off"))


def by_layer(owners: Owners, biased: Sequence[bool]) -> list[Owners]:
    """Those of layers that follow each other, each weight before its bias, if it has one; or none of any."""
    found, at = [], 0
    for bias in biased:
        found.append(owners[at : at + 1 + bias])
        at += 1 + bias
    return found


def now(owners: Owners) -> PutOff | None:
    """Where a backward function leaves what it puts off; None where it computes all."""
    found: PutOff | None = getattr(owners[0], "put_off", None) if owners else None
    return found if found is not None and found.active else None
