"""Drawn inputs, most of them with mistakes: every command gives finite numbers that agree, or one line that names the
field. `make fuzz` draws more (support/fuzz)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from support.fuzz import leaves
from support.fuzz.campaign import campaign, measured, prepared
from support.fuzz.commands import QUICK, SLOW, Case, Options, before_program, flat
from support.fuzz.examine import forked, here
from support.fuzz.rule import Outcome, verdict

from phalanx.measure import this_machine


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with valid files, on a machine that counts as measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "_measure", measured)
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepared(tmp_path_factory.mktemp("fuzz") / "work", quick=True)


@pytest.fixture(scope="module")
def with_run(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has a run too."""
    return prepared(tmp_path_factory.mktemp("run") / "work", quick=False)


def test_150_drawn_inputs_keep_the_rule(work: Path) -> None:
    tally = campaign(work, 150, 0, here, quick=True)
    assert tally.total == 150
    assert not tally.broken, tally.problems()
    done = sum(count for (_, how), count in tally.counts.items() if how == "done")
    assert 15 < done < 135  # both ways out are examined


_OTHERS = copy.deepcopy(leaves.OTHER_TYPES)


@settings(max_examples=100)
@given(leaves.leaves(""))
def test_a_mistake_may_be_changed_by_another(drawn: object) -> None:
    """Without changing what is drawn later, which hypothesis reports as FlakyStrategyDefinition."""
    if isinstance(drawn, list | dict):
        drawn.clear()
    assert leaves.OTHER_TYPES == _OTHERS


@pytest.mark.long
def test_2000_drawn_inputs_keep_the_rule(with_run: Path) -> None:
    tally = campaign(with_run, 2000, 1, forked, quick=False)
    print(tally.table())
    assert not tally.broken, tally.problems()


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_command_lines_are_valid_before_mistakes_are_made(work: Path, number: int) -> None:
    case = _valid(*QUICK[number])
    outcome = here(case, work)
    assert verdict(case, outcome) in ("done", "failed"), outcome.err


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(SLOW)))
def test_long_command_lines_are_valid_before_mistakes_are_made(with_run: Path, number: int) -> None:
    case = _valid(*SLOW[number])
    outcome = forked(case, with_run)
    if case.words[:2] == ("train", "sweep"):
        assert "none.txt" in outcome.err
    else:
        assert verdict(case, outcome) == "done", outcome.err


def _valid(words: tuple[str, ...], options: Options) -> Case:
    return Case("command line", before_program(words, flat(options)))


@pytest.mark.parametrize(
    ("code", "out", "err", "expected"),
    [
        (0, '{"step_time_s": NaN}', "", "nan in step_time_s"),
        (0, '{"memory_bytes": -1}', "", "negative memory_bytes"),
        (0, '{"mfu": 1.2}', "", "mfu above 1"),
        (0, "step: nan", "", "no JSON"),
        (2, "", "error: --gpus = 0: must be at least 1\n", "refused"),
        (2, "", "error: something is wrong\n", "names no field"),
        (2, "", "Usage: ...\nerror: a: b\nmore\n", "not one line"),
        (1, "", "Traceback (most recent call last):\n", "traceback"),
        (139, "", "", "exit 139"),
    ],
)
def test_the_rule_sees_what_breaks_it(code: int, out: str, err: str, expected: str) -> None:
    assert verdict(Case("command line", ("tables", "scaling", "--json")), Outcome(code, out, err, 0.0)) == expected


def test_options_of_a_program_are_not_the_command_s() -> None:
    line = before_program(("observe", "--", "python", "program.py"), ("--step", "2"))
    assert line == ("observe", "--step", "2", "--", "python", "program.py")
    assert verdict(Case("command line", (*line, "--json")), Outcome(0, "a table", "", 0.0)) == "done"


def test_a_help_may_name_what_no_table_may_hold() -> None:
    outcome = Outcome(0, "inf: one batch after another", "", 0.0)
    words = ("serve", "plan", "--rate", "3")
    assert verdict(Case("command line", (*words, "--help")), outcome) == "done"
    assert verdict(Case("command line", words), outcome) == "inf in a table"


_KEPT = ("done", "refused", "failed")
_EXTREMES = ("0", "-1", "1e-300", "nan", "1e18", "1e400", "2147483648", "999999999999999999999")
_NUMBER = re.compile(r"[\d.]+(e\d+)?([kMGTBKs]|ms|GB|MB)?")


def _extremes() -> Iterator[Case]:
    """Yield every numeric option of every line that the fuzzer knows, once, with each extreme value."""
    seen: set[tuple[str, ...]] = set()
    for words, options in (*QUICK, *SLOW):
        flags = sorted(name for name, value in options.items() if value is None)
        for option, value in options.items():
            if value is None or not _NUMBER.fullmatch(value) or (words[0], option, *flags) in seen:
                continue
            seen.add((words[0], option, *flags))
            for extreme in _EXTREMES:
                changed = {**options, option: extreme}
                yield _valid(words, changed)


@pytest.mark.long
def test_extreme_numbers_keep_the_rule(with_run: Path) -> None:
    cases = list(_extremes())
    assert len(cases) > 700
    broken = [f"{how}: {case}" for case in cases if (how := verdict(case, forked(case, with_run))) not in _KEPT]
    assert not broken, broken


@pytest.mark.parametrize(
    "line",
    [
        "tables scaling --params 7B --tokens 300B --tflops 1e-300 --gpus 64,128 --json",
        f"tables scaling --params 7B --tokens 300B --tflops 150 --gpus {10**400} --json",
        "serve plan --model llama2-7b --cluster dgx-h100 --gpus 4 --input 1000 --output 100 --rate 1e-300",
        "parity job.toml --strategy dp=2 --steps 999999999999999999999 --json",
    ],
)
def test_numbers_that_overflowed_are_refused(line: str, work: Path) -> None:
    case = Case("command line", tuple(line.split()))
    assert verdict(case, here(case, work)) == "refused"
