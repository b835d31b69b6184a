"""The batch of one step of generation: the tokens that a replica computes, by request.

    prefill   tokens of a prompt, all of it or a chunk; the last chunk gives the request's first token
    decode    one token, the latest, of a request whose prompt is cached

Slots that decode come first, so that they attend together; tokens are flat, slot after slot: (1, tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

IDLE = -1
"""Placeholder request of an idle replica that must still take part in a step; nothing of it is cached."""


@dataclass(frozen=True)
class Slot:
    """A running request's part of a step: it computes `new` tokens after `past` cached ones. `samples`: whether the
    last of them yields the next token, which is false while more of the prompt follows."""

    request: int
    past: int
    new: int
    samples: bool

    @property
    def decodes(self) -> bool:
        """Whether the slot decodes: one new token after cached ones."""
        return self.new == 1 and self.past > 0

    @property
    def context(self) -> int:
        """Tokens of the request in the cache after the step."""
        return self.past + self.new


@dataclass(frozen=True)
class Batch:
    """Slots of one replica in one step; decoding slots come first."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Batch:
        """Build a batch of these slots, decoding ones first."""
        return cls(tuple(sorted(slots, key=lambda s: not s.decodes)))

    @cached_property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(s.new for s in self.slots)

    @cached_property
    def samples(self) -> int:
        """Number of requests that receive a token."""
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
"""The batch of an idle replica whose ranks hold experts that other replicas need."""


def reads(batch: Batch, window: int | None) -> tuple[tuple[tuple[Slot, ...], int], ...]:
    """Return the groups of slots that attend together in a layer with this window, each with the number of keys per
    query: all decoding slots as one group, padded to the longest context; every prefill separately."""
    groups = []
    if batch.decoding:
        groups.append((batch.decoding, max(s.context - first_key(s, window) for s in batch.decoding)))
    return (*groups, *(((s,), s.context - first_key(s, window)) for s in batch.prefilling))


def first_key(slot: Slot, window: int | None) -> int:
    """Return the first position visible to the new tokens of a slot."""
    return 0 if window is None else max(0, slot.past + 1 - window)
