"""Traffic and memory of compressed gradients per gradient element, for the price of a step.

codes        fp16, bf16, int8, int4         x bytes per element: codes and their scales
sparse       topk, threshold                v elements of g bytes, and x bytes of places
smaller      randk, powersgd                v elements of g bytes
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.compute.compression import passes
from phalanx.cost.hardware.columns import Column
from phalanx.schedule.gradients.buckets import unit_buckets
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.compressors import PLACE_BYTES, Codes, GatheredElements
from phalanx.spec.strategy.spec import Strategy

DENSE, CODES, SPARSE, SMALLER = range(4)


@dataclass(frozen=True)
class Compressed:
    """Traffic of gradients per element, as numbers or columns. `kind`: DENSE, CODES, SPARSE or SMALLER. `values`,
    `extra_bytes`: v and x above. `passes`: passes over the gradients to code and decode them. `kept`: elements of
    residual (error feedback)."""

    kind: Column = DENSE
    values: Column = 1.0
    extra_bytes: Column = 0.0
    passes: Column = 0.0
    kept: Column = 0.0
    bound: Column = 0.0
    """1: the sent bytes depend on the gradients; `values` is an upper bound."""

    @property
    def sparse(self) -> Column:
        """Whether elements and their indices are sent."""
        return np.asarray(self.kind) == SPARSE

    def sent(self, g: Column) -> Column:
        """Return the bytes that a rank sends per gradient element of g bytes."""
        return self.values * g + self.extra_bytes

    def messages(self, g: Column, p: Column) -> list[tuple[str, Column]]:
        """Return (collective, bytes per element) for each collective that replaces an all-reduce of g bytes over p
        ranks; `kind` must be a number."""
        size = self.sent(g)
        of_kind: dict[int, list[tuple[str, Column]]] = {
            DENSE: [("all_reduce", g)],
            CODES: [("all_to_all", size), ("all_gather", size)],
            SPARSE: [("all_gather", p * size)],
            SMALLER: [("all_reduce", size)],
        }
        return of_kind[int(self.kind)]

    def held_bytes(self, n: Column, g: Column, p: Column, bucket: Column) -> Column:
        """Return bytes of the residual of n gradients and of the messages of two neighbouring buckets."""
        messages = np.where(self.sparse, p, 2) * self.sent(g) * np.minimum(n, bucket / g)
        return np.where(np.asarray(self.kind) != DENSE, self.kept * n * g + 2 * messages, 0.0)

    def pays_by_bytes(self, g: Column) -> Column:
        """Return the number of ranks up to which sparse sends less than a dense all-reduce: 2 g / (v g + x)."""
        return 2 * g / self.sent(g)


DENSELY = Compressed()


def compressed_changes(spec: ModelSpec, s: Strategy) -> Compressed:
    """Return the traffic of the changes that replicas which step alone exchange (strategy.local)."""
    return compressed_gradients(spec, Strategy(dp=s.dp_local, compression=s.compression))


def compressed_gradients(spec: ModelSpec, s: Strategy) -> Compressed:
    """Return the traffic of a strategy's gradients."""
    c = s.compressor
    if c is None:
        return DENSELY
    work, row = passes(c, s), c.row
    if isinstance(row, Codes):
        parts = s.shards if s.shards > 1 else s.gradient_ranks
        sums = 1 / parts if s.shards == 1 or s.dp_replicate > 1 else 0.0  # share of the sums, which are coded again
        return Compressed(CODES, 0.0, row.bytes_per_element, work, c.feedback * (1 + sums))
    residual = float(c.feedback)
    if isinstance(row, GatheredElements):
        share = row.share(c, s.gradient_ranks)
        return Compressed(SPARSE, share, share * PLACE_BYTES, work, residual, float(row.counted))
    share = row.share(c, [p for bucket in unit_buckets(spec) for p in bucket.parameters])
    return Compressed(SMALLER, share, 0.0, work, residual)
