"""What ZeRO-3 gathers in 8 bits: the matrices that products of 8-bit floats read (job.precision.gather = "float8").

A whole matrix has one scale, but each rank has only part of the matrix. So once a step, as soon as parameters are
updated, ranks reduce to their maximum

    the largest magnitude in each matrix (of each expert)     from which every rank finds the same scale
    what is not a matrix: norms, biases, routers              from the rank that has it; the others send -inf

and each rounds its shard. A gather then moves one byte an element. What arrives is what rounding the whole matrix
would give, to the bit. Reference: torchao's float8 all-gather for FSDP2 (torchao/float8/fsdp_utils.py,
`precompute_float8_dynamic_scale_for_fsdp`), which finds the scales of all matrices in one all-reduce after the
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.schedule.gradients.buckets import Bucket
from phalanx.spec.job import Precision
from phalanx.spec.model.spec import Parameter

SCALES = "scales"
"""The unit of the all-reduce in events."""
PARAMETERS, IN_8_BITS = "parameters", "8-bit parameters"
"""Names in terms of gathers in the compute type, and in 8 bits."""
NUMBER_BYTES = 4
"""Type of the all-reduce's elements: fp32, which represents every number of the compute type."""


def scales(p: Parameter) -> int:
    """Return the number of scales of a parameter in 8 bits: one for each matrix that products read; 0: it keeps its
    type, as a router does, whose products are of the compute type."""
    return p.matrices


def gathered_narrow(bucket: Bucket, precision: Precision) -> bool:
    """Whether a bucket is gathered in 8 bits: a block's is, at zero=3."""
    return precision.gathers_narrow and bucket.unit.startswith("blocks.")


def gathered_elements(bucket: Bucket, padded: int, precision: Precision) -> int:
    """Return the memory of a gathered bucket of `padded` elements, in elements of the two-byte compute type."""
    return -(-padded // 2) if gathered_narrow(bucket, precision) else padded


def numbers(cut: Iterable[Bucket]) -> int:
    """Return the number of elements in the all-reduce of scales for the buckets gathered in 8 bits."""
    return sum(scales(p) or p.numel for bucket in cut for p in bucket.parameters)
