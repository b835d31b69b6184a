"""Phalanx plans, proves, runs and measures the parallel training of large models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.observation.observe import observe as observe
    from phalanx.runtime.any_module.parallelize import parallelize as parallelize

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`phalanx.api`, loaded when it is asked for; `phalanx.parallelize` and `phalanx.observe`, which need torch."""
    if name == "api":
        return import_module("phalanx.api")
    if name == "parallelize":
        from phalanx.runtime.any_module.parallelize import parallelize

        return parallelize
    if name == "observe":
        from phalanx.observation.observe import observe

        return observe
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
