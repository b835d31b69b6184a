"""Each document over as few ranks as can hold it: Megatron-Core's hybrid (later: dynamic) context parallelism.

The ranks of dp and cp are one pool. Each document is a micro-batch of its own on a group of them, whose width is the
least power of two that leaves each rank at most N tokens (Megatron-LM 5be9626,
megatron/core/pipeline_parallel/hybrid_cp_schedule.py:44-55, `gpus_needed`): a short document sends nothing, and the
ring of a long one is as wide as it must be. Groups of a step work at their own pace until gradients are reduced.
Megatron forms groups greedily until loads are within 5 % of each other (:104) and puts a barrier between such
rounds (:616); here each document goes to the group that is free first, without a barrier.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from phalanx.frameworks.registry import row_of
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import refine
from phalanx.schedule.packing import Floats, Ints, spread
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

CONDITIONS = "pp=1, ep=1, zero<2, micro_batch=1, replicas>1"
"""Conditions for a search on strategies whose ranks can form such groups."""


def refusal(p: Pricing, s: Strategy, meets: bool) -> InputError | None:
    """Return why ranks cannot form groups by documents; None if they can. `meets`: whether replicas wait for each
    other in every micro-batch."""
    row = row_of(p.stack)
    if not row.dynamic_context:
        reason = f"context parallelism of changing width is not in {row.title or row.name}"
        return InputError("lengths", "dynamic", reason, "use packed, or --stack megatron-core")
    because = f"({row.title}, {row.dynamic_context})"
    if s.pp > 1:  # arguments.py:1404
        return InputError("lengths", "dynamic", f"does not go with a pipeline {because}", "use pp=1")
    if meets or s.ep > 1:
        reason = f"has documents' own groups, which replicas that share parameters or experts cannot have {because}"
        return InputError("lengths", "dynamic", reason, "use zero=1 and ep=1")
    if s.micro_batch > 1:
        return InputError("lengths", "dynamic", "makes each document a micro-batch", "use micro_batch=1")
    if s.dp * s.cp == 1:
        return InputError("lengths", "dynamic", "needs ranks to spread a document over", "use dp or cp")
    return None


@dataclass(frozen=True)
class Spread:
    """One step's documents on groups of ranks."""

    ranks_s: Floats
    """Seconds that each of the pool's ranks computes, (dp x cp,)."""
    attention_ratio: float
    """Query-key pairs of the rank with the most, over the mean rank's."""


@dataclass(frozen=True)
class DocumentGroups:
    """Seconds of documents by length and width of their group."""

    widths: Ints
    """Widths of groups in ranks: powers of two and the whole pool, (widths,)."""
    seconds: Floats
    """Seconds of a document's passes, by width and priced length, (widths, points)."""
    per_rank: int
    """The most tokens of a document that a rank holds."""

    def step(self, documents: Ints, weights: Floats) -> Spread:
        """Assign the documents of a step to groups. `documents`: their tokens, (documents,); `weights`: of the
        priced lengths between which each lies, (documents, points)."""
        least = np.searchsorted(self.widths, -(-documents // self.per_rank))
        ranks_s, taken, begins = spread(weights @ self.seconds.T, self.widths, least, int(self.widths[-1]))
        width = self.widths[taken]
        changes, pairs = np.zeros(len(ranks_s) + 1), documents.astype(float) ** 2 / width
        np.add.at(changes, begins, pairs)  # a document's query-key pairs, on each rank of its group
        np.add.at(changes, begins + width, -pairs)
        work = changes.cumsum()[:-1]
        return Spread(ranks_s, float(work.max() / work.mean()))


def document_groups(p: Pricing, s: Strategy, lengths: Ints, per_rank: int | None) -> DocumentGroups:
    """Price documents of these lengths on groups of every width. `per_rank`: the most tokens that a rank holds; None:
    the strategy's tokens per rank. Raises InputError if a document does not fit all ranks together."""
    ranks = s.dp * s.cp
    rank_tokens = per_rank or math.ceil(p.job.seq / s.cp)
    if rank_tokens * ranks < p.job.seq:
        reason = f"tokens a rank on {ranks} ranks do not hold {p.job.seq:,}"
        raise InputError("lengths", f"dynamic:{rank_tokens}", reason, f"allow {math.ceil(p.job.seq / ranks)}")
    widths = [w for w in (2**k for k in range(ranks.bit_length())) if ranks % w == 0 and w < ranks] + [ranks]
    ways = [replace(s, dp=ranks // w, cp=w, ulysses=1, shard=None) for w in widths]
    seconds = np.empty((len(widths), len(lengths)))
    for column, length in enumerate(lengths.tolist()):
        job, extra = replace(p.job, seq=length, global_batch=ranks), replace(p.extra, document=length)
        at = replace(p, job=job, extra=extra)  # a packed row of one document
        runs = refine(at, ways)
        seconds[:, column] = [run.makespan / w for (_, run), w in zip(runs, widths, strict=True)]
    return DocumentGroups(np.array(widths), seconds, rank_tokens)
