"""What happens in one pass of a micro-batch, noted so that it can be repeated without the pass.

A log holds all that a recorder saw, in order: which phase and module ran, what was issued, which storages were made,
resized and freed. Two micro-batches did the same if their logs are equal: calls are counted from the micro-batch of
the pass, and storages by the pass that made them and their number in it. A log repeated for another micro-batch goes
through the recorder as the pass did, so the record of the step, its live bytes at every moment and their peak are
those of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from phalanx.observation.recorder.position import Call
from phalanx.schedule.event import Phase
from phalanx.schedule.observation import Observed, Site

LIVES = 2**62
"""When what is still alive died."""


@dataclass(slots=True)
class Life:
    """A storage's life: `born` and `died` count changes of live bytes; `kind` and `module` say what it is."""

    device: str
    bytes: int
    born: int
    kind: str
    module: str
    phase: str
    died: int = LIVES
    ref: Any = None
    place: tuple[str, int, str] | None = None
    """File, line and function of the program, of what the forward pass returned."""
    made_in: tuple[int, str, int] | None = None
    """Micro-batch, pass, and number in it, of what a pass made whose log was written."""


@dataclass
class Log:
    """The log of the pass `name` of a micro-batch. `own`: nothing died in it but what the passes of the same
    micro-batch had made. `born`: what it made, in order."""

    micro_batch: int
    name: str
    entries: list[tuple[Any, ...]] = field(default_factory=list)
    born: list[Life] = field(default_factory=list)
    own: bool = True
    _at: tuple[Any, ...] = ()

    def _from_here(self, micro_batch: int | None) -> int | None:
        return None if micro_batch is None else micro_batch - self.micro_batch

    def at(self, now: tuple[Phase, Call]) -> None:
        """Note which phase and call run."""
        entry = ("at", now[0], now[1].module, self._from_here(now[1].micro_batch))
        if entry != self._at:
            self.entries.append(entry)
            self._at = entry

    def event(self, observed: Observed) -> None:
        """Note a collective or message."""
        event = replace(observed.event, micro_batch=self._from_here(observed.event.micro_batch))
        self.entries.append(("event", replace(observed, event=event)))

    def birth(self, life: Life) -> None:
        """Note a new storage."""
        life.made_in = (self.micro_batch, self.name, len(self.born))
        self.born.append(life)
        self.entries.append(("birth", life.device, life.bytes, life.kind, life.module, life.place))

    def death(self, life: Life) -> None:
        """Note the end of a storage."""
        if life.made_in is None or life.made_in[0] != self.micro_batch:
            self.own = False
            return
        self.entries.append(("death", *life.made_in[1:]))


class Recorder(Protocol):
    """What notes a step: any_step.py."""

    clock: int
    log: Log | None

    def at(self, now: tuple[Phase, Call]) -> None:
        """Say which phase and module's call run now."""

    def begin(self, life: Life) -> None:
        """Count a life's bytes from now on."""

    def end(self, life: Life) -> None:
        """Count a life's bytes no longer."""

    def resize(self, key: int, size: int, owner: str) -> None:
        """Count a storage of a module with its new size."""

    def count(self, flops: int, dtype: str) -> None:
        """Count FLOPs of what runs now."""

    def issued(self, observed: Observed) -> None:
        """Record a collective or a message."""

    def waits_at(self, call: str, site: Site) -> None:
        """Record that the host waits at a line of the program."""

    def answered_again(self, what: str, value: str, place: str) -> None:
        """Count a value that was asked for and does not exist."""


def repeat(
    recorder: Recorder,
    log: Log,
    micro_batch: int,
    lives: Mapping[str, list[Life]],
    held: dict[tuple[str, int], Any],
) -> list[Life]:
    """Let a recorder see what a log holds, as of another micro-batch; return the lives of what that made.

    `lives`: by pass, what the earlier passes of that micro-batch made; `held`: of that, tensors that exist. One that
    dies in the log is let go of, and lives on where the program still holds it.
    """
    assert recorder.log is None
    mine: list[Life] = []
    phase: Phase = "F"
    for kind, *of in log.entries:
        if kind == "birth":
            device, size, what, module, place = of
            life = Life(device, size, recorder.clock + 1, what, module, phase, place=place)
            mine.append(life)
            recorder.begin(life)
        elif kind == "death":
            name, number = of
            if held.pop((name, number), None) is None:
                recorder.end((mine if name == log.name else lives[name])[number])
        elif kind == "at":
            phase, module, offset = of
            recorder.at((phase, Call(module, None if offset is None else micro_batch + offset)))
        elif kind == "flops":
            recorder.count(*of)
        elif kind == "event":
            (observed,) = of
            m = observed.event.micro_batch
            event = replace(observed.event, micro_batch=None if m is None else micro_batch + m)
            recorder.issued(replace(observed, event=event))
        elif kind == "resize":
            key, _, size, owner = of
            recorder.resize(key, size, owner)
        elif kind == "wait":
            recorder.waits_at(*of)
        else:
            recorder.answered_again(*of)
    return mine
