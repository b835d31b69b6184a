"""Reading files of an untrusted folder: regular files inside it, of bounded size.

A name is a plain file name. A link, a device, a pipe or a folder is refused before anything is read from it.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_NOT_REGULAR = (errno.ELOOP, errno.ENXIO)  # a symbolic link; a socket or device without a driver


def open_regular(path: Path) -> int:
    """Open a regular file and return its descriptor. Raises ValueError if it is not regular, OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise ValueError(f"{path.name} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is not a regular file")
    return descriptor


def size_of(path: Path) -> int:
    """Return a regular file's size in bytes. Raises ValueError if it is not regular, OSError."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    return about.st_size


def read_json(path: Path, most: int) -> Any:
    """Read a JSON file of at most `most` bytes. Raises ValueError if it is malformed or larger, OSError."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path.name} has {size} bytes, more than the {most} that are read")
        content = file.read(most)
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


def require_plain(name: object) -> str:
    """Return a file name that stays in its folder. Raises ValueError for any other name."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name or len(name) > 255:
        raise ValueError(f"{str(name)[:80]!r} is not the name of a file in the checkpoint's folder")
    return name
