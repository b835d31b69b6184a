"""Phalanx plans, proves, runs and measures the parallel training of large models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.runtime.any_module.parallelize import parallelize as parallelize

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`phalanx.parallelize`, which needs torch; planning does not."""
    if name == "parallelize":
        from phalanx.runtime.any_module.parallelize import parallelize

        return parallelize
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
