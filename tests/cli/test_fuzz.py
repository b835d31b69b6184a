"""Drawn inputs, most of them with mistakes: every command gives finite numbers that agree, or one line that names the
field. `make fuzz` draws more (support/fuzz)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fuzz.campaign import campaign, measured, prepared
from support.fuzz.commands import QUICK, Case
from support.fuzz.examine import forked, here
from support.fuzz.rule import Outcome, verdict

from phalanx.measure import this_machine


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with valid files, on a machine that counts as measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "_measure", measured)
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepared(tmp_path_factory.mktemp("fuzz") / "work")


def test_150_drawn_inputs_keep_the_rule(work: Path) -> None:
    tally = campaign(work, 150, 0, here, quick=True)
    assert tally.total == 150
    assert not tally.broken, tally.problems()
    done = sum(count for (_, how), count in tally.counts.items() if how == "done")
    assert 15 < done < 135  # both ways out are examined


@pytest.mark.long
def test_2000_drawn_inputs_keep_the_rule(work: Path) -> None:
    tally = campaign(work, 2000, 1, forked, quick=False)
    print(tally.table())
    assert not tally.broken, tally.problems()


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_command_lines_are_valid_before_mistakes_are_made(work: Path, number: int) -> None:
    words, options = QUICK[number]
    flat = [word for name, value in options.items() for word in ((name,) if value is None else (name, value))]
    case = Case("command line", (*words, *flat))
    outcome = here(case, work)
    assert verdict(case, outcome) in ("done", "failed"), outcome.err


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
    assert verdict(Case("command line", ("scaling", "--json")), Outcome(code, out, err, 0.0)) == expected
