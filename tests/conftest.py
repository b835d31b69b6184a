from __future__ import annotations

import fcntl
import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache as made_once
from pathlib import Path

import hypothesis
import pytest
import typer.testing

# Tensors here are small: a second thread computes nothing faster, and on a busy machine both wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # tables are compared as they are piped
sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks
sys.path.insert(0, str(Path(__file__).parent))  # support
from checked import pytest_pyfunc_call
from support.forked_cli import phalanx
from support.rank_pool import Pool
from support.tiny_measurement import undisturbed

from phalanx.cli import terminal

__all__ = ["pytest_pyfunc_call"]  # a hook

terminal._SILENT_S = 60.0  # as in support/preload.py
# Making every command and its options takes longer than most of them take to answer.
typer.main.get_command = typer.testing._get_command = made_once(typer.main.get_command)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it without one

# Time limits belong to benchmarks: this machine may be busy.
# CI says what failed and leaves it to a person to find the smallest such case.
phases = [p for p in hypothesis.Phase if not os.environ.get("CI") or p != hypothesis.Phase.shrink]
hypothesis.settings.register_profile("phalanx", deadline=None, derandomize=bool(os.environ.get("CI")), phases=phases)
hypothesis.settings.load_profile("phalanx")


LAST = ("spec", "schedule", "report", "validate")
"""Folders whose files take little time: at the end two workers (pytest-xdist) are then busy alike."""


_COSTLY = Path(__file__).with_name("costly.txt")
"""Tests that take long for what they add to others: each line a test, or a function with all its cases."""


@pytest.hookimpl(tryfirst=True)  # before tests marked `long` are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    costly = {line for line in _COSTLY.read_text().splitlines() if line and not line.startswith("#")}
    found = set[str]()
    for item in items:
        if names := {item.nodeid, item.nodeid.partition("[")[0]} & costly:
            item.add_marker(pytest.mark.long)
            found |= names
    if costly - found and config.args == config.getini("testpaths"):  # the whole suite was collected
        raise pytest.UsageError(f"{_COSTLY.name}: names tests that do not exist: {', '.join(sorted(costly - found))}")
    items.sort(key=lambda item: LAST.index(item.path.parent.name) if item.path.parent.name in LAST else -1)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection need look at it again, nor whoever counts the live tensors here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_others_left() -> None:
    """The same of what the files before have imported since."""
    pytest_collection_finish()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the whole session, never the user's."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("PHALANX_CACHE")
    os.environ["PHALANX_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PHALANX_CACHE"]
    else:
        os.environ["PHALANX_CACHE"] = before


@pytest.fixture(scope="session")
def measured(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """This machine with two ranks is in the cache: measured by real ranks, but briefly, once for all workers."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    ours, theirs = cache / "machines", shared / "machines"
    with theirs.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if theirs.exists():
            shutil.copytree(theirs, ours, dirs_exist_ok=True)
            return
        brief = {"phalanx.measure.worker": "support.tiny_measurement"}
        code, _, err = phalanx(cache, "measure --ranks 2", instead=brief, before=undisturbed)
        assert code == 0, err
        assert err.startswith("measuring this machine (2 ranks, float32, 1 thread each) ...\n")
        counts = re.findall(r"\((\d+) of (\d+)\)", err)
        assert counts == [(str(part + 1), str(len(counts))) for part in range(len(counts))]
        shutil.copytree(ours, theirs)


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of random models that transformers has saved, by family, type and size of a shard."""
    from support.saved_models import maker

    return maker(lambda: tmp_path_factory.mktemp("theirs"))
