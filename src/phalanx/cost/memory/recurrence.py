"""Live bytes of short convolutions and of recurrences with their convolution and gated norm, in the order of
nn/recurrences/chunked.py and short_conv.py, and nn/gated_norm.py; over ranks that share sequences with the exchanges
of runtime/model_parallel/whole_sequences.py.

Kept: the projected parts that the recurrence reads, the gate z, the recurrence's result, and one number for each
token and group of the norm. The convolution, states and the inside of a chunk are computed again in the backward
pass.

A pass over chunks holds one chunk's tensors; which of the instants below is the peak depends on the sizes. The
numbers live at an instant, at least in fp32, for a chunk of n tokens, are written in words such as `4X 6K`:

X (n, channels of y)      K (n, channels of keys)    T (n, heads)    L (n, key heads)
Q (heads, n, n)           R (key heads, n, n)        S one state     H one number for each head
E, D: inputs of the filters of x and of keys before the chunk's tokens    Y, Z: a number for each channel of these
M, N: X and K if documents are separate    V: a number for each channel of x and sequence
P, O: the most that products of halves of a chunk hold, forward and backward (nn/recurrences/channel_delta.py)
"""

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.live_bytes import Walk
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.schedule.layers.halves import halves
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.operators import Conv, Norm, Scan
from phalanx.spec.strategy.spec import pieces

_FORWARD = {
    "ssd": ("4X 6K 2T 2Q 1R 1S 1E 2D 3H", "8X 6K 2T 2Q 3S 1E 2D 3H"),
    "delta": (
        "3X 8K 2L 1S 1E 2D 1H",
        "4X 6K 2T 2L 2Q 1R 1S 1E 2D 2H",
        "7X 6K 2T 2L 2Q 2S 1E 2D 2H",
        "6X 6K 2T 2L 2Q 3S 1E 2D 2H",
    ),
    "lightning": ("8X 1Q 3S 2T 2H", "8X 2Q 1S 2T 2H"),
    "channel_delta": ("16X 2Q 3S 2T 3E 1V 1H", "13X 1P 2Q 1S 2T 3E 1V 1H"),
}
_BACKWARD = {
    "ssd": (
        "8X 6K 2T 3Q 1R 1S 1E 2D 6H",
        "11X 8K 2T 2Q 1R 3S 1E 2D 6H",
        "16X 8K 4T 2Q 1R 2S 2E 2D 1M 1Y 6H",
        "12X 12K 4T 2Q 1R 2S 1E 3D 1N 1Z 6H",
    ),
    "delta": (
        "9X 6K 3T 2L 6Q 2S 1E 2D 3H",
        "12X 9K 5T 2L 5Q 3R 3S 1E 2D 3H",
        "13X 9K 5T 2L 5Q 2R 3S 1E 2D 3H",
        "12X 8K 5T 2L 5Q 2R 4S 1E 2D 3H",
        "12X 12K 6T 2L 5Q 2R 3S 1E 3D 1N 1Z 3H",
        "16X 8K 6T 2L 5Q 2R 3S 2E 2D 1M 1Y 3H",
    ),
    "lightning": ("12X 2Q 2S 2T 2H", "11X 2Q 3S 2T 2H", "11X 3Q 1S 2T 2H"),
    "channel_delta": (
        "13X 1P 2Q 2S 2T 3E 1V 1Y 2H",
        "16X 5Q 2S 3T 3E 1V 1Y 2H",
        "20X 1O 4Q 2S 3T 3E 1V 1Y 2H",
        "22X 4Q 4S 3T 3E 3V 1Y 2H",
        "23X 4Q 3S 3T 3E 2V 1Y 2H",
        "23X 4Q 4S 3T 3E 1V 1Y 2H",
        "24X 4Q 3S 3T 3E 1V 1Y 3H",
        "26X 4Q 3S 4T 3E 1V 1Y 2H",
        "28X 4Q 3S 3T 4E 1M 1V 2Y 2H",
    ),
}
WALKED = tuple(_FORWARD)
"""Recurrences whose live bytes are known."""


