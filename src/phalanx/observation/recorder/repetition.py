"""A log of all that happens in one pass of a micro-batch, so that its record can be repeated without the pass.

A log lists in order all that a recorder saw: which phase and module ran, what was issued, which storages were made,
resized and freed. Two micro-batches did the same if their logs are equal: calls are counted from the micro-batch of
the pass, and storages by the pass that made them and their number in it. A log repeated for another micro-batch goes
through the recorder as the pass did, so the record of the step, its live bytes at every moment and their peak are
equal to the pass's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from phalanx.observation.recorder.position import ModuleCall
from phalanx.schedule.event import Phase
from phalanx.schedule.observation import ObservedEvent, Site

LIVES = 2**62
"""The end of a life that has not ended."""


@dataclass(slots=True)
class Life:
    """A storage's life: `born` and `died` are counts of changes of live bytes; `kind` and `module` describe it."""

    device: str
    bytes: int
    born: int
    kind: str
    module: str
    phase: str
    died: int = LIVES
    ref: Any = None
    site: Site | None = None
    """The line of the program, for results of the forward pass."""
    made_in: tuple[int, str, int] | None = None
    """Micro-batch, pass and number in it, if made in a pass with a log."""
    operation: str = ""
    """The operation that allocated it, or the first that wrote to it."""
    buffer: bool = False
    """Whether it was allocated without content."""
    saved_for: frozenset[str] = frozenset()
    """The operations that keep it for their backward pass."""
    repeats: Life | None = None
    """The life in the log that this one repeats: it has the operations."""
    model: str = ""
    """The label of the model to which a parameter or optimizer state belongs, if there are several."""


@dataclass
class Log:
    """The log of the pass `name` of a micro-batch. `self_contained`: nothing died in it but storages made by passes
    of the same micro-batch. `born`: the storages that it made, in order."""

    micro_batch: int
    name: str
    entries: list[tuple[Any, ...]] = field(default_factory=list)
    born: list[Life] = field(default_factory=list)
    self_contained: bool = True
    _at: tuple[Any, ...] = ()

    def _from_here(self, micro_batch: int | None) -> int | None:
        return None if micro_batch is None else micro_batch - self.micro_batch

    def at(self, now: tuple[Phase, ModuleCall]) -> None:
        """Note which phase and call run."""
        entry = ("at", now[0], now[1].module, self._from_here(now[1].micro_batch))
        if entry != self._at:
            self.entries.append(entry)
            self._at = entry

    def event(self, observed: ObservedEvent) -> None:
        """Note a collective or message."""
        event = replace(observed.event, micro_batch=self._from_here(observed.event.micro_batch))
        self.entries.append(("event", replace(observed, event=event)))

    def birth(self, life: Life) -> None:
        """Note a new storage."""
        life.made_in = (self.micro_batch, self.name, len(self.born))
        self.born.append(life)
        self.entries.append(("birth", life.device, life.bytes, life.kind, life.module, life.site))

    def death(self, life: Life) -> None:
        """Note the end of a storage."""
        if life.made_in is None or life.made_in[0] != self.micro_batch:
            self.self_contained = False
            return
        self.entries.append(("death", *life.made_in[1:]))


class Repeatable(Protocol):
    """The recorder of a step, to which logs are repeated: step.py."""

    clock: int
    log: Log | None

    def at(self, now: tuple[Phase, ModuleCall]) -> None:
        """Set the phase and the module's call that run now."""

    def begin(self, life: Life) -> None:
        """Count a life's bytes from now on."""

    def end(self, life: Life) -> None:
        """Count a life's bytes no longer."""

    def resize(self, key: int, size: int, owner: str) -> None:
        """Count a storage of a module with its new size."""

    def count(self, flops: int, dtype: str) -> None:
        """Count FLOPs of the call that runs now."""

    def issued(self, observed: ObservedEvent) -> None:
        """Record a collective or a message."""

    def waits_at(self, call: str, site: Site) -> None:
        """Record that the host waits at a line of the program."""

    def answered_again(self, operation: str, value: str, place: str) -> None:
        """Count a value that the program asked for and that does not exist."""


def repeat(
    recorder: Repeatable,
    log: Log,
    micro_batch: int,
    lives: Mapping[str, list[Life]],
    existing: dict[tuple[str, int], Any],
) -> list[Life]:
    """Repeat a log to a recorder, as another micro-batch; return the lives of the storages that it made.

    `lives`: by pass, the storages made by earlier passes of that micro-batch; `existing`: tensors with such a
    storage. A tensor that dies in the log is released here, and lives on if the program still holds it.
    """
    assert recorder.log is None
    mine: list[Life] = []
    phase: Phase = "F"
    for kind, *fields in log.entries:
        if kind == "birth":
            device, size, life_kind, module, site = fields
            life = Life(device, size, recorder.clock + 1, life_kind, module, phase, site=site)
            life.repeats = log.born[len(mine)]
            mine.append(life)
            recorder.begin(life)
        elif kind == "death":
            name, number = fields
            if existing.pop((name, number), None) is None:
                recorder.end((mine if name == log.name else lives[name])[number])
        elif kind == "at":
            phase, module, offset = fields
            recorder.at((phase, ModuleCall(module, None if offset is None else micro_batch + offset)))
        elif kind == "flops":
            recorder.count(*fields)
        elif kind == "event":
            (observed,) = fields
            m = observed.event.micro_batch
            event = replace(observed.event, micro_batch=None if m is None else micro_batch + m)
            recorder.issued(replace(observed, event=event))
        elif kind == "resize":
            key, _, size, owner = fields
            recorder.resize(key, size, owner)
        elif kind == "wait":
            recorder.waits_at(*fields)
        else:
            recorder.answered_again(*fields)
    return mine
