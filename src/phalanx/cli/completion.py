"""What a shell completes after --model, --cluster and --stack: the names that ship, or nothing, so that files follow.

Tables are imported only when a shell asks."""

from __future__ import annotations

from collections.abc import Iterable


def models(incomplete: str) -> list[str]:
    """Return the presets of models that begin so."""
    from phalanx.spec.model.presets import PRESETS

    return _starting(incomplete, PRESETS)


def clusters(incomplete: str) -> list[str]:
    """Return the presets of clusters that begin so."""
    from phalanx.spec.cluster.presets import PRESETS

    return _starting(incomplete, PRESETS)


def stacks(incomplete: str) -> list[str]:
    """Return the software stacks that begin so."""
    from phalanx.frameworks.registry import STACKS

    return _starting(incomplete, STACKS)


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
