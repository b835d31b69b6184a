"""Phalanx plans, proves, runs and measures the parallel training of large models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.runtime.any_module.parallelize import parallelize as parallelize
    from phalanx.verify.observation.function import observe as observe

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`phalanx.parallelize` and `phalanx.observe`, which need torch; planning does not."""
    if name == "parallelize":
        from phalanx.runtime.any_module.parallelize import parallelize

        return parallelize
    if name == "observe":
        from phalanx.verify.observation.function import observe

        return observe
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
