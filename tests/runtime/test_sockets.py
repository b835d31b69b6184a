"""What a run opens to others: nothing beyond this host, and no message that anybody else could have written."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support import rank_cases
from support.forked_cli import Launcher
from support.quick_runs import at_work, wait_for_step
from support.rank_pool import Pool
from support.sockets import listening, poison_rendezvous
from support.struck_runs import folder_of_runs, words


@pytest.mark.usefixtures("measured")
def test_a_local_run_listens_on_loopback_only(tmp_path: Path) -> None:
    """The ranks' Gloo pairs listen, and nobody else. Were a rendezvous of torch's open, it would be poisoned here."""
    here, file = folder_of_runs(tmp_path), tmp_path / "owned"
    run = Launcher(here, *words("open", "--set", "train.steps=100000"), environment={"TMPDIR": str(here / "tmp")})
    wait_for_step(here / "runs" / "open", 1)
    processes = at_work(here)
    found = listening(processes)
    for (_, port), pid in found.items():
        if pid == run.pid:
            poison_rendezvous(port, file)
    end = time.monotonic() + (6 if run.pid in found.values() else 0)  # the agent reads its state every five seconds
    while time.monotonic() < end and not file.exists():
        time.sleep(0.1)
    run.signal(signal.SIGINT)
    run.finish()
    assert not file.exists()
    assert all(address.is_loopback for address, _ in found), found
    assert set(found.values()) == set(processes) - {run.pid}


def test_a_message_of_somebody_else_is_not_loaded(pool: Pool, tmp_path: Path) -> None:
    """Two ranks gather objects; the second has another secret, and its object would make a folder."""
    said = pool.run(2, rank_cases.gathers_with_secrets, ["a", "b"], tmp_path / "owned")
    assert all("was not signed with this run's secret" in text for text in said), said
    assert not (tmp_path / "owned").exists()
    assert pool.run(2, rank_cases.gathers_with_secrets, ["a", "a"], tmp_path / "both") == ["0 1", "0 1"]
