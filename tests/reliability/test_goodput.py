"""A training with its failures: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import phalanx

import phalanx as face
from phalanx.planning.expense.rates import GivenRates
from phalanx.planning.tables.table import Sheet
from phalanx.reliability.answer import Goodput, goodput
from phalanx.reliability.closed_form import Saving, daly, expected_wait, young
from phalanx.reliability.conditions import (
    Conditions,
    TrainingJob,
    _own_state_bytes,
    premise_of,
    require_progress,
)
from phalanx.reliability.conditions_by_name import conditions_of
from phalanx.reliability.presets import (
    DEFAULT_FAILURES,
    FAILURES,
    HARDWARE,
    RESTARTS,
    STORAGE,
    UNEXPECTED,
    failures_for,
    failures_named,
)
from phalanx.reliability.report import _figures, long, view
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer

_MODEL = {
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "gpus": 64,
    "batch": 128,
    "seq": 8192,
    "strategy": "tp=8,zero=1",
}
_LINE = "--model llama3-8b --cluster dgx-h100 --gpus 64 --batch 128 --seq 8192 --strategy tp=8,zero=1"
_TRAINED = TrainingJob(6.0, 2**24, 16_384, 2048, 128, "H100-SXM5-80GB", 5.7e12, 16_384)


def _ask(given: Conditions | None = None, **how: float) -> Goodput:
    return goodput(**_MODEL, given=given, **(how or {"days": 100.0}))  # type: ignore[arg-type]


def test_tokens_and_days_ask_the_same() -> None:
    by_days = _ask(days=300.0)
    by_tokens = _ask(tokens=by_days.tokens)
    assert by_tokens.days == pytest.approx(300.0, rel=0.01)
    assert by_days.tokens_per_day == pytest.approx(by_days.tokens / 300)
    assert face.goodput is goodput


def test_what_does_not_fit_is_said_before_its_tokens(tmp_path: Path) -> None:
    """Of every answer about a step, and of none that fits."""
    line = _LINE.replace("tp=8,zero=1", "dp=64").split()
    for words in (
        ["simulate", "goodput", *line, "--days", "30"],
        ["simulate", *line, "--slow", "3:1.2"],
        ["predict", *line],
    ):
        first = phalanx(tmp_path, *words)[1].splitlines()[0]
        assert first.startswith("does not fit: the fullest rank needs "), words
        assert first.endswith(" of 77.6 GiB; the figures below assume enough memory")
    fitting = ["simulate", "goodput", *_LINE.split(), "--stack", "megatron", "--tokens", "1T"]
    _, shown, notes = phalanx(tmp_path, *fitting)
    assert "does not fit" not in shown
    assert notes.count("megatron is taken for megatron-core") == 1
    assert _ask().question.overfull == ""


def test_the_shares_are_of_all_the_time() -> None:
    answer = _ask()
    assert sum(answer.shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert answer.effective_low_share <= answer.effective_share <= answer.effective_high_share
    assert answer.effective_share == pytest.approx(answer.effective_closed_form_share, abs=0.01)


def test_a_checkpoint_has_the_bytes_of_its_layout() -> None:
    parameters = 8_030_261_248
    assert _ask().checkpoint_bytes == 14 * parameters
    fsdp = goodput(**{**_MODEL, "strategy": "zero=3", "stack": "torchtitan"}, days=1)  # type: ignore[arg-type]
    assert fsdp.checkpoint_bytes == 12 * parameters
    # r (inputs + outputs) of the seven products of 32 blocks: 41,943,040 adapters' parameters.
    adapters = goodput(**{**_MODEL, "strategy": "zero=3"}, stack="accelerate", options={"lora": 16}, days=1)  # type: ignore[arg-type]
    assert adapters.checkpoint_bytes == 12 * 41_943_040


def test_more_of_anything_bad_is_worse() -> None:
    plain = Conditions(interval_s=1800.0, spares=20)
    best = float(_ask(plain).effective_closed_form_share)
    for worse in (
        replace(plain, restart="manual"),
        replace(plain, mttf_s=3600.0),
        replace(plain, interval_s=4 * 3600.0),
        replace(plain, spares=0),
        replace(plain, synchronous=True),
        replace(plain, detect_s=7200.0),
    ):
        assert _ask(worse).effective_closed_form_share < best, worse


def test_spares_are_the_cheapest() -> None:
    for answer in (
        _ask(),
        goodput(**{**_MODEL, "gpus": 2048, "batch": 512}, days=10, given=Conditions(failures="ant-a100")),
    ):  # type: ignore[arg-type]
        best = min(answer.spare_losses, key=lambda s: s.gpu_hours_per_useful)
        chosen = next(s for s in answer.spare_losses if s.spares == answer.spares)
        assert chosen.gpu_hours_per_useful == pytest.approx(best.gpu_hours_per_useful, rel=0.005)


def test_fewer_and_more_spares_are_near() -> None:
    assert [loss.spares for loss in _ask(Conditions(spares=8)).spare_losses] == [0, 2, 4, 8, 9, 16]
    most = _ask(Conditions(spares=100_000), days=1, trials=1)
    assert [loss.spares for loss in most.spare_losses] == [0, 25_000, 50_000, 100_000]


@pytest.mark.parametrize("chip", sorted({row.chip for row in FAILURES.values() if row.chip}))
def test_of_the_rates_of_a_chip_the_middle_one_is_taken(chip: str) -> None:
    rates = [row.per_s(8, 1) for row in FAILURES.values() if row.chip == chip]
    taken = failures_for(f"{chip.lower()}-sxm").per_s(8, 1)
    assert sum(rate < taken for rate in rates) == len(rates) // 2
    left = failures_for(chip, lambda row: row.chip == chip)
    assert left.name == DEFAULT_FAILURES or chip == FAILURES[DEFAULT_FAILURES].chip != left.chip


def test_slow_storage_is_helped_by_faster_storage_and_names_have_either_dash() -> None:
    given = [conditions_of({f"restart{dash}time": "5 min", "write": "100MB"}) for dash in "-_"]
    assert given[0] == given[1] == Conditions(restart_s=300.0, write_bytes_per_s=1e8)
    gains = {each.change: each.gain for each in _ask(given[0]).helps}
    assert gains["storage of twice the bandwidth"] > 0
    assert expected_wait(0, 0.0, 3600.0) == 0  # nothing fails


def test_an_elastic_job_waits_less() -> None:
    few = Conditions(spares=0, failures="ant-a100")
    assert _ask(replace(few, elastic=True)).effective_share > _ask(few).effective_share + 0.01


def test_money_and_energy() -> None:
    answer = _ask(Conditions(rates=GivenRates(price=2.0, pue=1.2, grid="SE3"), spares=1), days=10.0)
    cost = answer.expense
    assert answer.gpu_hours == cost.gpu_hours == pytest.approx(72 * 240)
    assert cost.money == pytest.approx(2 * 72 * 240)
    down = sum(answer.shares[name] for name in ("detection", "restart", "waiting", "planned"))
    assert down > 0
    watts = 240 * (64 * (1 - down) * 1275 * 0.76 + (64 * down + 8) * 1275 * 0.15 + 72 * 17)
    assert cost.energy_kwh == pytest.approx(watts * 1.2 / 1e3)
    assert cost.carbon_kg == pytest.approx(cost.energy_kwh * 18 / 1e3)
    for unknown, named in (({}, True), ({"money": None, "energy_kwh": None}, False)):
        figures = {name for name, *_ in _figures(replace(answer, expense=replace(cost, **unknown)))}
        assert figures >= {"GPU-hours", "days"}
        assert {"money", "energy", "carbon"} <= figures if named else not {"money", "energy", "carbon"} & figures


def test_one_node_has_no_network_to_power() -> None:
    given = Conditions(rates=GivenRates(pue=1.0), spares=0)
    answer = goodput(**{**_MODEL, "gpus": 8, "batch": 64}, given=given, days=10.0)  # type: ignore[arg-type]
    down = sum(answer.shares[name] for name in ("detection", "restart", "waiting", "planned"))
    watts = 8 * 1275 * ((1 - down) * 0.76 + down * 0.15)
    assert answer.expense.energy_kwh == pytest.approx(240 * watts / 1e3)


def test_what_helps_is_what_each_change_alone_gives() -> None:
    given = Conditions(restart="job", interval_s=600.0, synchronous=True, silent_s=1e5, spares=0)
    now = _ask(given)
    changes = {
        "save at the best interval": {"interval_s": None},
        "half as many failures": {"mttf_s": 2 * now.mttf_s},
        "saves that do not stop the training": {"synchronous": False},
        "silent corruption found in half the time": {"silent_s": 5e4},
        "a spare always at hand": {"spares": 100_000},
        "restart in-process": {"restart": "in-process"},
        "restart in-job": {"restart": "in-job"},
    }
    helps = {h.change: h for h in now.helps}
    assert set(changes) < set(helps)
    assert "restart job" not in helps  # it does already
    for name, change in changes.items():
        then = _ask(replace(given, **change), days=1, trials=1).effective_closed_form_share
        assert helps[name].effective_share == pytest.approx(then), name
    gains = [h.gain for h in now.helps]
    assert gains == sorted(gains, reverse=True)
    assert gains == [h.effective_share / now.effective_closed_form_share - 1 for h in now.helps]
    assert min(gains) > 1e-4
    nothing = {h.change for h in _ask(Conditions(mttf_s=1e15, restart="in-process", interval_s=None)).helps}
    assert not nothing


def test_other_intervals_and_spares_are_priced_by_the_closed_form() -> None:
    given = Conditions(spares=2, interval_s=900.0)
    now = _ask(given)
    best = _ask(replace(given, interval_s=None))
    assert now.interval_loss == pytest.approx(1 - now.effective_closed_form_share / best.effective_closed_form_share)
    for row in now.intervals:
        then = _ask(replace(given, interval_s=row.interval_s), days=1, trials=1).effective_closed_form_share
        assert row.effective_share == pytest.approx(then)
        assert row.loss == pytest.approx(1 - then / best.effective_closed_form_share, abs=1e-12)
    for loss in now.spare_losses:
        then = _ask(replace(given, spares=loss.spares), days=1, trials=1).effective_closed_form_share
        assert loss.effective_share == pytest.approx(then)
        assert loss.gpu_hours_per_useful == pytest.approx((1 + loss.spares / 8) / then)
    assert now.interruptions == pytest.approx(100 * 86_400 / now.mttf_s, rel=0.1)
    assert now.interruptions_low < now.interruptions < now.interruptions_high
    assert [row.interval_s / now.best_interval_s for row in now.intervals] == pytest.approx([0.25, 0.5, 1, 2, 4, 8])
    low, high = (x / now.effective_share for x in (now.effective_low_share, now.effective_high_share))
    assert (now.tokens_low / now.tokens, now.tokens_high / now.tokens) == pytest.approx((low, high))
    by_tokens = _ask(given, tokens=now.tokens)
    assert by_tokens.days_low < by_tokens.days < by_tokens.days_high
    quick = Conditions(mttf_s=20.0, detect_s=0.1, restart_s=0.1, load_s=0.1, save_s=0.1, stall_s=0.1)
    for how in ({"days": 60}, {"tokens": 60 * now.tokens_per_day}):
        with pytest.raises(InputError, match=r"% of its time on work and fails [\d,]{7,9} times; restart faster"):
            _ask(quick, **how)
    assert now.young_interval_s == young(now.stall_s, now.mttf_s)
    assert now.daly_interval_s == daly(now.stall_s, now.mttf_s)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"days": 36_501}, "days = 36501: must be positive and at most 36500"),
        ({"days": 0}, "days = 0: must be positive and at most 36500"),
        ({"tokens": 1.1e18}, "tokens = 1.1e+18: must be positive and at most 1e+18"),
        ({"days": 1, "trials": 0}, "trials = 0: must be positive and at most 20000"),
        ({"days": 1, "trials": 20_001}, "trials = 20001: must be positive and at most 20000"),
        ({"days": 1, "seed": -1}, "seed = -1: must be from 0"),
        ({}, "days: one of days and tokens says how long the training is; give one of them"),
    ],
)
def test_how_long_a_training_may_be(how: dict[str, float], words: str) -> None:
    with pytest.raises(InputError) as refused:
        goodput(**_MODEL, **how)  # type: ignore[arg-type]
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize("failures", ["llama3-h100", "ant-a100"])
def test_the_drawn_shares_are_all_of_the_time(failures: str) -> None:
    shares = _ask(Conditions(failures=failures), days=30.0).shares
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0
    assert (shares["planned"] > 0) == (failures == "llama3-h100")


def test_storage_grows_worse_with_nodes() -> None:
    shared = STORAGE["shared"]
    assert shared.write(60) / 60 == pytest.approx(0.8 * shared.write(1), rel=0.01)
    assert shared.write(3) / 3 > 0.98 * shared.write(1)
    assert STORAGE["tectonic"].write(100_000) == 2e12


@pytest.mark.parametrize("what", ["restart_s", "load_s", "stall_s"])
def test_a_stop_for_maintenance_saves_restarts_and_loads(what: str) -> None:
    given = Conditions(failures="llama3-h100", restart_s=60.0, load_s=30.0, stall_s=10.0)
    planned = premise_of(_TRAINED, given).planned
    longer = premise_of(_TRAINED, replace(given, **{what: getattr(given, what) + 100.0})).planned  # type: ignore[arg-type]
    assert longer == pytest.approx(planned * 2)


_SMALL = TrainingJob(2.0, 2**20, 400, 50, 10, "H100-SXM5-80GB", 1e12, 100)
_LOCAL, _SHARED = STORAGE["local"], STORAGE["shared"]


@pytest.mark.parametrize(
    ("given", "save", "load", "stall", "every"),
    [
        ({}, 1e12 / _SHARED.write(13), 1e12 / _SHARED.read(50), 0.9, 1),  # 100 of 400 GPUs are of 13 nodes
        ({"write_bytes_per_s": 1e9}, 1000.0, 1e12 / _SHARED.read(50), 0.9, 1),
        ({"write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9}, 1000.0, 500.0, 0.9, 1),
        ({"write_bytes_per_s": 2e12}, 0.5, 1e12 / _SHARED.read(50), 0.5, 1),  # no longer than the save
        ({"synchronous": True, "save_s": 7.0}, 7.0, 1e12 / _SHARED.read(50), 7.0, 1),
        ({"stall_s": 3.0, "save_s": 7.0, "load_s": 5.0}, 7.0, 5.0, 3.0, 1),
        ({"stall_s": 3.0, "save_s": 2.0, "load_s": 5.0}, 2.0, 5.0, 3.0, 1),
        ({"checkpoint": "local"}, 1e12 / _LOCAL.write(13), 1e12 / _LOCAL.read(50), 0.9, 10),
        ({"checkpoint": "local", "storage": "shared"}, 1e12 / _SHARED.write(13), 1e12 / _SHARED.read(50), 0.9, 10),
        ({"checkpoint": "replicated"}, 4.0, 4.0, 0.9, 1),  # 5 GB/s a node
    ],
)
def test_how_a_training_saves_and_loads(
    given: dict[str, Any], save: float, load: float, stall: float, every: int
) -> None:
    p = premise_of(_SMALL, Conditions(**given))
    assert (p.save_s, p.load_s) == (pytest.approx(save), pytest.approx(load))
    assert p.saving == Saving(pytest.approx(stall), pytest.approx(max(save - stall, 0.0)), every)
    taken = {t.what: t for t in p.taken}
    decided = {"storage", "write_bytes_per_s", "read_bytes_per_s"} - {*given}
    assert ("storage" in taken) == ("storage" in decided and len(decided) > 1 and "replicated" not in given.values())
    assert ("memory of two nodes" in taken) == ("replicated" in given.values())
    assert ("a save's stall" in taken) == (not {"stall_s", "synchronous"} & {*given})
    assert taken["interval"].value == f"{p.best_interval_s:,.0f} s"
    assert p.interval_s == p.best_interval_s >= save


@pytest.mark.parametrize(("mttf", "detect", "restart"), [(None, None, None), (3600.0, 7.0, 11.0), (None, 7.0, None)])
def test_causes_have_the_rates_of_their_counts_and_the_times_of_their_kind(
    mttf: float | None, detect: float | None, restart: float | None
) -> None:
    given = Conditions(failures="llama3-h100", mttf_s=mttf, detect_s=detect, restart_s=restart, silent_s=99.0)
    p = premise_of(_SMALL, given)
    counts, kind = FAILURES["llama3-h100"], RESTARTS["in-job"]
    assert p.per_s == pytest.approx(1 / mttf if mttf else counts.per_s(400, 50))
    assert {c.name for c in p.causes} == {name for name in UNEXPECTED if counts.count(name)}
    for cause in p.causes:
        hardware = cause.name in HARDWARE
        assert cause.per_s / p.per_s == pytest.approx(counts.rate(cause.name, 400, 50) / counts.per_s(400, 50))
        assert cause.detect_s == (99.0 if cause.name == "silent" else detect or kind.detect_s)
        assert cause.restart_s == (restart or (kind.hardware_s if hardware else kind.software_s)) + p.load_s
        assert (cause.takes_node, cause.count) == (hardware, None if mttf else counts.count(cause.name))
        assert (cause.wait_s > 0) == hardware
    told = {t.what: t.value for t in p.taken}
    assert ("failures" in told, "silent corruption" in told) == (False, mttf is None)
    assert ("restart" in told) == (restart is None)
    assert told["spares"] == f"{p.spares} nodes, repaired in 24 h"


@pytest.mark.parametrize("elastic", [False, True])
def test_spares_that_nobody_gave_cost_the_least(elastic: bool) -> None:
    given = Conditions(failures="ant-a100", elastic=elastic)

    def paid(spares: int) -> float:
        return (1 + spares / 50) / float(premise_of(_SMALL, replace(given, spares=spares)).shares(600.0).useful)

    chosen = premise_of(_SMALL, given).spares
    assert 0 < chosen < 25
    assert min(range(25), key=paid) == pytest.approx(chosen, abs=1)


def test_our_own_checkpoints_have_masters_and_moments() -> None:
    spec = build(ModelSpec, complete({**preset("llama3-8b"), "layers": 1}), "model")
    of_block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336)
    for optimizer, matrices, others in (
        (Optimizer(), 3, 3),
        (Optimizer("sgd"), 2, 2),  # its momentum is that of betas
        (Optimizer("sgd", momentum=0.0), 1, 1),
        (Optimizer("muon"), 2, 3),
    ):
        kept = matrices * of_block + others * (spec.parameter_count - of_block)
        assert _own_state_bytes(spec, Job(8, 16, optimizer=optimizer)) == 4 * kept


def test_an_elastic_job_waits_with_the_share_of_a_replica() -> None:
    few = Conditions(spares=0, repair_s=3600.0)
    waits = [
        max(c.wait_s for c in premise_of(replace(_SMALL, replicas=n), replace(few, elastic=elastic)).causes)
        for n, elastic in ((10, False), (1, True), (10, True))
    ]
    assert waits == [pytest.approx(3600.0), pytest.approx(3600.0), pytest.approx(360.0)]
    assert [premise_of(_SMALL, replace(few, elastic=e)).share_kept for e in (False, True)] == [0.0, 0.9]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"spares": 100_001}, "spares = 100001: must be from 0 to 100,000 nodes"),
        ({"spares": -1}, "spares = -1: must be"),
        ({"mttf_s": 0.0}, "mttf = 0.0: must be positive"),
        ({"interval_s": 1.9}, "interval = '1.9 s': is shorter than a step, 2 s; save at most once a step"),
        (
            {"interval_s": 60.0, "save_s": 64.0, "stall_s": 3.0},
            "interval = '60 s': is shorter than a save, 64 s to sh",
        ),
        (
            {"checkpoint": "moon"},
            "checkpoint = 'moon': is no place of a checkpoint; one of shared, local, replicated",
        ),
    ],
)
def test_what_no_training_runs_under(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as refused:
        premise_of(_SMALL, Conditions(**given))
    assert str(refused.value).startswith(words)
    at_the_bound = {"spares": 100_000, "mttf_s": 100.0, "interval_s": 2.0, "checkpoint": "local"}
    within = {name: at_the_bound.get(name, value) for name, value in given.items()} | {"save_s": 1.0}
    if "save_s" in given:
        within = {**given, "save_s": 63.0}
    assert premise_of(_SMALL, Conditions(**within)).given == Conditions(**within)


def test_a_training_has_to_advance_and_to_fail_seldom_enough() -> None:
    p = premise_of(_SMALL, Conditions(mttf_s=1234.0))
    assert require_progress(p, 0.0101, 200_000) is None
    for share, failures, more in ((0.01, 0.0, ""), (0.01, 1e9, ""), (0.5, 200_001, " and fails 200,001 times")):
        reason = f"a job that fails every 1,234 s spends {share:.1%} of its time on work{more}"
        remedy = "restart faster, save more often, or use fewer GPUs"
        with pytest.raises(InputError, match=f"^failures = '{p.counts.name}': {reason}; {remedy}$"):
            require_progress(p, share, failures)


def test_what_nobody_gave_is_said() -> None:
    def taken_of(given: Conditions) -> set[str]:
        premise = premise_of(_TRAINED, given)
        return {t.what for t in (*premise.taken, *premise.rates.taken)}

    taken = taken_of(Conditions())
    assert {"failures", "restart", "storage", "spares", "interval", "price"} <= taken
    given = Conditions(
        failures="llama3-h100", storage="tectonic", spares=3, interval_s=600.0, rates=GivenRates(price=1.0)
    )
    taken = taken_of(given)
    assert not {"failures", "storage", "spares", "interval", "price"} & taken


def test_a_device_without_published_rates_fails_as_the_largest_job_did() -> None:
    """A processor's plan is of no chip that failures were counted on."""
    laptop = premise_of(replace(_TRAINED, device="Intel(R) Xeon(R) Processor"), Conditions())
    assert laptop.counts is premise_of(replace(_TRAINED, device="Gaudi-3-128GB"), Conditions()).counts
    assert laptop.counts.name == DEFAULT_FAILURES


