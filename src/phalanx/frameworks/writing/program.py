"""A training program in a framework's own words: groups of settings, each with the reason for it, and what starts it.

Setting    a flag or a key, with its value
Group      settings that belong together, and why the plan has them
Variable   an environment variable that the layout needs, and why
Blank      what a plan cannot know, such as the data: a shell variable that must be filled in
TrainingProgram    all of these, the files that they make, and the command that one node runs
"""

from dataclasses import dataclass, field
from typing import Any

FILL_IN = "FILL-IN"
"""What stands in place of a blank."""


@dataclass(frozen=True)
class Setting:
    """A flag or key, and its value: True for a flag without one; a tuple for several words."""

    key: str
    value: Any


@dataclass(frozen=True)
class Group:
    """Settings that belong together. `why`: one or more sentences, of the plan's figures where it has them."""

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
    """A shell variable to be filled in. `default`: what it is where the plan knows it, else FILL_IN."""

    name: str
    what: str
    default: str = FILL_IN


@dataclass(frozen=True)
class TrainingProgram:
    """A plan in a framework's words."""

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
    """What a user should know who expects all of the plan to take effect."""


def settings(*pairs: tuple[str, Any]) -> tuple[Setting, ...]:
    """Return settings of (key, value); those whose value is None or False are left out."""
    return tuple(Setting(key, value) for key, value in pairs if value is not None and value is not False)


def group(title: str, why: str, values: dict[str, Any]) -> Group:
    """Return a group of a dictionary's entries, False and None included."""
    return Group(title, why, tuple(Setting(key, value) for key, value in values.items()))
