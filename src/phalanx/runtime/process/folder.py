"""Folders: the cache of measurements and tokens, and the temporary ones of launchers and their ranks.

A launcher removes its folder when its ranks have ended; if it dies before them, they remove it (rank.py). If a
launcher is killed in its last moments, or together with its ranks, the next launcher removes its folder. A folder in
use is never removed: the launcher holds a lock on a file in it, its ranks inherit the lock, and the kernel releases
it when the last of them has ended, for whatever reason.
"""

import fcntl
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.spec.errors import InputError

_PREFIX, _LOCK = "phalanx-", "launcher.lock"


@contextmanager
def private_folder() -> Iterator[tuple[Path, int]]:
    """Yield a new folder that only this user can read, and the descriptor of its lock, for ranks to inherit."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / _LOCK).open("xb", buffering=0) as lock:
            with suppress(OSError):  # a file system without locks: the folder can then never count as abandoned
                fcntl.flock(lock, fcntl.LOCK_EX)
                lock.write(_host())  # not before: while it is empty, the launcher may not have locked it yet
            yield folder, lock.fileno()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the folders that killed launchers of this user left behind on this host."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):  # in use, or no launcher's
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder whose lock is free. Raises OSError if the lock is held or missing."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as lock:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.read() == _host():  # hosts may share a file system without sharing its locks
            shutil.rmtree(folder)


def _host() -> bytes:
    return platform.node().encode() + b"\n"


def cache_folder() -> Path:
    """Return the folder of cached measurements and tokens, created if need be. It is $PHALANX_CACHE, or else
    `phalanx` in the user's cache folder. Raises InputError if it cannot be created."""
    chosen = os.environ.get("PHALANX_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("cache folder", str(base), f"cannot be created ({error})", "set PHALANX_CACHE") from None
    return base
