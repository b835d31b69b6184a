"""Deferred weight gradients: a backward pass in two parts, input gradients first and weight gradients later.

    I    while `active`, every layer's backward function computes only the gradient of its input and defers its
         weights' gradients: it keeps their factors, and returns None for them to autograd
    W    the deferred gradients are computed unit by unit, in the order of the backward pass; the factors of each are
         freed when it has been delivered
    B    while not `active`: both at once, as usual

    deferred = DeferredGradients(model.units(), inner)  once: sets a parameter attribute, which layers read
    deferred.active = True                      I: collectives are recorded as of this phase
    loss.backward()                             ... post-accumulate hooks of weights are called anyway: ignore them
    deferred.active = False
    left = deferred.take()                      the deferred gradients of this chunk and micro-batch
    for unit, gradients in left:                W: set inner.micro_batch before
        gradients(deliver)

Gradients of norms are small: they are computed in I and delivered with the others. Models without the attribute are
unaffected. Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from phalanx.runtime.autograd import grouped_product, narrow_product
from phalanx.spec.number_formats import NumberFormat


class Product(NamedTuple):
    """A gradient gᵀ x, (out, in), not computed yet, of g (tokens, out) and x (tokens, in). The accumulator multiplies
    directly into its own memory, instead of writing, reading and adding a product."""

    g: narrow_product.Operand
    x: Tensor
    operands: NumberFormat | None = None
    """Narrow format of the product's operands (narrow_product.py); None: the compute type."""

    def compute(self) -> Tensor:
        """Return the gradient as a new tensor."""
        return narrow_product.product(narrow_product.transposed(self.g), self.x.t(), self.operands, gradient=True)

    def write(self, place: Tensor, add: bool) -> None:
        """Write the gradient into `place` (out, in), or add it there."""
        if place.dtype != self.x.dtype or self.operands is not None:
            place.add_(self.compute()) if add else place.copy_(self.compute())
        else:
            narrow_product.product(narrow_product.transposed(self.g), self.x.t(), None, out=place, add=add)


class GroupedProduct(NamedTuple):
    """The gradients (experts, out, in) of several experts' weights, not computed yet. The rows of g (rows, out) and
    x (rows, in) are sorted by expert; `rows_per_expert` is the number of rows of each."""

    g: Tensor
    x: Tensor
    rows_per_expert: tuple[int, ...]
    operands: NumberFormat | None = None
    """Narrow format, as in Product."""
    where: grouped_product.RowEnds | None = None
    """The rows on the device, if a GPU can multiply them without looking for a kernel."""

    def compute(self) -> Tensor:
        """Return the gradients as a new tensor."""
        if self.where is not None and all(self.rows_per_expert) and grouped_product.fits(self.g, self.x):
            return grouped_product.weight_gradients(self.g, self.x, self.where)
        gradient = self.g.new_empty(len(self.rows_per_expert), self.g.shape[1], self.x.shape[1])
        self.write(gradient, add=False)
        return gradient

    def write(self, place: Tensor, add: bool) -> None:
        """Write the gradients into `place` (experts, out, in), or add them there."""
        rows = list(self.rows_per_expert)
        # cuBLAS accumulates products into memory of their type without a temporary matrix.
        where = self.where if place.dtype != self.x.dtype and grouped_product.fits(self.g, self.x) else None
        experts = zip(place.view(len(rows), -1), torch.split(self.g, rows), torch.split(self.x, rows), strict=True)
        for expert, (into, g, x) in enumerate(experts):
            matrix = into.view(self.g.shape[1], -1)
            if len(g) and where is not None:
                gradient = grouped_product.expert_weight_gradient(g, x, expert, where)
                matrix.add_(gradient) if add else matrix.copy_(gradient)
            elif len(g):
                Product(g, x, self.operands).write(matrix, add)
            elif not add:
                matrix.zero_()


Rows = list[tuple[Tensor, Tensor]]
Deliver = Callable[[nn.Parameter, Tensor | Product | GroupedProduct | None, Rows], None]
"""Takes a parameter's gradient: a dense one; or, for an embedding, the (index, values) of some of its rows."""
Delivery = Callable[[Deliver], None]
Owners = tuple[nn.Parameter, ...]


class Gradients:
    """The deferred gradients of one unit; calling it, once, computes and delivers them."""

    def __init__(self, deferred: Iterable[Delivery]) -> None:
        self._deferred = deque(deferred)

    @torch.no_grad()
    def __call__(self, deliver: Deliver) -> None:
        while self._deferred:
            self._deferred.popleft()(deliver)


DeferredUnits = list[tuple[str, Gradients]]
"""Deferred gradients by unit, in the order of the backward pass."""


