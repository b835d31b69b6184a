"""Criteria in numbers for when an axis of parallelism pays, which rules of thumb leave out.

T tokens of a rank and micro-batch, h the model's width, s the sequence, M micro-batches, P ranks of the axis. A ridge
is a chip's FLOP/s over the bytes/s of its memory, or of the link in one direction (`phalanx tables roofline`):

    tp    (T, h) by (h, h/tp) in 2 bytes: 2 T h h/tp FLOP over 2 (T h + h h/tp + T h/tp) bytes, h/(tp+1) for large T
    pp    (P-1)/(M+P-1) <= 1/5 if M >= 4 (P-1)
    cp    a ring's step: 4 (s/cp)² h FLOP of attention over 4 (s/cp) h_kv bytes of keys and values
    dp    6 N T FLOP over 4 N bytes of an all-reduce; ZeRO-3: over 6 N, all-gathered twice and reduce-scattered
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planning.tables.table import Sheet, columns


@dataclass(frozen=True)
class Criterion:
    """When an axis pays."""

    axis: str
    pays: str
    holds: str
    """The criterion, in numbers."""
    lints: tuple[str, ...]
    """The lints of `phalanx lint` for jobs that do not meet it."""


CRITERIA = (
    Criterion("tp, width", "a block does not fit, or GPUs outnumber sequences", "h/(tp+1) > ridge of memory", ()),
    Criterion("tp, heads", "the same", "tp divides the heads of keys and the vocabulary", ("uneven-heads",)),
    Criterion("tp, link", "the same", "tp ranks on the fastest links, in one node", ("wide-tp", "straddling")),
    Criterion("pp", "state does not fit a node's GPUs", "M >= 4 (pp-1): bubble <= 20 %", ("few-micro-batches",)),
    Criterion("pp, balance", "the same", "stages of equal work", ("unbalanced-stages",)),
    Criterion("cp", "a sequence's activations do not fit", "s/cp x heads / key heads > ridge of the link", ()),
    Criterion(
        "ep", "experts do not fit", "ep divides the experts; 4 k T h (ep-1)/ep bytes a block on fast links", ()
    ),
    Criterion("ZeRO-1", "dp > 1", "always: it sends what an all-reduce does", ()),
    Criterion("ZeRO-2", "gradients do not fit", "few micro-batches: each reduces its gradients", ()),
    Criterion("ZeRO-3", "weights do not fit", "T > ridge of the link", ()),
    Criterion("HSDP", "as ZeRO-3", "T > ridge of the links inside a group, not of those between", ()),
    Criterion("plain dp", "state fits", "1.5 x tokens of a step and GPU > ridge of the link", ("wide-gradients",)),
    Criterion("buckets", "dp > 1", "a message of a bucket over n* = alpha x rate", ("small-buckets",)),
    Criterion("compression", "gradients are exposed", "the time it saves > coding", ("losing-compressor",)),
    Criterion("order", "several axes", "what sends most has the nearest neighbours", ("mesh-order",)),
)


def sheet() -> Sheet:
    """Tabulate the criteria."""
    return Sheet(
        "criteria: when an axis pays",
        columns("axis", "asked for when", "pays if", "lint"),
        [(c.axis, c.pays, c.holds, ", ".join(c.lints)) for c in CRITERIA],
        "T: tokens of a rank and micro-batch, h: width; ridges: `phalanx tables roofline`; "
        "lint: what says that it does not",
        charted=False,
    )
