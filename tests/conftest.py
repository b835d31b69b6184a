from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pool import Pool

# Time limits belong to benchmarks: this machine may be busy.
# CI says what failed and leaves it to a person to find the smallest such case.
phases = [p for p in hypothesis.Phase if not os.environ.get("CI") or p != hypothesis.Phase.shrink]
hypothesis.settings.register_profile("phalanx", deadline=None, derandomize=bool(os.environ.get("CI")), phases=phases)
hypothesis.settings.load_profile("phalanx")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the whole session, never the user's: this machine is measured once."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("PHALANX_CACHE")
    os.environ["PHALANX_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PHALANX_CACHE"]
    else:
        os.environ["PHALANX_CACHE"] = before
