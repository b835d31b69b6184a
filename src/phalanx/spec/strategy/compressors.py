"""The table of gradient compressors: one row for each, with every fact that parsing, sending, memory and prices need.

There are three ways to send gradients, each with its type of row:

    Codes               every element in fewer bits: an all-to-all, each part summed by its owner; at zero 0 also an
                        all-gather of the sums' codes
    GatheredElements    some elements and their indices: an all-gather
    Summed              fewer numbers that can be added: all-reduces

No field has a default: a row that lacks a fact cannot be made. The torch code of a name is registered in
runtime/data_parallel/compression/__init__.py. To add a compressor: a row here, its code there.

n: elements; p: ranks that reduce together; e: bytes of an element of the accumulate type. Passes: reads and writes of
the elements, weighted by the time of each operation on a CPU relative to a plain pass over memory, with scratch in
cache.

The grammar of a strategy's `compression`:

    name[:value][:stochastic][:nofeedback]     int8     topk:0.01     powersgd:4     int4:stochastic

    fp16, bf16, int8, int4   every element in fewer bits; all but bf16 with a scale per block of elements
    topk:s, randk:s          the share s of the elements: the largest, or a random choice, the same on every rank
    threshold:t              the elements of magnitude t or above
    powersgd:r               matrices as products of rank r (Vogels et al. 2019)

The dropped part is kept as a residual and added to the next gradient (error feedback: Seide et al. 2014, Karimireddy
et al. 2019), unless `nofeedback` is given. `stochastic` rounds up or down at random, without bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, inf, prod

from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import Parameter

_FIELD = "strategy.compression"


@cache
def parse(text: str) -> Compression | None:
    """Parse `int4:stochastic`; None for `none`. Raises InputError for an unknown name, number or option."""
    if text == "none":
        return None
    name, *words = text.split(":")
    row = COMPRESSORS.get(name)
    if row is None:
        raise InputError(_FIELD, text, "is not known", f"use {', '.join(('none', *map(example, COMPRESSORS)))}")
    value = 0.0
    if not isinstance(row, Codes):
        value = _value(text, row.number, example(name), words)
        words = words[1:]
    options = [word for word in words if word in ("stochastic", "nofeedback")]
    if words != options or len(set(options)) != len(options):
        raise InputError(_FIELD, text, "has unknown or repeated options", "use stochastic and nofeedback, once each")
    if "stochastic" in options and not (isinstance(row, Codes) and row.stochastic):
        able = [name for name, row in COMPRESSORS.items() if isinstance(row, Codes) and row.stochastic]
        raise InputError(_FIELD, text, f"stochastic rounding is for {' and '.join(able)}", "leave it out")
    return Compression(name, value, "stochastic" in options, "nofeedback" not in options)


def _value(text: str, number: Number, usual: str, words: list[str]) -> float:
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        raise InputError(_FIELD, text, "lacks a number after the name", f"e.g. {usual}") from None
    if not number.allowed(value):
        raise InputError(_FIELD, text, number.rule, f"e.g. {usual}")
    return value


BLOCK = 256
"""Elements that share a scale."""
SCALE_BYTES = 4
PLACE_BYTES = 4
"""Bytes of an element's index in a message."""
COUNT_BYTES = 8
INDEX_BYTES = 8
"""Bytes of an element of torch's index tensors."""


@dataclass(frozen=True)
class Number:
    """The number after a compressor's name."""

    example: str
    """A usual number, for messages."""
    measured: str
    """The number with which `phalanx measure` times the compressor."""
    allowed: Callable[[float], bool]
    rule: str
    """The allowed numbers, for messages."""


@dataclass(frozen=True)
class Compression:
    """A parsed `compression`."""

    name: str
    """A row of COMPRESSORS."""
    value: float = 0.0
    """topk, randk: the share of elements kept; threshold: the least magnitude kept; powersgd: the rank; else 0."""
    stochastic: bool = False
    """Whether int8 and int4 round at random, without bias, instead of to the nearest."""
    feedback: bool = True
    """Whether the dropped part is added to the next gradient."""

    @property
    def row(self) -> Codes | GatheredElements | Summed:
        """The facts about this compressor."""
        return COMPRESSORS[self.name]

    @property
    def quantised(self) -> bool:
        """Whether every element is sent, in fewer bits."""
        return isinstance(self.row, Codes)

    @property
    def codes(self) -> Codes:
        """The row of a quantised compressor. Raises TypeError for any other."""
        if not isinstance(self.row, Codes):
            raise TypeError(f"{self.name} does not send codes")
        return self.row


