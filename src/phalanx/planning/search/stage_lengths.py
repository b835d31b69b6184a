"""Number of blocks in each chunk of a pipeline, for stacks that let the user choose it (frameworks/: `layers`).

The first pass prices strategies with equal numbers of blocks on all pipeline ranks, the second also with the cut that
balances their times, since the last rank has the head as well. Neither takes the least memory, since the first rank
keeps the activations of the most micro-batches. So after the second pass:

    faster strategies that do not fit    are tried with a shorter first rank, and with the embedding and the loss
                                         counted as blocks; memory for all of them in one call
    the best strategy                    is also timed with equal chunks, so that its gain can be stated

The choice becomes the strategy's `layers`, and is exported in the stack's form.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import layout_of
from phalanx.planning.search.refine import GAIN, RankedStrategy, RefinedPrices
from phalanx.planning.search.stack_options import runnable_strategies
from phalanx.schedule.pipeline.given_layout import equal_blocks, write_layers
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.strategy.spec import Strategy

_TRIED = 8
"""Maximum strategies to try, of those that do not fit and of those with equal chunks."""
_TIMED = 4
"""Maximum fitting cuts whose pipelines are timed."""
_SHORTER = (1, 2, 3, 4)
"""Candidate numbers of blocks to move away from the first rank."""
_PINNED = ("first_stage_layers", "last_stage_layers", "embedding_as_layer", "loss_as_layer")


@dataclass(frozen=True)
class StageLengths:
    """A strategy with the blocks of each chunk listed, compared with equal chunks."""

    listed: RankedStrategy
    equal_seconds: float | None
    """Step time with chunks as equal as whole blocks allow; None if the strategy does not fit with them."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of each chunk, in the order of the model."""
        return self.listed.run.blocks

    @property
    def gain(self) -> float | None:
        """Share of the step saved compared with equal chunks."""
        return None if self.equal_seconds is None else 1 - self.listed.seconds / self.equal_seconds

    def __str__(self) -> str:
        """The chunks in the order of the model, equal neighbours grouped: 6 with 10 blocks each, then 1 with 11."""
        runs = [(n, len(list(same))) for n, same in groupby(self.blocks)]
        (n, count), *others = runs
        first = f"{count} with {n} block{'s' * (n != 1)}{' each' * (count > 1)}"
        return ", then ".join([first, *(f"{count} with {n}" for n, count in others)])


def can_list(pricing: Pricing) -> bool:
    """Whether the stack accepts a list of blocks per chunk, and the user has not fixed any."""
    return pricing.row is not None and pricing.lists_blocks and not any(getattr(pricing.extra, n) for n in _PINNED)


def fitting_cuts(prices: RefinedPrices, candidates: Sequence[RankedStrategy]) -> list[RankedStrategy]:
    """Return strategies faster than the best of `candidates` that fit only with unequal chunks, fastest first;
    `prices` has the strategies that do not fit."""
    pricing = prices.pricing
    if not candidates or not can_list(pricing):
        return []
    best = candidates[0].seconds
    too_large = [r for r in prices.met() if not r.priced.fits and r.strategy.pp > 1 and r.strategy.layers == "auto"]
    too_large = sorted((r for r in too_large if r.seconds < best), key=lambda r: r.seconds)[:_TRIED]
    cuts = [replace(r.strategy, layers=write_layers(cut)) for r in too_large for cut in cuts_of(r.strategy, pricing)]
    cuts = runnable_strategies(pricing, dict.fromkeys(cuts))
    if not cuts:
        return []
    reserved = np.broadcast_to(pricing.held(layout_of(pricing, cuts)), len(cuts))
    fitting = [s for s, bytes_ in zip(cuts, reserved, strict=True) if bytes_ <= pricing.usable]
    timed = [r for r in prices.price(fitting[:_TIMED]) if r.priced.fits and r.seconds < (1 - GAIN) * best]
    return sorted(timed, key=lambda r: r.seconds)


def lengths(prices: RefinedPrices, best: RankedStrategy) -> StageLengths | None:
    """Return the best strategy with its uneven chunks listed; None if they are equal, without a pipeline, or if the
    stack accepts no list."""
    s, pricing = best.strategy, prices.pricing
    if s.layers != "auto":  # it does not fit with equal ones
        return StageLengths(best, None)
    if s.pp == 1 or len(set(best.run.blocks)) == 1 or not can_list(pricing):
        return None
    cuts = (equal_blocks(int(pricing.shape.layers), len(rank_of(s))), best.run.blocks)
    equal, chosen = prices.price([replace(s, layers=write_layers(cut)) for cut in cuts])
    return StageLengths(chosen, equal.seconds if equal.priced.fits else None)


def cuts_of(s: Strategy, pricing: Pricing) -> Iterator[tuple[int, ...]]:
    """Yield candidate cuts, the blocks of each chunk: with the ends counted as blocks, or with a shorter first
    rank."""
    ranks, layers = rank_of(s), pricing.model.layers + pricing.extra.mtp
    chunks = len(ranks)
    for ends in ((1, 1), (0, 1)):
        if (layers + sum(ends)) % chunks == 0:
            each = (layers + sum(ends)) // chunks
            yield (each - ends[0], *(each,) * (chunks - 2), each - ends[1])
    base = equal_blocks(layers, chunks)
    own = [i for i, rank in enumerate(ranks) if rank == 0]
    others = [i for i, rank in enumerate(ranks) if rank != 0]
    for fewer in _SHORTER:
        blocks = list(base)
        for k in range(fewer):  # from the first rank's fullest chunk to the shortest of the others, the latest first
            blocks[max(own, key=lambda i: blocks[i])] -= 1
            blocks[min(others[: len(others) - (k == 0)] or others, key=lambda i: (blocks[i], -i))] += 1
        if min(blocks[1:-1], default=1) > 0 and min(blocks) >= 0:
            yield tuple(blocks)
