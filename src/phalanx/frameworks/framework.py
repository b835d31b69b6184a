"""Names of a framework and how its files are recognized: the [framework] table of its folder's facts.toml."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Clue:
    """Keys by which a file is recognized as a framework's configuration. Clues of all frameworks are tried in their
    `order`; all parts of one must hold. Keys match with - or _."""

    order: int
    arguments: bool = False
    """Whether it looks at the arguments of a command line rather than at the tables of a file."""
    keys: tuple[str, ...] = ()
    """Of these keys at least `least` are present."""
    least: int = 1
    starts: tuple[str, ...] = ()
    """A key begins with one of these."""
    ends: tuple[str, ...] = ()
    """A key ends with one of these."""
    without: tuple[str, ...] = ()
    """None of these keys is present."""
    inside: str = ""
    """The table whose keys are looked at; "": the keys at the top."""
    anywhere: str = ""
    """A text that occurs in the file, in a key or a value at any depth."""

    def holds(self, config: Config) -> bool:
        """Whether a configuration has these keys."""
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
    """A framework: how its files are recognized and read, and what an export writes. Texts that are "" and tuples
    that are empty: it has none."""

    folder: str
    """Its folder in frameworks/."""
    stacks: tuple[str, ...]
    """Its documented stacks."""
    position: int = 0
    """Its place in lists."""
    reads: str = ""
    """What `phalanx read` calls its configuration; "": it is not read."""
    writes: str = ""
    """What `phalanx export` calls it; "": nothing is written for it."""
    file: str = ""
    """The file of an exported folder that holds its configuration."""
    file_as: str = ""
    """The table that this file is read into; "": its tables are the configuration."""
    companions: tuple[str, ...] = ()
    """What else of an exported folder its reader needs: launch, env (of train.sh), args or training_arguments."""
    python: bool = False
    """Whether it is configured in Python too; its read_python.py turns that into tables."""
    model_beside: bool = False
    """Whether the model is the config.json next to its file."""
    zero: int | None = None
    """ZeRO's level where a file states none."""
    accumulation: int | None = None
    """Micro-batches of a step where a file states none."""
    equal_chunks: bool = False
    """Whether all chunks of a pipeline have the same number of blocks unless the file lists them."""
    programs: tuple[str, ...] = ()
    """Patterns of the names of its programs: files without .py, or modules."""
    launched_by: tuple[str, ...] = ()
    """Launchers that start its program with one word, the name of its file: they tell the framework where that file
    is missing."""
    flat: bool = False
    """Whether its flags are the keys of its file, as dotted paths."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Flags of its launching scripts -> dotted path of the key that each sets."""
    base: tuple[str, ...] = ()
    """Flags whose file holds what the other flags override; "": the first word that is no flag names it."""
    default_bases: tuple[str, ...] = ()
    """Such files that hold the framework's own defaults: they need not be given."""
    python_base: str = ""
    """The Python file that --module and --config choose a configuration from."""
    needs_base: bool = False
    """Whether a key that no flag sets is open while the base file is missing, rather than at its default."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Keys whose value names a file of tables -> the table that it is read into."""
    said: Mapping[str, str] = field(default_factory=dict)
    """Names that people use -> its stacks."""
    clues: tuple[Clue, ...] = ()


def framework_of(folder: str, table: Mapping[str, Any], stacks: tuple[str, ...]) -> Framework:
    """Return the framework of a [framework] table. Raises TypeError for a part that it does not have."""
    clues = tuple(Clue(**_tuples(clue)) for clue in table.get("clues", ()))
    return Framework(folder, stacks, **_tuples(table) | {"clues": clues})


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