@dataclass(frozen=True)
class Reduction:
    """A rank's gradients, from the viewpoint of its compressor."""

    padded: tuple[int, ...]
    """Elements of each bucket, padding included."""
    slots: tuple[int, ...]
    """Elements of the buffers that neighbouring buckets use in turn."""
    parameters: tuple[tuple[Parameter, ...], ...]
    """The parameters of each bucket."""
    ranks: int
    """p"""
    element_bytes: int
    """e"""


@dataclass(frozen=True)
class Codes:
    """Every element in fewer bits."""

    bits: int
    """Bits per element."""
    largest: float
    """The code of a block's largest magnitude, to which scales are relative."""
    scaled: bool
    """Whether blocks carry a scale. bf16 needs none: it has the range of fp32."""
    stochastic: bool
    """Whether elements may be rounded at random."""
    write_passes: int
    """Passes to encode."""
    error_passes: int
    """Passes to find the encoding's loss, with error feedback."""
    add_passes: int
    """Passes to decode and add."""
    read_passes: int
    """Passes to decode."""

    def message_bytes(self, n: int) -> int:
        """Return the bytes of the scales and codes of n elements, a multiple of BLOCK."""
        return n // BLOCK * SCALE_BYTES * self.scaled + n * self.bits // 8

    @property
    def bytes_per_element(self) -> float:
        """Bytes of a message per element."""
        return self.bits / 8 + self.scaled * SCALE_BYTES / BLOCK


@dataclass(frozen=True)
class GatheredElements:
    """Some elements and their indices, gathered from all ranks. `c` is the parsed compression."""

    number: Number
    elements: Callable[[Compression, int, int], int]
    """(c, n, p) -> elements that a rank sends of n; the most, if `counted`."""
    counted: bool
    """Whether the number of elements depends on the gradients, so that an all-gather of it goes ahead."""
    share: Callable[[Compression, int], float]
    """(c, p) -> elements sent per element."""
    memory: Callable[[Compression, Reduction], int]
    """Bytes held throughout the step, in addition to residuals."""
    passes: int
    """Passes without error feedback."""
    feedback_passes: int
    """Further passes with it."""


@dataclass(frozen=True)
class Summed:
    """Fewer numbers, all-reduced."""

    number: Number
    sums: Callable[[Compression, int, Sequence[Parameter]], tuple[int, ...]]
    """(c, n, parameters of the bucket) -> elements of each all-reduce, in order."""
    share: Callable[[Compression, Sequence[Parameter]], float]
    """(c, parameters of the model) -> elements sent per element."""
    memory: Callable[[Compression, Reduction], int]
    """Bytes held throughout the step, in addition to residuals."""
    scratch: Callable[[Compression, Reduction], int]
    """Bytes allocated temporarily, in addition to a piece of the elements."""
    passes: int
    """Passes without error feedback."""
    feedback_passes: int
    """Further passes with it."""


# topk, randk, threshold: some elements.


def elements_sent(c: Compression, n: int) -> int:
    """Return the number of elements of n that topk and randk send: even, so that the following data is aligned."""
    return min(n + n % 2, 2 * ceil(c.value * n / 2))


def max_elements(n: int, p: int) -> int:
    """Return the maximum elements that a rank sends under threshold: one in p. More would cost more than sending
    everything: p messages of n/p indices and values outweigh the 2 (p-1)/p n values of an all-reduce."""
    return 2 * ceil(n / p / 2)


def _topk_memory(c: Compression, r: Reduction) -> int:
    e, largest = r.element_bytes, max(r.padded)
    messages = sum(r.ranks * elements_sent(c, n) * (e + PLACE_BYTES) for n in r.slots)
    return messages + largest * e + 3 * elements_sent(c, largest) * (e + INDEX_BYTES)


def _randk_memory(c: Compression, r: Reduction) -> int:
    values = sum(elements_sent(c, n) * (r.element_bytes + INDEX_BYTES) for n in r.slots)
    return values + elements_sent(c, max(r.padded)) * 8


def _threshold_memory(c: Compression, r: Reduction) -> int:
    e, p = r.element_bytes, r.ranks
    limits = [max_elements(n, p) for n in r.slots]
    counts = p * COUNT_BYTES * sum(n > 0 for n in limits)
    return sum(limits) * (p * (e + PLACE_BYTES) + e + INDEX_BYTES) + counts + max(r.padded) * e


# powersgd: factors.


