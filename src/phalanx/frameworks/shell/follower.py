"""The base of what follows a script: its records (programs started, files written, open decisions), and the methods
by which commands, branches and programs follow one another."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.frameworks.shell.invocation import Fork, Invocation
from phalanx.frameworks.shell.nodes import Assignment, Chain, Node
from phalanx.frameworks.shell.scope import Scope, plain

Include = Callable[[str], "str | None"]
"""Path of a script that another one calls -> its text; None where it is missing."""
Submitted = Callable[[str], Mapping[str, str]]
"""The variables that a batch system sets for a script, by what it asks for."""


@dataclass
class Follower(ABC):
    """Records of a script that is followed. `include`, `submitted`: as script.follow has them; `batch`: scripts that
    a batch system gets; `prefix`: launchers in front of the shell that runs commands; `depth`: scripts, functions and
    substitutions inside one another."""

    include: Include
    submitted: Submitted
    invocations: list[Invocation] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    prefix: tuple[str, ...] = ()
    depth: int = 0
    references: dict[str, set[str]] = field(default_factory=dict)
    """Variable -> variables that its value refers to."""
    outer: set[str] = field(default_factory=set)
    """Variables that the command which started the present shell refers to."""
    unset: set[str] = field(default_factory=set)
    """Variables of the environment that the latest condition took as unset."""

    @abstractmethod
    def node(self, node: Node, scope: Scope) -> bool | None:
        """Follow any part of a script; return its status, None where only a running shell could tell."""

    @abstractmethod
    def chain(self, chain: Chain, scope: Scope) -> bool | None:
        """Follow commands one after the other."""

    @abstractmethod
    def text(self, text: str, scope: Scope) -> bool | None:
        """Follow a text in this shell."""

    @abstractmethod
    def assign(self, assignment: Assignment, scope: Scope) -> None:
        """Set a variable or an array."""

    def contents(self, name: str, scope: Scope) -> str | None:
        """Return the text of a file that the script wrote, or that lies at this path; None where there is none."""
        name = plain(name)
        text = self.files.get(name)
        inside = not name.startswith("/") and scope.directory
        return self.include(f"{scope.directory}/{name}" if inside else name) if text is None else text

    def closure(self, names: set[str]) -> frozenset[str]:
        """Return some variables with all that their values refer to, directly or not."""
        closed = names | self.outer
        waiting = list(closed)
        while waiting:
            for name in self.references.get(waiting.pop(), ()):
                if name not in closed:
                    closed.add(name)
                    waiting.append(name)
        return frozenset(closed)
