"""Programs that start others (rows of programs.toml), the nodes and GPUs that a job gives them, and what they
start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from phalanx.spec.rows import Rows, record

OpenFile = Callable[[str], "str | None"]
"""Name of a file that a command names -> its text; None where it is missing."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts another: a row of programs.toml, which describes the fields."""

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
    """Count -> the variable that states it where no option does."""
    python: bool = False
    itself: bool = False
    """Whether it is also the program: its options are the program's."""
    behind: str = ""
    handed: bool = False
    allocation: bool = False
    """Whether it starts ranks on the nodes of its batch job."""
    keeps_options: bool = False
    """Whether its options configure the program too."""
    node_default: int | None = None
    per_node_default: int | None = None

    def knows(self, name: str) -> bool:
        """Whether it has an option; true for any where its options are not listed."""
        return not self.options or name in self.known

    @property
    def known(self) -> tuple[str, ...]:
        """Names of its options, as far as they are listed."""
        return (*self.options, *self.switches, *self.counts)

    def full_name(self, name: str) -> str:
        """Return the option that a prefix of its name abbreviates, as argparse and getopt accept it; others
        unchanged."""
        near = [other for other in self.known if other.startswith(name)] if len(name) > 2 else []
        return near[0] if len(near) == 1 else name


@dataclass(frozen=True)
class Allocation:
    """Nodes and GPUs that a batch system or an operator gives a job; None: not stated."""

    nodes: int | None = None
    per_node: int | None = None
    """Tasks of a node."""
    tasks: int | None = None
    """Tasks of the job."""
    gpus: int | None = None
    """GPUs of a node."""
    all_gpus: int | None = None
    """GPUs of the job."""
    kind: str = ""
    """What its GPUs are called; "": not stated."""
    by: str = ""
    """What states them: `#SBATCH`, `#PBS`, or the kind of a manifest."""

    @property
    def ranks(self) -> int | None:
        """GPUs of the whole job."""
        return self.all_gpus or (self.nodes * self.gpus if self.nodes and self.gpus else None)


@dataclass(frozen=True)
class ProgramLaunch:
    """A program with its words, and the ranks of it that are started; None: the command does not state them."""

    launchers: tuple[str, ...] = ()
    program: str = ""
    words: tuple[str, ...] = ()
    nodes: int | None = None
    per_node: int | None = None
    world: int | None = None
    options: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of the launchers, by name."""
    counted: Mapping[str, str] = field(default_factory=dict)
    """Options from which the number of ranks follows -> what they count."""
    kept: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of a launcher that configure the program."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Options that a launcher does not have -> the nearest name that it has, or ""."""
    config: str = ""
    """A launcher's configuration file."""
    missing: tuple[str, ...] = ()
    """Files of hosts that were not given."""
    asked: int | None = None
    """GPUs that the batch job asks for."""
    kind: str = ""
    """What they are called; "": not stated."""
    unranked: int | None = None
    """Processes that srun starts and that find no rank in their environment."""
    open: tuple[str, ...] = ()
    """Variables that bring options of a launcher and are not known."""


@cache
def launchers() -> Mapping[str, Launcher]:
    """Return every launcher by the names that it is called."""
    rows = Rows(Path(__file__).parent / "programs.toml", record(Launcher, "title"))
    return {name: launcher for launcher in rows.values() for name in launcher.names}