@dataclass(frozen=True)
class Factors:
    """A gradient matrix (n, m), sent as the product of factors (n, r) and (r, m)."""

    parameter: Parameter
    n: int
    m: int
    r: int


def factors(c: Compression, parameters: Sequence[Parameter]) -> tuple[tuple[Factors, ...], tuple[Parameter, ...]]:
    """Split parameters into those sent as factors, and those sent unchanged: vectors, and matrices whose factors
    would not be smaller."""
    matrices, rest = [], []
    for p in parameters:
        n, m = (p.shape[0], prod(p.shape[1:])) if len(p.shape) > 1 else (1, 1)
        r = min(int(c.value), n, m)
        if r * (n + m) < n * m:
            matrices.append(Factors(p, n, m, r))
        else:
            rest.append(p)
    return tuple(matrices), tuple(rest)


def _powersgd_sums(c: Compression, n: int, parameters: Sequence[Parameter]) -> tuple[int, ...]:
    """Return the elements of P and of parameters not sent as factors, then the elements of Q."""
    matrices, rest = factors(c, parameters)
    left = sum(f.n * f.r for f in matrices) + sum(p.numel for p in rest)
    right = sum(f.m * f.r for f in matrices)
    return tuple(size for size in (left, right) if size)


def _powersgd_share(c: Compression, parameters: Sequence[Parameter]) -> float:
    return sum(_powersgd_sums(c, 0, parameters)) / sum(p.numel for p in parameters)


def _powersgd_memory(c: Compression, r: Reduction) -> int:
    return sum(sum(_powersgd_sums(c, 0, parameters)) for parameters in r.parameters) * r.element_bytes


def _powersgd_scratch(c: Compression, r: Reduction) -> int:
    """Return the bytes of the orthonormal factor of the largest matrix, and of its decomposition's workspace."""
    sizes = (f.n * f.r for parameters in r.parameters for f in factors(c, parameters)[0])
    return 3 * r.element_bytes * max(sizes, default=0)


_SHARE = "the share of elements must be above 0 and at most 1"


def _share(value: float) -> bool:
    return 0 < value <= 1


COMPRESSORS: dict[str, Codes | GatheredElements | Summed] = {
    "fp16": Codes(16, 1.0, True, False, write_passes=8, error_passes=5, add_passes=4, read_passes=3),
    "bf16": Codes(16, 1.0, False, False, write_passes=4, error_passes=5, add_passes=4, read_passes=3),
    "int8": Codes(8, 127.0, True, True, write_passes=8, error_passes=5, add_passes=4, read_passes=3),
    # Two codes in a byte are packed and unpacked.
    "int4": Codes(4, 7.0, True, True, write_passes=12, error_passes=9, add_passes=8, read_passes=7),
    "topk": GatheredElements(
        number=Number("0.01", "0.01", _share, _SHARE),
        elements=lambda c, n, p: elements_sent(c, n),
        counted=False,
        share=lambda c, p: c.value,
        memory=_topk_memory,
        passes=24,
        feedback_passes=5,
    ),
    "randk": Summed(
        number=Number("0.01", "0.01", _share, _SHARE),
        sums=lambda c, n, parameters: (elements_sent(c, n),),
        share=lambda c, parameters: c.value,
        memory=_randk_memory,
        scratch=lambda c, r: 0,
        passes=2,
        feedback_passes=5,
    ),
    "threshold": GatheredElements(
        # Measured with a threshold below all gradients, since its bytes are priced at their maximum too.
        number=Number(
            "1e-3", "1e-9", lambda value: 0 < value < inf, "the least magnitude must be positive and finite"
        ),
        elements=lambda c, n, p: max_elements(n, p),
        counted=True,
        share=lambda c, p: 1 / p,
        memory=_threshold_memory,
        passes=21,
        feedback_passes=5,
    ),
    "powersgd": Summed(
        number=Number(
            "4", "4", lambda value: value >= 1 and value % 1 == 0, "the rank must be a whole number of at least 1"
        ),
        sums=_powersgd_sums,
        share=_powersgd_share,
        memory=_powersgd_memory,
        scratch=_powersgd_scratch,
        passes=5,  # M is read for P and for Q, and the result written
        feedback_passes=6,
    ),
}


def example(name: str, *, measured: bool = False) -> str:
    """Return a compressor as a strategy names it, with a usual number, or the one with which it is measured."""
    row = COMPRESSORS[name]
    if isinstance(row, Codes):
        return name
    return f"{name}:{row.number.measured if measured else row.number.example}"