def test_llama_is_interrupted_as_it_was() -> None:
    assert FAILURES["llama3-h100"].per_s(16_384, 2048) * 54 * 86_400 == pytest.approx(419)


def test_a_log_of_ones_own_job(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("hours,component\n10,gpu\n30.5,software\n90,gpu\n100,end\n")
    answer = _ask(Conditions(failures=str(log)))
    assert answer.mttf_s == pytest.approx(100 * 3600 / 3)
    log.write_text("hours,component\n10,gpo\n100,end\n")
    with pytest.raises(InputError, match=r"line 2 .*did you mean gpu"):
        _ask(Conditions(failures=str(log)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "failures = 'LOG': lacks the columns hours and component, or rows; add them"),
        ("hours,component\n", "failures = 'LOG': lacks the columns hours and component, or rows; add them"),
        ("hours,component\n1,gpu\nx,gpu\n", "failures = 'x': is no number of hours, in line 3 of LOG"),
        (
            "hours,component\n-1,end\n",
            "failures = 'LOG': spans no time; give hours since the start, and a last row `end",
        ),
        ("hours,component\n1e7,end\n", "failures = 'LOG': spans no time"),
        (None, "failures = 'LOG': no such file"),
        (f"hours,component\n{'1' * 140_000},gpu\n", "failures = 'LOG': is not CSV (field larger"),
    ],
)
def test_what_is_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("log.csv").write_text(content)
    with pytest.raises(InputError) as refused:
        failures_named("log.csv", 8, 1)
    assert str(refused.value).startswith(words.replace("LOG", "log.csv"))
    Path("log.csv").write_text("hours,component\n0.5,software\n")
    assert failures_named("log.csv", 8, 1).per_s(16, 2) == pytest.approx(2 / 1800)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "one of days and tokens"),
        ("--days 3 --tokens 1T", "one of days and tokens"),
        ("--days -3", "must be positive"),
        ("--days 3 --restart in-jbo", "did you mean in-job"),
        ("--days 3 --interval 3m", "is no duration"),
        ("--days 3 --interval 0s", "longer than nothing"),
        ("--days 3 --mttf 99999999d", "at most .* days"),
        ("--days 3 --interval 0.1s", "is shorter than a step"),
        ("--days 3 --storage nas --interval 1min", "slower than its load"),
        ("--days 3 --failures lama3", "did you mean llama3-h100"),
        ("--days 3 --mttf 1s", "hardly advances|of its time on work"),
        ("--days 3 --rates pue=0.2", "must be from 1"),
        ("--days 3 --checkpoint moon", "is no place"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, options: str, words: str) -> None:
    code, _, stderr = phalanx(tmp_path, f"simulate goodput {_LINE} {options}")
    assert code == 2
    assert len(stderr.strip().splitlines()) == 1
    assert re.search(words, stderr), stderr


