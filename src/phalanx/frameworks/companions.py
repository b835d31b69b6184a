"""Files that a file names: found where they lie, among those that were given too, next to it or above it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError

LARGEST = 2**20
"""Bytes of the largest file that is read."""
MISSING = "is not here: give it too"
_UNKNOWN = re.compile(r"(\$\w+|\$\{\w+\}|\$\((.*\bpwd|(dirname|realpath) [^()]*)\)|`pwd`)/+")
_ABOVE = 3
"""Folders above a file in which a path relative to a repository's root is looked for."""


@dataclass
class Companions:
    """Where the files that a configuration names are looked for. `home`: its folder; `given`: files of the command
    line; `written`: text by name of files that the script itself writes; `opened`: files that were read so far."""

    home: Path
    given: Sequence[Path] = ()
    written: dict[str, str] = field(default_factory=dict)
    opened: list[Path] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    """Files that exist and cannot be read -> why."""

    def why(self, name: str) -> str:
        """Say why a named file has no text."""
        return f"{self.unread[name]}: give one that can be read" if name in self.unread else MISSING

    def find(self, name: str, directory: str = "") -> Path | None:
        """Return the path of a named file; None where it is nowhere. A folder in front that only a shell knows is
        left out: `$PWD/a.json` is `a.json`. `directory`: where the program that reads it starts, relative to
        `home`."""
        name = name[start.end() :] if (start := _UNKNOWN.match(name)) else name
        for path in self._places(name, directory):
            try:
                if path.is_file():
                    return path
            except (OSError, ValueError):  # a name that no file can have
                return None
        return None

    def _places(self, name: str, directory: str) -> Iterator[Path]:
        last = name.rstrip("/").rpartition("/")[2]
        yield from (path for path in self.given if last and path.name == last)
        if not name or len(name) > 1000:
            return
        if Path(name).is_absolute():
            yield Path(name)
            yield self.home / last
            return
        yield self.home / directory / name
        yield self.home / name
        yield from (above / name for above, _ in zip(self.home.absolute().parents, range(_ABOVE), strict=False))
        yield Path(name)
        yield self.home / last  # a copy next to it, whatever folder it was in

    def text(self, name: str, directory: str = "") -> str | None:
        """Return the text of a named file; None where it is missing or cannot be read (`why` tells which)."""
        written = {str(Path(path)): text for path, text in self.written.items()}
        if (text := written.get(str(Path(name)))) is not None:
            return text
        path = self.find(name, directory)
        if path is None:
            return None
        try:
            text = read_text(path, "file", LARGEST)
        except InputError as error:
            self.unread[name] = error.reason
            return None
        self.opened.append(path)
        return text
