"""The folder in which measurements and tokens are cached."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.spec.errors import InputError


def cache_folder() -> Path:
    """Return the folder of cached measurements and tokens, created if need be.

    It is $PHALANX_CACHE, or else `phalanx` in the user's cache folder. Raises InputError if it cannot be created.
    """
    chosen = os.environ.get("PHALANX_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("cache folder", str(base), f"cannot be created ({error})", "set PHALANX_CACHE") from None
    return base