class RecurrenceWalk:
    """The walks of a recurrence and of the norm after it, in bytes.

    result   the recurrence's result of the rank's tokens, the gate, the norm's result
    parts    the projected parts that the recurrence reads, of the rank's tokens
    seen     these parts as the recurrence reads them: entire sequences of the rank's heads
    """

    def __init__(self, p: PassSizes, s: Sublayer) -> None:
        conv, scan = s.first(Conv), s.first(Scan)
        assert scan is not None
        self.p, self.scan = p, scan
        self.norm = next(op for op in s.operators if isinstance(op, Norm) and op.y.name == "o")
        self.ranks = _ranks(p)
        y, keys = scan.y.dim, scan.groups
        self.heads, self.groups = y.count // self.ranks, max(1, keys.count // self.ranks)
        self.x, self.k = self.heads * y.each, self.groups * keys.each  # channels
        all_tokens = p.t * self.ranks
        self.batch, self.tokens = all_tokens // p.seq, min(scan.chunk, p.seq)
        # Numbers of each token and head, and of each token and channel.
        by_channel = scan.kind == "channel_delta"
        self.by_head = scan.gates - y.each * by_channel
        self.result, self.gates = p.bytes_of(y), all_tokens * self.heads * self.by_head * p.e
        read = [out.dim for op in products_of(s) for out in op.y if out.name in scan.x]
        self.parts = sum(p.bytes_of(dim) for dim in read) + p.t * y.count * scan.gates * p.e
        self.seen = all_tokens * (self.x * (1 + by_channel) + 2 * self.k) * p.e + self.gates
        self.sums = p.numbers(max(1, self.norm.y.dim.count // self.norm.spans))
        self.wide = self.result // p.e * p.wide
        self.separate = bool(np.any(p.mask))
        self.taps, self.channels = (conv.taps, self.x + 2 * self.k) if conv is not None else (1, 0)
        self.biased = conv is not None and any(w.role == "conv_bias" for w in conv.weights)
        self.copied = self.x * p.wide * (by_channel and p.e != p.wide)  # gates of channels
        self.of_norm = sum(w.shape[0].size for w in self.norm.weights) * p.e
        self.weights = _weights(p, conv, scan) + self.of_norm
        """Gradients of filters, gates and the norm's weight."""

    # Forward.

    def forward(self, walk: Walk, graph: bool) -> None:
        """Walk from the projected parts to the normed result. Without a `graph` nothing else is left."""
        whole = self.seen * (self.ranks > 1)
        walk.touch(3 * whole)
        walk.alloc(whole)
        walk.alloc(self.result)
        self._chunks(walk, _FORWARD[self.scan.kind], self.by_head, self._filters(1))
        walk.free(whole * (not graph))
        if self.ranks > 1:
            self._gathered(walk, self.result, self.result)
        walk.alloc(self.sums)
        walk.touch(self.wide * (1 if self.scan.kind == "ssd" else 2) + self.result)
        walk.alloc(self.result)
        walk.free(self.parts * (self.ranks > 1 or not graph))
        walk.free((2 * self.result + self.sums) * (not graph))  # the gate, too

    # Backward.

    def backward(self, walk: Walk, whole: bool) -> None:
        """Walk from the gradient of the normed result to the gradients of all projected parts; everything that
        `forward` kept is freed, except the normed result. With not `whole` it is the first part, I, and the gradients
        of parameters stay for W."""
        result, scan_input = self.result, self.seen
        walk.touch(5 * self.wide + 2 * result + self.sums + self.of_norm)
        walk.alloc(2 * result, self.of_norm * (not whole))
        walk.free(3 * result + self.sums)  # also the gate, the recurrence's result; exchanges are smaller
        inside = walk.live
        walk.alloc(scan_input - self.gates)
        states = -(-self.p.seq // self.tokens) * self._sizes["S"]
        written = self.wide * (self.scan.kind in ("delta", "channel_delta"))
        walk.alloc(states, written)
        self._chunks(walk, _BACKWARD[self.scan.kind], 2 * self.by_head, self._filters(2))
        walk.free(walk.live - inside)
        walk.masked = walk.highest  # with separate documents, the tokens' positions are live until here
        walk.alloc(scan_input, (self.weights - self.of_norm) * (not whole))
        walk.free(scan_input, result)
        if self.ranks > 1:
            self._gathered(walk, scan_input, self.parts)

    def _gathered(self, walk: Walk, sent: Column, result: Column) -> None:
        """Walk the exchange of heads for tokens: `sent` bytes become `result`."""
        walk.alloc(2 * sent + result)
        walk.free(3 * sent)

    # Chunks.

    @property
    def _sizes(self) -> dict[str, Column]:
        """Bytes by letter of a chunk's words."""
        rows, wide = self.batch * self.tokens, self.p.wide
        early = self.batch * (self.taps - 1)
        counts = {
            "X": rows * self.x,
            "K": rows * self.k,
            "T": rows * self.heads,
            "L": rows * self.groups,
            "Q": rows * self.tokens * self.heads,
            "R": rows * self.tokens * self.groups,
            "S": self.batch * self.scan.state * self.x,
            "E": early * self.x,
            "D": early * self.k,
            "Y": self.x,
            "Z": self.k,
            "H": self.batch * self.heads,
            "M": rows * self.x * self.separate,
            "N": rows * self.k * self.separate,
            "V": self.batch * self.x,
            "P": self.batch * self.heads * _of_halves(self.tokens, self.scan.state, backward=False),
            "O": self.batch * self.heads * _of_halves(self.tokens, self.scan.state, backward=True),
        }
        return {name: count * wide for name, count in counts.items()}

    def _filters(self, copies: int) -> int:
        """Return the bytes of filters; with 2 `copies`, in backward passes, also of their gradients."""
        biases = (copies - (self.p.e == self.p.wide)) * self.biased
        return (copies * self.taps + biases) * self.channels * self.p.wide + self.copied

    def _chunks(self, walk: Walk, instants: tuple[str, ...], gates: int, filters: int) -> None:
        """Touch the temporaries of a pass over chunks: `gates` numbers of every token and head, filters, a chunk's
        work."""
        sizes, gate = self._sizes, self.p.t * self.heads * self.ranks * self.p.wide
        works = [sum(int(word[:-1]) * sizes[word[-1]] for word in instant.split()) for instant in instants]
        most = works[0]
        for work in works[1:]:
            most = np.maximum(most, work)
        walk.touch(gates * gate + filters + most)
        walk.touch((gates + 1) * gate * (gates > 0) + filters)


def _of_halves(n: int, width: int, backward: bool) -> int:
    """Return the most elements of a head that products of halves of n tokens hold: decays, operands, a result."""
    held = [0]
    for at in halves(n):
        rows, pairs = at.half + at.rest, at.half * at.rest
        more = (rows + at.half) * width + pairs * (at.count > 1) if backward else at.rest * width + pairs
        held.append(at.count * (rows * width + more))
    return max(held)


class ShortConvWalk:
    """The walks of a gated short convolution, in bytes."""

    def __init__(self, p: PassSizes, s: Sublayer) -> None:
        conv = s.first(Conv)
        assert conv is not None
        self.p, (dim,) = p, conv.channels
        self.part, self.ranks = p.bytes_of(dim), _ranks(p)
        core = p.core.part if p.core is not None else None
        self.pieces = 1 if core is None else pieces(core.ring, core.ulysses)
        early = p.t * self.ranks // p.seq * (conv.taps - 1) * dim.size
        self.before = early * self.pieces * p.e * (self.ranks > 1)
        self.wide = self.part // p.e * p.wide // self.pieces  # of one piece
        self.seen = self.wide + early * p.wide
        self.taps = conv.taps * dim.size * p.wide
        biased = len(conv.weights) > 1
        self.bias = dim.size * p.wide * biased
        self.copied = self.bias * (p.e != p.wide)
        self.masked = self.wide * bool(np.any(p.mask))
        self.weights = _weights(p, conv)
        """Gradients of the filter."""

    def forward(self, walk: Walk, graph: bool) -> None:
        """Walk from the projected parts to the last product's input. Without a `graph` nothing else is left."""
        inside = walk.live
        walk.alloc(self.taps + self.copied)
        walk.alloc(2 * self.part)  # the product, and the result
        walk.touch((self.ranks + 2) * self.before)
        walk.alloc(self.before)
        walk.touch(self.seen + self.wide + self.masked)
        walk.free(walk.live - inside)
        walk.alloc(self.part + self.before)
        walk.free((3 * self.part + self.before) * (not graph))

    def backward(self, walk: Walk, whole: bool) -> None:
        """Walk from the gradient of the result to the gradients of the projected parts. `whole`: as
        RecurrenceWalk's."""
        inside = walk.live
        walk.alloc(2 * self.taps + self.copied + self.bias)
        walk.alloc(3 * self.part, self.before)  # the product, two gradients
        walk.touch(2 * self.seen + 2 * self.wide + self.masked)
        walk.touch((self.ranks + 1) * self.before)
        walk.alloc(self.weights * (self.p.e != self.p.wide))
        walk.alloc(2 * self.part)
        walk.free(walk.live - inside)
        walk.masked = walk.highest
        # Gradients take the places of parts; the result's is gone.
        walk.alloc(self.weights * (not whole))
        walk.free(self.part + self.before)


def _ranks(p: PassSizes) -> int:
    """Return the ranks that share sequences."""
    return p.core.part.ring * p.core.part.ulysses if p.core is not None else 1


def _weights(p: PassSizes, *ops: Conv | Scan | None) -> int:
    """Return the bytes of the gradients of operators' weights."""
    weights = [w for op in ops if op is not None for w in op.weights]
    return sum(int(np.prod([d.size for d in w.shape])) for w in weights) * p.e