def test_assertions_and_json(tmp_path: Path) -> None:
    line = f"simulate goodput {_LINE} --days 30 --json --assert"
    code, stdout, stderr = phalanx(tmp_path, line, "effective>90%, days<31")
    assert code == 0, stderr
    assert json.loads(stdout)["interruptions"] > 0
    code, _, stderr = phalanx(tmp_path, line, "effective>99.99%")
    assert code == 1
    assert "effective_share is" in stderr


def test_other_intervals_are_possible_ones() -> None:
    """A save begins when the last one is durable, so that none is shorter; each is one row."""
    answer = goodput(
        **{**_MODEL, "model": "llama3.1-405b", "gpus": 16384, "batch": 2048, "strategy": "tp=8,pp=16,zero=1"},  # type: ignore[arg-type]
        days=54.0,
    )
    taus = [row.interval_s for row in answer.intervals]
    assert taus == sorted(set(taus))
    assert taus[0] >= max(answer.save_s, answer.step_time_s)
    assert answer.best_interval_s in taus


def test_a_sharded_state_is_copied_by_more_ranks() -> None:
    """Without ZeRO the ranks of one replica copy everything; with it every rank copies its part."""
    whole = goodput(**{**_MODEL, "strategy": "tp=8"}, days=10.0)  # type: ignore[arg-type]
    assert _ask(days=10.0).stall_s < whole.stall_s


