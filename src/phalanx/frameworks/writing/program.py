"""A training program of a framework: groups of settings, each with the reason for it, and the command that starts it.

Setting    a flag or a key, with its value
Group      settings that belong together, and why the plan has them
Variable   an environment variable that the layout needs, and why
Blank      what a plan cannot know, such as the data: a shell variable that must be filled in
TrainingProgram    all of these, the files that they make, and the command that one node runs
"""

from dataclasses import dataclass, field
from typing import Any

FILL_IN = "FILL-IN"
"""The value of a blank that is not filled in."""


@dataclass(frozen=True)
class Setting:
    """A flag or key with its value; True for a flag that takes none, a tuple for several words."""

    key: str
    value: Any


@dataclass(frozen=True)
class Group:
    """Settings that belong together. `why`: one or more sentences, with figures of the plan where it has them."""

    title: str
    why: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Variable:
    """An environment variable that every process needs."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Blank:
    """A shell variable for the user to fill in. `what`: a sentence that describes it; `default`: its value where the
    plan knows one."""

    name: str
    what: str
    default: str = FILL_IN


@dataclass(frozen=True)
class TrainingProgram:
    """A plan as a program of a framework."""

    title: str
    """The framework and its release."""
    groups: tuple[Group, ...]
    start: str
    """The line of train.sh that starts the ranks of one node; reads NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT."""
    variables: tuple[Variable, ...] = ()
    blanks: tuple[Blank, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Files next to train.sh, by name."""
    arguments: bool = False
    """Whether the settings are arguments in train.sh (else they stand in one of the files)."""
    notes: tuple[str, ...] = ()
    """Parts of the plan that do not take effect, and other things that a user should know."""


def settings(*pairs: tuple[str, Any]) -> tuple[Setting, ...]:
    """Return settings of (key, value); those whose value is None or False are left out."""
    return tuple(Setting(key, value) for key, value in pairs if value is not None and value is not False)


def group(title: str, why: str, values: dict[str, Any]) -> Group:
    """Return a group of a dictionary's entries, False and None included."""
    return Group(title, why, tuple(Setting(key, value) for key, value in values.items()))
