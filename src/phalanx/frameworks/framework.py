"""Names of a framework and how its files are recognized: the [framework] table of its folder's facts.toml."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Clue:
    """What tells a framework's configuration by its keys. Clues of all frameworks are tried by `order`; of one, all
    that is stated must hold."""

    order: int
    arguments: bool = False
    """Whether it is about the arguments of a command line, and not about tables."""
    keys: tuple[str, ...] = ()
    """Keys, at least `least` of them present."""
    least: int = 1
    starts: tuple[str, ...] = ()
    """Beginnings of keys, at least one of them present."""
    ends: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    inside: str = ""
    """The table whose keys are meant; "": those at the top."""
    anywhere: str = ""
    """A key at any depth."""

    def holds(self, config: Config) -> bool:
        """Whether a configuration has what the clue says, keys written with - or _."""
        args, launched = config.get("args"), "launch" in config
        on_command_line = isinstance(args, Mapping) and launched
        if on_command_line is not self.arguments:
            return False
        tables = args if on_command_line else config.get(self.inside) if self.inside else config
        if not isinstance(tables, Mapping):
            return False
        names = {str(name).replace("-", "_") for name in tables}
        return (
            (not self.keys or len(names.intersection(self.keys)) >= self.least)
            and (not self.starts or any(name.startswith(self.starts) for name in names))
            and (not self.ends or any(name.endswith(self.ends) for name in names))
            and not names.intersection(self.without)
            and (not self.anywhere or self.anywhere in json.dumps(config, default=str).replace("-", "_"))
        )


@dataclass(frozen=True)
class Framework:
    """A framework by its folder."""

    folder: str
    stacks: tuple[str, ...]
    """Its documented stacks."""
    position: int = 0
    """Its place in lists."""
    reads: str = ""
    """What `phalanx read` calls its configuration; "": it is not read."""
    writes: str = ""
    """What `phalanx export` calls it; "": nothing is written for it."""
    file: str = ""
    """The file of an exported folder that its configuration stands in."""
    file_as: str = ""
    """The table that this file is read into; "": it is the whole."""
    companions: tuple[str, ...] = ()
    """What else of the folder its reader takes: launch, env (of train.sh), args or training_arguments."""
    python: bool = False
    """Whether it is configured in Python too, which its read_python.py takes as tables."""
    model_beside: bool = False
    """Whether the model is the config.json next to its file."""
    zero: int | None = None
    """ZeRO's level where a file leaves it open."""
    accumulation: int | None = None
    """Micro-batches of a step where a file leaves them open."""
    equal_chunks: bool = False
    """Whether every chunk of a pipeline has as many blocks, where nothing lists them."""
    programs: tuple[str, ...] = ()
    """Patterns of its programs' names, files without .py or modules."""
    launched_by: tuple[str, ...] = ()
    """Launchers of programs whose one word names its file, which tell it where that file is not here."""
    flat: bool = False
    """Whether its flags are the keys of its file, with dots between its tables."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Flags of its launching scripts -> the path that each sets."""
    base: tuple[str, ...] = ()
    """Flags that name a file which the others are laid over; "": a word that is no flag does."""
    default_bases: tuple[str, ...] = ()
    """Such files that hold the framework's defaults, which readers know."""
    python_base: str = ""
    """Where the Python configuration of --module and --config stands."""
    needs_base: bool = False
    """Whether its flags alone say nothing of what they do not name."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Keys that name a file of tables -> the table that it is read into."""
    said: Mapping[str, str] = field(default_factory=dict)
    """What people call its stacks."""
    clues: tuple[Clue, ...] = ()


def framework_of(folder: str, table: Mapping[str, Any], stacks: tuple[str, ...]) -> Framework:
    """Return the framework of a [framework] table. Raises TypeError for a part that it does not have."""
    clues = tuple(Clue(**_tuples(clue)) for clue in table.get("clues", ()))
    return Framework(folder, stacks, **_tuples(table) | {"clues": clues})


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
