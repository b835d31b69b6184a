"""Programs that start others, rows of programs.toml; what a job gives to them, and what they start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from phalanx.spec.rows import Rows, record

OpenFile = Callable[[str], "str | None"]
"""The text of a file that a command names; None where it is not here."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts another: a row of programs.toml, which says what its fields are."""

    title: str
    names: tuple[str, ...]
    source: str
    subcommands: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    operands: int = 0
    counts: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that say a count where no option does."""
    python: bool = False
    itself: bool = False
    """Whether it is the program too: its options are the program's."""
    behind: str = ""
    allocation: bool = False
    """Whether it starts what its batch job was given."""
    keeps_options: bool = False
    """Whether its options configure the program too."""
    node_default: int | None = None
    per_node_default: int | None = None

    def knows(self, name: str) -> bool:
        """Whether it has an option; every one where its options are not listed."""
        return not self.options or name in self.known

    @property
    def known(self) -> tuple[str, ...]:
        """Its options, where they are listed."""
        return (*self.options, *self.switches, *self.counts)

    def full_name(self, name: str) -> str:
        """Return the option that a beginning of its name means, as argparse and getopt take it."""
        near = [other for other in self.known if other.startswith(name)] if len(name) > 2 else []
        return near[0] if len(near) == 1 else name


@dataclass(frozen=True)
class Given:
    """What a batch system or an operator gives a job; None: it does not say. `by`: where it says so."""

    nodes: int | None = None
    per_node: int | None = None
    """Tasks of a node."""
    tasks: int | None = None
    gpus: int | None = None
    """Of a node."""
    all_gpus: int | None = None
    by: str = ""

    @property
    def ranks(self) -> int | None:
        """GPUs of the whole job."""
        return self.all_gpus or (self.nodes * self.gpus if self.nodes and self.gpus else None)


@dataclass(frozen=True)
class ProgramLaunch:
    """A program with its words, and its ranks; None: the command leaves them open."""

    launchers: tuple[str, ...] = ()
    program: str = ""
    words: tuple[str, ...] = ()
    nodes: int | None = None
    per_node: int | None = None
    world: int | None = None
    options: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of the launchers, by name."""
    counted: Mapping[str, str] = field(default_factory=dict)
    """Options that the ranks follow from -> what they count."""
    kept: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of a launcher that configure the program."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Options that a launcher does not have -> the nearest name that it has, or ""."""
    config: str = ""
    """A launcher's configuration file."""
    missing: tuple[str, ...] = ()
    """Files of hosts that are not here."""
    asked: int | None = None
    """GPUs that the batch job asks for."""
    open: tuple[str, ...] = ()
    """Words that bring options of a launcher, which are not known."""


@cache
def launchers() -> Mapping[str, Launcher]:
    """Return every launcher by the names that it is called."""
    rows = Rows(Path(__file__).parent / "programs.toml", record(Launcher, "title"))
    return {name: launcher for launcher in rows.values() for name in launcher.names}
