"""Machines of tests are imagined, and no measurement of theirs is taken again since this one is quiet."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.measure.this_machine.quiet_now", lambda _: False)
