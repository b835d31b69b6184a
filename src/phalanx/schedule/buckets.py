"""How parameters fall into gradient buckets.

One function for the program that is predicted and for the engine that runs: the order in which gradients become
ready in a backward pass, cut where a bucket is full (Li et al. 2020, "PyTorch Distributed", section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model import ModelSpec, Parameter, parameters


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced in one collective, in the order in which they become ready."""

    index: int
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def name(self) -> str:
        return f"bucket.{self.index}"


def backward_order(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Parameters in the order in which a backward pass finishes their gradients.

    The reverse of the forward order; what several units share (unit `model`) is finished last.
    """
    backward = tuple(reversed(parameters(spec)))
    own = tuple(p for p in backward if p.unit != "model")
    return own + tuple(p for p in backward if p.unit == "model")


def fill(order: Sequence[Parameter], element_bytes: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut an order of parameters into buckets of at most `bucket_bytes`; a larger parameter stands alone."""
    buckets: list[Bucket] = []
    waiting: list[Parameter] = []
    size = 0
    for p in order:
        if waiting and size + p.numel * element_bytes > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(waiting)))
            waiting, size = [], 0
        waiting.append(p)
        size += p.numel * element_bytes
    if waiting:
        buckets.append(Bucket(len(buckets), tuple(waiting)))
    return tuple(buckets)


def gradient_buckets(spec: ModelSpec, job: Job, bucket_bytes: int) -> tuple[Bucket, ...]:
    """The gradient buckets of one rank, full at `bucket_bytes` of the type that is reduced."""
    return fill(backward_order(spec), DTYPE_BYTES[job.precision.reduce_dtype], bucket_bytes)