def test_the_interval_with_recovery_is_longer_by_what_recovery_takes(tmp_path: Path) -> None:
    """S + sqrt(2 (F + R) S + S^2) between the starts of saves, R until a job that failed works again."""
    answer = _ask(Conditions(failures="llama3-h100", storage="tectonic"))
    plain = answer.mttf_s
    (stall,) = {x for x in [(answer.young_interval_s**2) / (2 * plain)]}
    between = answer.recovery_interval_s + stall
    recovery = ((between - stall) ** 2 - stall**2) / (2 * stall) - plain
    assert 60 < recovery < 3600


@pytest.mark.parametrize("unit", ["d", "h", "min", "s"])
def test_durations_read_back(unit: str) -> None:
    """In the largest unit of which there are two."""
    scale = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "s": 1.0}[unit]
    for value in (2 * scale, 2.5 * scale, 23 * scale if unit == "h" else 3 * scale):
        number, written = long(value).split()
        assert (written, float(number)) == (unit, pytest.approx(value / scale, rel=0.02))
    assert long(9e14).endswith(" d")
    assert long(1e15) == long(1e300) == "never"
    below = long(1.99 * scale).split()[1]
    assert below == {"d": "h", "h": "min", "min": "s", "s": "s"}[unit]


def test_a_mean_that_few_trials_pull_out_of_its_interval_is_said_to_be() -> None:
    skewed = _ask(Conditions(spares=0), tokens=5e9)
    assert skewed.effective_share < skewed.effective_low_share
    assert sum(skewed.shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert skewed.tokens / skewed.days == pytest.approx(skewed.tokens_per_day)
    figures = {name: (value, how) for name, value, how in _figures(skewed)}
    assert (
        "% in four of five of 200 trials, and the mean below by a few trials; closed" in figures["effective time"][1]
    )
    assert ", and the mean above by a few trials; " in figures["days"][1]
    even = {name: how for name, _, how in _figures(_ask(Conditions(spares=1)))}
    assert "a few trials" not in "".join(even.values())
    assert even["GPU-hours"] == "1 spare node included"


def test_what_is_shown_of_a_training() -> None:
    given = Conditions(spares=1, interval_s=3600.0)
    a = _ask(given, tokens=5e9)
    few = replace(a, shares={**a.shares, "waiting": 1e-4, "planned": 5e-5})
    heading, *sheets = view(few).parts
    assert isinstance(heading, str)
    shown = {s.title: ([c.name for c in s.columns], list(s.rows), s.bars) for s in sheets if isinstance(s, Sheet)}
    named = ["", "value", "how it came about"]
    (times,) = (rows for columns, rows, bars in shown.values() if bars)
    assert shown[f"{a.question.about} on 64 GPUs of {a.question.cluster}: {a.question.strategy}"][0] == named
    assert [value for _, value in times] == [x for name, x in few.shares.items() if name != "planned" and x > 5e-5]
    assert ("waiting for a node", 1e-4) in times
    for title, names, rows in (
        (
            "saving at other intervals, by the closed form",
            ["work between saves", "effective", "loses"],
            [(long(i.interval_s), i.effective_share, i.loss) for i in a.intervals],
        ),
        (
            "spare nodes, by the closed form",
            ["spares", "effective", "GPU-hours paid per one of work"],
            [(s.spares, s.effective_share, s.gpu_hours_per_useful) for s in a.spare_losses],
        ),
        (
            "what would help most, each alone",
            ["change", "effective", "faster"],
            [(h.change, h.effective_share, h.gain) for h in a.helps],
        ),
    ):
        assert shown[title] == (names, rows, False)
    assert shown["not given, and taken from"][0] == ["what", "value", "source"]
    assert len(shown["not given, and taken from"][1]) == len(a.taken) + len(a.rates.taken)
    assert "what would help most, each alone" not in {
        getattr(p, "title", "") for p in view(replace(a, helps=())).parts
    }
    for days, digits, spread in ((10.0, "10.0", "10.0 to 12.3"), (9.994, "9.99", "9.99 to 12.34")):
        seen = {n: (v, how) for n, v, how in _figures(replace(a, days=days, days_low=days, days_high=12.34))}
        assert (seen["days"][0], seen["days"][1].split(";")[0]) == (digits, spread)
    asked = {n: how for n, _, how in _figures(replace(a, days=9.0, days_low=9.0, days_high=9.0, interval_loss=0.0))}
    assert asked["days"].startswith("as asked; ")
    assert asked["work between saves"].startswith("the best; Young ")
    own = {n: how for n, _, how in _figures(_ask(Conditions(spares=1), tokens=5e9))}
    assert list(own)[:2] == ["effective time", "work between saves"]
    assert own["work between saves"].startswith("the best, as none is given; Young ")


def test_saves_that_a_node_takes_with_it_are_said_where_forms_do_not_count_them() -> None:
    """The best interval is then shorter than Young's by about sqrt(1 + 9 p), p the failures that take a node."""
    shared, local = (_ask(Conditions(spares=1, checkpoint=place), tokens=5e9) for place in ("shared", "local"))
    for answer, said in ((shared, False), (local, True)):
        how = {n: how for n, _, how in _figures(answer)}["work between saves"]
        assert how.endswith("of saves that no failure takes") is said
        assert ("saves on shared storage" in {t.what for t in answer.taken}) is said
    assert local.interval_s < 0.6 * local.young_interval_s
