"""The batch of one step of generation: which tokens of which requests a replica computes.

    prefill   tokens of a prompt, all of it or a chunk; the last chunk gives the request's first token
    decode    one token, the latest, of a request whose prompt is cached

Slots that decode come first, so that they attend together; tokens are flat, slot after slot: (1, tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

IDLE = -1
"""The request of a slot that stands in where a replica has no work and others need it: nothing is cached of it."""


@dataclass(frozen=True)
class Slot:
    """A running request's part of a step: it computes `new` tokens after `past` cached ones. `samples`: whether the
    last of them gives the next token; not so where more of the prompt follows."""

    request: int
    past: int
    new: int
    samples: bool

    @property
    def decodes(self) -> bool:
        """Whether it computes a single token after cached ones."""
        return self.new == 1 and self.past > 0

    @property
    def context(self) -> int:
        """Tokens that are cached when the step is over."""
        return self.past + self.new


@dataclass(frozen=True)
class Batch:
    """The slots of one replica in one step, those that decode first."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Batch:
        """The batch of these slots, in the order that batches have."""
        return cls(tuple(sorted(slots, key=lambda s: not s.decodes)))

    @cached_property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(s.new for s in self.slots)

    @cached_property
    def samples(self) -> int:
        """Requests that get a token."""
        return sum(s.samples for s in self.slots)

    @cached_property
    def decoding(self) -> tuple[Slot, ...]:
        """The slots that decode."""
        return tuple(s for s in self.slots if s.decodes)

    @cached_property
    def prefilling(self) -> tuple[Slot, ...]:
        """The other slots."""
        return self.slots[len(self.decoding) :]


IDLING = Batch((Slot(IDLE, 0, 1, False),))
"""What a replica without work computes where others need it: their experts are on its ranks too."""


def reads(batch: Batch, window: int | None) -> tuple[tuple[tuple[Slot, ...], int], ...]:
    """Return the groups of slots that attend together in a layer with this window, each with the keys that each of
    its queries is multiplied with: all that decode, up to the longest context; every prefill by itself."""
    groups = []
    if batch.decoding:
        groups.append((batch.decoding, max(s.context - first_key(s, window) for s in batch.decoding)))
    return (*groups, *(((s,), s.context - first_key(s, window)) for s in batch.prefilling))


def first_key(slot: Slot, window: int | None) -> int:
    """Return the first position that a token of a slot sees."""
    return 0 if window is None else max(0, slot.past + 1 - window)
