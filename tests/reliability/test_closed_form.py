"""Closed forms against each other, and against the simulation of the same training."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.reliability import presets
from phalanx.reliability.closed_form import (
    FailureCause,
    Saving,
    best_interval,
    daly,
    expected_wait,
    interval_with_recovery,
    shares,
    young,
)
from phalanx.reliability.monte_carlo import simulate

seconds = st.floats(1, 2000)


@given(st.floats(1e3, 1e6), st.floats(0.1, 100), seconds, seconds)
def test_without_detection_it_is_dalys(mttf: float, stall: float, restart: float, interval: float) -> None:
    cause = FailureCause("gpu", 1 / mttf, 0.0, restart)
    whole = mttf * math.exp(restart / mttf) * math.expm1((interval + stall) / mttf)
    assert float(shares(interval, [cause], Saving(stall)).useful) == pytest.approx(interval / whole, rel=1e-9)


@given(st.floats(1e3, 1e6), st.floats(0.1, 100), seconds, seconds, st.floats(0, 1), st.floats(0, 100))
def test_shares_are_of_the_whole(
    mttf: float, stall: float, restart: float, interval: float, node: float, wait: float
) -> None:
    causes = [
        FailureCause("gpu", node / mttf, 60.0, restart, wait, True),
        FailureCause("software", (1.01 - node) / mttf, 600.0, 5.0),
    ]
    of = shares(interval, causes, Saving(stall), planned=0.02)
    whole = of.useful + of.saving + of.lost + of.detection + of.restart + of.waiting + of.planned
    assert float(whole) == pytest.approx(1.0, rel=1e-9)


@given(st.floats(1e4, 1e6), st.floats(1, 30))
def test_the_best_interval_is_dalys_where_it_is_exact(mttf: float, stall: float) -> None:
    best = best_interval([FailureCause("gpu", 1 / mttf, 0.0, 60.0)], Saving(stall), 1.0)
    assert best == pytest.approx(daly(stall, mttf), rel=0.03)
    assert daly(stall, mttf) == pytest.approx(young(stall, mttf), rel=0.06)


@given(st.floats(1e3, 1e6), st.floats(1e-3, 0.1), st.floats(0, 1e4))
def test_formulas_for_the_best_interval_agree(mttf: float, stalls: float, recovery: float) -> None:
    """Daly's is where exp((tau + delta) / M) (M - tau) = M, to second order in delta / M; the one with recovery is
    Young's of a failure that comes later, and the square of a save."""
    stall = stalls * mttf
    tau = daly(stall, mttf)
    assert (mttf - tau) * math.exp((tau + stall) / mttf) == pytest.approx(mttf, rel=3e-4)
    after = interval_with_recovery(stall, mttf, recovery) - stall
    assert after**2 - stall**2 == pytest.approx(young(stall, mttf + recovery) ** 2)


@pytest.mark.parametrize("step", [0.01, 1.0, 100.0, 1e5])
def test_the_best_interval_is_whole_steps_and_the_best(step: float) -> None:
    cause = FailureCause("gpu", 1e-4, 60.0, 600.0, takes_node=True)
    best = best_interval([cause], Saving(5.0), step)
    assert best / step == pytest.approx(round(best / step))
    apart = step * math.ceil(0.02 * best / step)
    useful = [float(shares(tau, [cause], Saving(5.0)).useful) for tau in (best, best + apart, best - apart) if tau]
    assert useful[0] == max(useful)
    assert best_interval([], Saving(5.0), step) == math.inf


def test_saves_of_twice_the_time_between_failures_come_as_often_as_failures() -> None:
    """Equation 37 holds below that; from there on the interval is the time between failures itself."""
    assert [daly(stall, 50.0) for stall in (100.0, 1000.0)] == [50.0, 50.0]
    assert daly(99.0, 50.0) != 50.0