class DeferredGradients:
    """Collects the weight gradients that the layers of `units` defer in passes that run while `active`.

    `inner`: the object through which those layers communicate; it learns the phase from here. `splits`: whether any
    pass will be active.
    """

    def __init__(self, units: dict[str, nn.Module], inner: object | None = None, splits: bool = True) -> None:
        self.active, self.splits = False, splits
        self._deferred: dict[str, list[tuple[int, Delivery]]] = {}
        self._places: dict[int, list[tuple[str, int]]] = {}  # (unit, index) of each parameter; a tied one has two
        for unit, module in units.items():
            for i, p in enumerate(module.parameters()):
                self._places.setdefault(id(p), []).append((unit, i))
                p.deferred_gradients = self  # type: ignore[attr-defined]
        if inner is not None:
            inner.deferred_gradients = self  # type: ignore[attr-defined]

    def leave(self, parameter: nn.Parameter, delivery: Delivery, rows: bool = False) -> None:
        """Defer a parameter's gradient, which `delivery` computes and delivers (perhaps along with others). For a
        tied parameter, `rows` means the embedding's gradient, otherwise it is the head's."""
        unit, place = self._places[id(parameter)][0 if rows else -1]
        self._deferred.setdefault(unit, []).append((place, delivery))

    def deliver_later(self, parameter: nn.Parameter, gradient: Tensor | GroupedProduct | None) -> None:
        """Defer the delivery of a gradient that is computed already, or by its receiver. None is no gradient."""
        if gradient is not None:
            self.leave(parameter, lambda deliver: deliver(parameter, gradient, []))

    def product(
        self, owners: Owners, g: narrow_product.Operand, x: Tensor, operands: NumberFormat | None = None
    ) -> None:
        """Defer the gradients of a weight W, and its bias b if it has one.

        `g` (tokens, out) is the gradient of x Wᵀ + b, x is (tokens, in). `operands`: as in Product.
        """
        weight, *bias = owners
        if bias:
            assert isinstance(g, Tensor)
            self.sum(bias[0], g)
        gradient = Product(g, x.detach(), operands)
        self.leave(weight, lambda deliver: deliver(weight, gradient, []))

    def sum(self, bias: nn.Parameter, g: Tensor) -> None:
        """Defer the gradient of a bias: the sum of g (tokens, out) over tokens."""
        self.leave(bias, lambda deliver: deliver(bias, g.sum(0), []))

    def rows(self, embedding: nn.Parameter, make: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Defer the gradient of an embedding; `make` returns it as (index, values) of rows."""
        self.leave(embedding, lambda deliver: deliver(embedding, None, [make()]), rows=True)

    def take(self) -> DeferredUnits:
        """Return the gradients deferred since the last call, and clear them. Units come in the order of the backward
        pass, the gradients of each in that of the data-parallel engine's buckets."""
        deferred, self._deferred = self._deferred, {}
        last_first = {unit: sorted(rows, key=lambda row: -row[0]) for unit, rows in deferred.items()}
        return [(unit, Gradients(delivery for _, delivery in rows)) for unit, rows in last_first.items()]


def weight_gradient(
    owner: Sequence[nn.Parameter], g: Tensor, x: Tensor, operands: NumberFormat | None = None
) -> Tensor | None:
    """Return the gradient gᵀ x of a weight, or leave it to its owner as a product. If the data-parallel engine
    accepts products, the owner (its parameter) gets one, and autograd gets None; the parameter's hook is called
    anyway. `owner` is empty if there is none. `operands`: as in Product."""
    return leave_to_owner(owner, Product(g, x, operands))


def leave_to_owner(owner: Sequence[nn.Parameter], gradient: Product | GroupedProduct) -> Tensor | None:
    """Return a gradient as a tensor, or leave it to its owner as a product, as `weight_gradient` does."""
    products: list[Product | GroupedProduct] | None = getattr(owner[0], "gradient_products", None) if owner else None
    if products is None:
        return gradient.compute()
    products.append(gradient)
    return None


def owners(*parameters: Tensor | None) -> Owners:
    """Return the layer parameters whose gradients can be deferred: all existing ones, or none in models that do not
    defer."""
    return tuple(cast("nn.Parameter", p) for p in parameters if p is not None and hasattr(p, "deferred_gradients"))


def deliver(owners: Owners, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of a layer's parameters (None for a parameter that it lacks), all computed already; or
    defer their delivery and return as many None."""
    deferred = deferral(owners)
    if deferred is None:
        return gradients
    for owner, gradient in zip(owners, (g for g in gradients if g is not None), strict=True):
        deferred.deliver_later(owner, gradient)
    return (None,) * len(gradients)


def may_defer(weight: Tensor) -> bool:
    """Whether the gradient of a weight may come in a later pass than that of its layer's input."""
    deferred_gradients: DeferredGradients | None = getattr(weight, "deferred_gradients", None)
    return deferred_gradients is not None and deferred_gradients.splits


def by_layer(owners: Owners, biased: Sequence[bool]) -> list[Owners]:
    """Group the owners of consecutive layers by layer: each a weight, and its bias if `biased`; or all empty."""
    layers, at = [], 0
    for bias in biased:
        layers.append(owners[at : at + 1 + bias])
        at += 1 + bias
    return layers


def deferral(owners: Owners) -> DeferredGradients | None:
    """Return the DeferredGradients to which a backward function defers its weight gradients; None if it must compute
    them itself."""
    deferred_gradients: DeferredGradients | None = getattr(owners[0], "deferred_gradients", None) if owners else None
    return deferred_gradients if deferred_gradients is not None and deferred_gradients.active else None
