"""The net is asked for by its folder, `pytest tests/net`, and no part of the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out unless an argument names it or a file in it."""
    named = any(
        (config.invocation_params.dir / arg.split("::")[0]).resolve().is_relative_to(HERE) for arg in config.args
    )
    return None if named or not collection_path.is_relative_to(HERE) else True