def test_the_published_example() -> None:
    """A step of 15 s, saves of 10 s, 600 s to recover, a failure every 1.667 h: every 24 steps (a public blog)."""
    assert best_interval([FailureCause("any", 1 / 6000, 0.0, 600.0)], Saving(10.0), 15.0) / 15.0 == pytest.approx(
        24, abs=1
    )


@settings(max_examples=12)
@given(
    st.floats(2e3, 5e4),
    st.floats(0.5, 60),
    st.floats(0, 600),
    st.floats(1, 600),
    st.floats(30, 3000),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_the_simulation_agrees(
    mttf: float, stall: float, detect: float, restart: float, interval: float, share: float, seed: int
) -> None:
    causes = [
        FailureCause("a", share / mttf, detect, restart),
        FailureCause("b", (1.001 - share) / mttf, 2 * detect, restart / 3),
    ]
    drawn = simulate(causes, Saving(stall), interval, wall_s=400 * mttf, trials=100, seed=seed)
    effective = drawn.useful_s / drawn.wall_s
    error = float(effective.std()) / math.sqrt(len(effective))
    assert float(effective.mean()) == pytest.approx(
        float(shares(interval, causes, Saving(stall)).useful), abs=5 * error + 0.003
    )


@settings(max_examples=12)
@given(
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from([0.0, 5.0]),
    st.floats(0, 100),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_every_second_is_accounted_for(
    until_done: bool, spares: int, stall: float, lag: float, every: int, seed: int
) -> None:
    causes = [
        FailureCause("gpu", 1e-4, 60.0, 300.0, takes_node=True, count=20),
        FailureCause("software", 5e-5, 30.0, 60.0),
    ]
    end = {"work_s": 5e5} if until_done else {"wall_s": 5e5}
    saving = Saving(stall, lag, every)
    d = simulate(causes, saving, 600.0, **end, spares=spares, repair_s=2e4, trials=40, seed=seed)
    parts = [d.useful_s, d.saving_s, d.lost_s, d.detection_s, d.restart_s, d.waiting_s]
    assert all((part >= -1e-6).all() for part in parts)
    np.testing.assert_allclose(sum(parts), d.wall_s, rtol=1e-9)
    assert (d.useful_s if until_done else d.wall_s) == pytest.approx(np.full(40, 5e5))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("causes", [[], [FailureCause("gpu", 0.0, 1.0, 1.0)]], ids=["none", "of no rate"])
def test_without_failures_only_saves_take_time(causes: list[FailureCause]) -> None:
    d = simulate(causes, Saving(10.0), 100.0, work_s=1000.0, trials=3)
    assert list(d.wall_s) == [1090.0] * 3  # nothing is saved at the very end
    assert list(simulate(causes, Saving(10.0), 100.0, work_s=90.0, trials=3).wall_s) == [90.0] * 3
    d = simulate(causes, Saving(10.0), 100.0, wall_s=1000.0, trials=3)
    assert (list(d.useful_s), list(d.saving_s)) == ([910.0] * 3, [90.0] * 3)
    d = simulate(causes, Saving(10.0), math.inf, wall_s=1000.0, trials=3)  # nothing is ever saved
    assert (list(d.useful_s), list(d.saving_s)) == ([1000.0] * 3, [0.0] * 3)
    assert float(shares(100.0, [], Saving(10.0)).useful) == pytest.approx(100 / 110)


def test_later_durability_costs_more_and_older_saves_too() -> None:
    causes = [FailureCause("gpu", 1 / 5000, 10.0, 60.0, takes_node=True)]
    for saving in (Saving(1.0, 200.0), Saving(1.0, 0.0, 4)):
        closed = float(shares(300.0, causes, saving).useful)
        assert closed < float(shares(300.0, causes, Saving(1.0)).useful)
        d = simulate(causes, saving, 300.0, wall_s=3e6, trials=40)
        assert float((d.useful_s / d.wall_s).mean()) == pytest.approx(closed, rel=0.03)


@pytest.mark.parametrize("count", [None, 0, 4])
def test_rates_are_as_unsure_as_their_counts(count: int | None) -> None:
    """Jeffreys' prior: a gamma distribution of half a failure more than was counted."""
    cause = FailureCause("gpu", 1e-4, 0.0, 0.0, count=count)
    failed = simulate([cause], Saving(0.0), 1e3, wall_s=1e6, trials=2000).failures
    shape, scale = (math.inf, 0.0) if count is None else (count + 0.5, 100 / max(count, 0.5))
    mean = 100.0 if count is None else shape * scale
    assert failed.mean() == pytest.approx(mean, rel=0.1)
    assert failed.std() == pytest.approx(math.sqrt(mean + (shape * scale**2 if count is not None else 0.0)), rel=0.1)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_after_the_loss_of_a_node_only_shared_saves_are_left(every: int) -> None:
    """As if nothing else were saved: n of them need a time without failures that long."""
    cause = FailureCause("gpu", 1 / 500, 0.0, 0.0, takes_node=True)
    d = simulate([cause], Saving(10.0, 0.0, every), 100.0, wall_s=2e5, trials=200)
    share = every * 100 / 500 / math.expm1(every * 110 / 500)
    assert float(d.useful_s.mean() / 2e5) == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("kept", [0.0, 0.75])
def test_a_wait_is_shortened_by_what_is_worked_meanwhile(kept: float) -> None:
    cause = FailureCause("gpu", 1e-3, 0.0, 0.0, takes_node=True)
    d = simulate([cause], Saving(0.0), 60.0, work_s=1e4, spares=0, repair_s=400.0, share_kept=kept, trials=20)
    np.testing.assert_allclose(d.waiting_s, d.failures * 400.0 * (1 - kept))


@pytest.mark.parametrize("spares", [0, 1, 2, 6])
def test_waiting_for_a_node(spares: int) -> None:
    cause = FailureCause("gpu", 1 / 14_000, 0.0, 0.0, takes_node=True)
    d = simulate([cause], Saving(0.0), 60.0, wall_s=2e7, spares=spares, repair_s=86_400.0, trials=20)
    waited = float(d.waiting_s.sum() / d.failures.sum())
    expected = expected_wait(spares, cause.per_s, 86_400.0)
    assert waited <= 1.05 * expected
    assert expected <= 2 * waited  # stated as approximate: never too short, at most twice too long
    for per_s in (cause.per_s, 1e-9):
        assert expected_wait(0, per_s, 86_400.0) == pytest.approx(86_400.0, rel=1e-6)


@pytest.mark.parametrize("load", [3.0, 20_000.0])
def test_an_expected_wait_is_the_mean_over_all_numbers_in_repair(load: float) -> None:
    """With as many spares as nodes that are in repair in the mean."""
    repair, spares = 1000.0, int(load)
    wait = expected_wait(spares, load / repair, repair)
    reached = repair / (repair / load + wait)  # failures pause while one waits
    numbers = range(int(2 * load + 200))
    mean = math.fsum(
        math.exp(n * math.log(reached) - reached - math.lgamma(n + 1)) * repair * max(0, n - spares + 1) / (n + 1)
        for n in numbers
    )
    assert wait == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("storage", presets.STORAGE.values(), ids=lambda row: row.name)
def test_a_node_alone_has_its_own_rate_and_each_further_one_adds_less(storage: presets.StorageRates) -> None:
    for rate, alone, most in (
        (storage.write, storage.write_bytes_per_s_per_node, storage.write_bytes_per_s),
        (storage.read, storage.read_bytes_per_s_per_node, storage.read_bytes_per_s),
    ):
        assert rate(1) == pytest.approx(min(alone, most or math.inf))
        added = np.diff([rate(n) for n in range(1, 200)])
        assert (added >= -1e-6 * alone).all()
        assert (np.diff(added) <= 1e-6 * alone).all()
