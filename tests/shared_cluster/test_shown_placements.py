"""Placements in words: gains and costs are shares of the shown times, and each says what it is a share of."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.report.style import seconds
from phalanx.shared_cluster.placement import report

_BASE = 2.0


def _placed(step_s: float, bound_s: float = 1.0, exact: bool = False) -> Any:
    hosts = [(0, range(8)), (1, range(8, 16))]
    placement = SimpleNamespace(
        strategy="tp=8,dp=2",
        world=16,
        cluster=SimpleNamespace(name="a cluster", tiers=()),
        ranks_by_host=lambda: iter(hosts),
    )
    gap = step_s / bound_s - 1
    return SimpleNamespace(
        placement=placement, seconds=step_s, bound_s=bound_s, gap=gap, exact=exact, tried=1234, order=None
    )


def _job(options: str = "") -> Any:
    return SimpleNamespace(
        job=SimpleNamespace(global_batch=64, seq=1000), stack="a stack", options=options, strategy="tp=4,dp=4"
    )


def _share(line: str) -> float:
    return float(re.findall(r"([-+]?[0-9.]+)%", line)[0]) / 100


@pytest.mark.parametrize("slower", [1.0, 1.0004, 1.02, 1.5, 3.0])
def test_what_the_free_gpus_cost_is_a_share_of_the_tokens(slower: float) -> None:
    """As many tokens as a step has, in the time of each: the rest of one rate is the share that is lost."""
    first, _, last = report.lines(_job(), _placed(_BASE * slower), _placed(_BASE))
    assert "16 ranks on 2 nodes of a cluster" in first
    assert f"{64_000 / (_BASE * slower):,.0f} tokens/s under a stack" in first
    if slower < 1.001:
        assert last == "as fast as on this cluster with every GPU free"
    else:
        assert seconds(_BASE) in last
        lost = 1 - (64_000 / (_BASE * slower)) / (64_000 / _BASE)
        assert _share(last) == pytest.approx(lost, abs=6e-4)


@pytest.mark.parametrize("bound", [0.5, 1.0, 1.9, 1.9995, 2.0])
def test_the_room_above_a_bound_is_a_share_of_the_step(bound: float) -> None:
    _, middle, _ = report.lines(_job(), _placed(_BASE, bound), _placed(_BASE))
    assert "1,234" in middle
    if _BASE / bound > 1.001:
        assert seconds(bound) in middle
        assert _BASE * (1 - _share(middle)) == pytest.approx(bound, abs=2e-3)
    else:
        assert "it reaches the bound" in middle
    assert "all 1,234 were priced" in list(report.lines(_job(), _placed(_BASE, bound, True), _placed(_BASE)))[1]


@pytest.mark.parametrize("other", [1.0, 1.6, 1.99, 2.0, 4.0])
def test_a_strategy_that_is_faster_is_so_by_the_shown_share(other: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "gains", lambda own, faster: ["tp stays on nvlink"])
    choices = [SimpleNamespace(job=_job(), placed=_placed(other * (1 + 0.1 * i), 0.9, i == 0)) for i in range(7)]
    said = report.better(_job(), _placed(_BASE), choices)  # type: ignore[arg-type]
    if other < _BASE:
        assert f"tp=4,dp=4: {seconds(other)} a step, {64_000 / other:,.0f} tokens/s" in said
        assert _share(said) == pytest.approx(_BASE / other - 1, abs=6e-4)
        assert said.endswith("(tp stays on nvlink)")
    else:
        assert "none is faster" in said
    told = report.better(_job("an option"), _placed(_BASE), [choices[0]])  # type: ignore[list-item]
    assert "an option" not in told
    choices[0].job.options = "an option"
    assert ("(an option; tp stays on nvlink)" in report.better(_job(), _placed(_BASE), choices)) is (other < _BASE)  # type: ignore[arg-type]
    grid = report.alternatives_table(_placed(_BASE), choices)  # type: ignore[arg-type]
    rows = list(zip(*(column.cells for column in grid.columns), strict=True))
    assert [row[1] for row in rows] == [seconds(choice.placed.seconds) for choice in choices[: len(rows)]]
    assert len(rows) < len(choices)
    for row, choice in zip(rows, choices, strict=False):
        assert _BASE * (1 + _share(str(row[2]))) == pytest.approx(choice.placed.seconds, abs=2e-3)
        assert row[3] == ("exact" if choice.placed.exact else seconds(0.9))
