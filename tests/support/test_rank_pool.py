import subprocess
import sys
from pathlib import Path

import pytest

from support import rank_cases, rank_pool
from support.fresh_process import in_fresh_process
from support.rank_pool import CaseFailed, Pool, Where


def test_results_come_by_rank(pool: Pool) -> None:
    assert pool.run(3, rank_cases.rank_and_sum) == [(0, 3.0), (1, 3.0), (2, 3.0)]
    assert pool.run(2, rank_cases.rank_and_sum) == [(0, 1.0), (1, 1.0)]


def test_a_failure_names_the_rank_and_the_pool_lives_on(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "_GRACE_S", 0.1)  # what the rank that waits would say is not asked for
    with pytest.raises(CaseFailed, match=r"rank 1: [\s\S]*ValueError: on purpose"):
        pool.run(2, rank_cases.raise_on, 1)
    assert len(pool.run(2, rank_cases.rank_and_sum)) == 2


def test_a_hung_rank_is_named_with_what_it_was_doing(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"rank 1: no answer, last seen during a nap"):
        pool.run(2, rank_cases.sleep_on, 1, timeout_s=2.0)
    assert len(pool.run(2, rank_cases.rank_and_sum)) == 2


def test_ranks_whose_tests_were_killed_leave_nothing() -> None:
    pool = Pool(Where(1, 1))
    pool.run(1, rank_cases.rank_and_sum)
    pool._pipes[0].close()  # as the kernel does
    pool._processes[0].join(30)
    assert not pool._folder.exists()
    pool.stop()


def test_all_that_forked_runs_need_is_there() -> None:
    """The server that forks them says nothing of an import that fails, and makes none of those behind it."""
    if not in_fresh_process(_is_preloaded):
        command = [sys.executable, "-c", "import support.preload"]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
        raise AssertionError(done.stderr)


def _is_preloaded() -> bool:
    return "support.preload" in sys.modules
