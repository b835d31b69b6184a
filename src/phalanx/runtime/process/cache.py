"""The folder in which measurements and tokens are cached."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.spec.errors import InputError


def cache_folder() -> Path:
    """Where measurements and tokens are kept: $PHALANX_CACHE, else phalanx in the user's cache folder."""
    own = os.environ.get("PHALANX_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("cache folder", str(base), f"cannot be made ({error})", "set PHALANX_CACHE") from None
    return base
