"""Every picture by name: what it shows, the function that draws it, and the command that draws it with `--plot`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.report.pictures.figure import Picture
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class PictureEntry:
    """A picture that `phalanx learn draw` knows."""

    what: str
    draw: str
    """The function that draws it, `module:function` in the package; its parameters are the options that it takes."""
    of: str = ""
    """The variant, where the function returns one that draws."""
    instead: str = ""
    """The command that draws the same for the user's own question, without `phalanx`."""

    @property
    def drawing(self) -> Callable[..., Picture]:
        """The function that draws it, imported."""
        module, _, name = self.draw.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"phalanx.{module}"), name)
        return function(self.of) if self.of else function


PICTURES = Rows(Path(__file__).with_suffix(".toml"), record(PictureEntry))
OPTIONS = ("model", "cluster", "gpus", "batch", "seq", "ranks", "params")
"""The options that `phalanx learn draw` passes to pictures."""
_MOST = {"seq": 999_999, "ranks": 10**7, "gpus": 10**7, "batch": 10**9}
"""The largest values that are drawn."""


def options_of(name: str) -> list[str]:
    """Return the options that a picture takes."""
    return [f"--{key}" for key in inspect.signature(PICTURES[name].drawing).parameters if key in OPTIONS]


def picture(name: str, options: Mapping[str, Any] | None = None) -> Picture:
    """Draw a picture by name. Raises InputError for an unknown one, or for an option that it does not take."""
    options = options or {}
    if name not in PICTURES:
        raise InputError("picture", name, "is not known", nearest(name, PICTURES))
    takes = options_of(name)
    for key, value in options.items():
        if f"--{key}" not in takes:
            remedy = f"it takes {', '.join(takes) or 'no options'}"
            raise InputError(key, value, f"is nothing that {name} depends on", remedy)
    for key, most in _MOST.items():
        if options.get(key, 0) > most:
            raise InputError(key, options[key], "is too much to draw", f"use at most {most:,}")
    return PICTURES[name].drawing(**options)
