"""What was read from a framework's configuration, and the account of every key in it.

    understood        keys whose value is in the layout, the job, the model or an option
    without_effect    keys that the framework has and that change neither layout, memory nor time of a step
    unknown           all others: misspelt, of another release, or of an effect that is not modelled

No key is dropped: the three together are the keys of the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.spec.errors import InputError


class Open(str):
    """A value that the file leaves open: a variable of the shell without a value, or a blank."""

    __slots__ = ()


@dataclass(frozen=True)
class Configuration:
    """A file's settings before their meaning: flat or nested as the framework has them."""

    kind: str
    settings: Mapping[str, Any]
    env: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the launcher, such as nnodes and nproc_per_node."""
    world: int | None = None
    """Processes, where the launcher or the user says so."""
    where: str = ""


@dataclass(frozen=True)
class Unknown:
    """A key without a known meaning, the nearest known one, and what is known about it."""

    key: str
    value: Any
    nearest: str | None
    reason: str


@dataclass(frozen=True)
class Facts:
    """What follows from a configuration; None: it leaves that open."""

    world: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    virtual: int | None = None
    zero: int | None = None
    shard: int | None = None
    sp: bool | None = None
    ulysses: int | None = None
    schedule: str | None = None
    layers: str | None = None
    order: str | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    global_batch: int | None = None
    seq: int | None = None
    precision: str | None = None
    recompute: str | None = None
    optimizer_offload: float | None = None
    parameter_offload: bool | None = None


@dataclass(frozen=True)
class Reading:
    """A configuration, understood. `model`: fields of ModelSpec that it names; `options`: of StackOptions."""

    configuration: Configuration
    stack: str
    release: str
    facts: Facts
    options: Mapping[str, Any]
    model: Mapping[str, Any]
    understood: Mapping[str, Any]
    without_effect: tuple[str, ...]
    unknown: tuple[Unknown, ...]
    notes: tuple[str, ...] = ()


class Keys:
    """Flat settings that are taken one by one, so that what nobody took is known at the end."""

    def __init__(self, settings: Mapping[str, Any], where: str = "") -> None:
        self.settings, self.where = dict(settings), where
        self.taken: dict[str, Any] = {}

    def take(self, *names: str) -> Any:
        """Return the value of the last of these keys that is set; None if none is, or if its value is open."""
        found = None
        for name in names:
            if name in self.settings:
                self.taken[name] = self.settings[name]
                if not isinstance(self.settings[name], Open):
                    found = self.settings[name]
        return found

    def count(self, *names: str, least: int = 1) -> int | None:
        """Return a whole number of at least `least`. Raises InputError for anything else."""
        value = self.take(*names)
        if value is None or value == "auto":
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                raise InputError(names[-1], value, "is not a whole number") from None
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(names[-1], value, "is not a whole number")
        if value < least:
            raise InputError(names[-1], value, f"must be at least {least}")
        return value

    def flag(self, *names: str) -> bool:
        """Return whether a switch is on."""
        value = self.take(*names)
        return value is True or str(value).lower() in ("true", "1", "yes", "on")

    def account(
        self, known: Iterable[str], effect: Iterable[str] = ()
    ) -> tuple[dict[str, Any], tuple[str, ...], tuple[Unknown, ...]]:
        """Return (understood, without effect, unknown) of all keys; `known` are those of the framework, `effect`
        those of them that change memory or time in a way that is not modelled."""
        names, unmodelled = set(known), set(effect)
        idle, unknown = [], []
        for key, value in self.settings.items():
            if key in self.taken:
                if isinstance(value, Open):
                    unknown.append(Unknown(key, str(value), None, "its value is left open"))
                continue
            if key in unmodelled:
                unknown.append(Unknown(key, value, key, "is known, but its effect on a step is not modelled"))
            elif key in names:
                idle.append(key)
            else:
                close = difflib.get_close_matches(key, sorted(names | set(self.taken)), n=1, cutoff=0.6)
                unknown.append(Unknown(key, value, close[0] if close else None, "is not known to this framework"))
        understood = {k: v for k, v in self.taken.items() if not isinstance(v, Open)}
        return understood, tuple(idle), tuple(unknown)
