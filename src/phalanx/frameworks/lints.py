"""Lints of all frameworks: from their folders, and common ones.

A corrected twin of every case yields nothing (tests/frameworks/test_read.py).
"""

from __future__ import annotations

from difflib import SequenceMatcher

from phalanx.frameworks.configuration import Config, Configuration
from phalanx.frameworks.mistakes import Found, Lint, Mistake
from phalanx.frameworks.parts import lints_of
from phalanx.frameworks.registry import FRAMEWORKS

_ALIKE = 0.82
"""How alike a name has to be to one that exists to be a slip of it."""


def _typo(c: Config, x: Configuration) -> Found:
    """Other dialects with the same tables (GPT-NeoX, axolotl) have keys of their own."""
    dialect = {"base_model", "deepspeed", "fsdp"} & set(c) or x.layout.pp is not None
    if x.kind not in ("deepspeed", "accelerate") or dialect:
        return
    for key, near in x.unknown.items():
        name = key.rpartition(".")[2]
        if not near or key.startswith("_"):
            continue
        shortened = set(name.split("_")) < set(near.split("_")) and len(name.split("_")) > 2
        if shortened or SequenceMatcher(None, name, near).ratio() > _ALIKE:
            yield key, "is no key of the framework, which ignores it", f"did you mean {near}"


_COMMON = (Lint("silent-typo", "deepspeedai/DeepSpeed#653, #1103", _typo),)
LINTS: tuple[Lint, ...] = tuple(lint for framework in FRAMEWORKS.values() for lint in lints_of(framework)) + _COMMON


def lint(config: Config, read: Configuration) -> list[Mistake]:
    """Return the mistakes of a configuration, in the order of LINTS."""
    return [
        Mistake(lint.name, key, problem, remedy, lint.issue)
        for lint in LINTS
        for key, problem, remedy in lint.examine(config, read)
    ]
