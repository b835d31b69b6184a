"""The cost of compressing gradients on a rank: memory throughout the step, and work added to the backward pass.

Both follow runtime/data_parallel/compression tensor by tensor; the rows of spec/strategy/compressors.py have the
amounts for each compressor. e is the size of an element of the accumulate type.
"""

from collections.abc import Sequence

from phalanx.cost.compute.unit_work import Work
from phalanx.schedule.gradients.buckets import Bucket, slot_sizes
from phalanx.schedule.gradients.compression import PIECE, reduction
from phalanx.spec.strategy.compressors import BLOCK, Codes, Compression, Summed
from phalanx.spec.strategy.spec import Strategy


def held_bytes(c: Compression, cut: Sequence[Bucket], s: Strategy, e: int) -> int:
    """Return the bytes held throughout the step: residuals, messages of two neighbouring buckets, scratch."""
    gradients, row = reduction(cut, s, e), c.row
    residual = sum(gradients.padded) * e * c.feedback
    if isinstance(row, Codes):
        return residual + _code_bytes(c, row, gradients.padded, s, e)
    return residual + row.memory(c, gradients)


def scratch_bytes(c: Compression, cut: Sequence[Bucket], s: Strategy, e: int) -> int:
    """Return the peak of temporary bytes in coding: a piece of 2^15 elements and its copies, plus the compressor's
    own."""
    return 8 * PIECE + (c.row.scratch(c, reduction(cut, s, e)) if isinstance(c.row, Summed) else 0)


def _code_bytes(c: Compression, row: Codes, sizes: Sequence[int], s: Strategy, e: int) -> int:
    """Return bytes of scratch, messages and second residuals of a quantising compressor."""
    p = s.shards if s.shards > 1 else s.gradient_ranks
    part = sum(sizes) // p
    scratch = (PIECE * (1 + c.stochastic) + PIECE // BLOCK) * e
    messages = 2 * sum(slot_sizes([p * row.message_bytes(n // p) for n in sizes]))
    if s.shards == 1:
        return scratch + messages + part * e * c.feedback
    if s.dp_replicate == 1:
        return scratch + messages
    across = sum(2 * s.dp_replicate * row.message_bytes(n // p // s.dp_replicate) for n in sizes)
    return scratch + messages + across + (part + part // s.dp_replicate) * e * c.feedback


def work(c: Compression, cut: Sequence[Bucket], s: Strategy, e: int) -> Work:
    """Return the work of coding for one reduction of all these buckets."""
    n = sum(b.padded(s) for b in cut)
    return Work(traffic_bytes=passes(c, s) * n * e, kernels=20 * len(cut))


def passes(c: Compression, s: Strategy) -> float:
    """Return the passes over the reduced elements that coding takes (spec/strategy/compressors.py)."""
    row = c.row
    if not isinstance(row, Codes):
        return row.passes + (row.feedback_passes if c.feedback else 0)
    p = s.shards if s.shards > 1 else s.gradient_ranks
    # With error feedback the residual is added (3 passes), and the encoding's loss is written back.
    encode = row.write_passes + (3 + row.error_passes if c.feedback else 0)
    total: float = encode + row.add_passes
    if s.shards == 1:
        total += encode / p + row.read_passes
    elif s.dp_replicate > 1:
        total += (encode + row.add_passes + encode / s.dp_replicate + row.read_passes) / p
    return total
