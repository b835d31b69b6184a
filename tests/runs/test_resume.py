"""Which run is resumed, from which folder, and as which job."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.answers.plan import decide
from phalanx.runs import folder
from phalanx.runs.resume import job_for_ranks, resume_point, resumed_job
from phalanx.runtime.checkpoint import store
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file, plan


@pytest.fixture(scope="module")
def decided() -> plan.Plan:
    tables = {
        "model": {"family": "llama", "layers": 1, "hidden": 16, "ffn": 32, "heads": 2, "vocab": 61, "max_seq": 16},
        "cluster": {"preset": "dgx-a100"},
        "job": {"global_batch": 8, "seq": 8},
        "strategy": {"dp": 2},
        "train": {"name": "one", "steps": 3},
    }
    return decide(job_file.from_tables(tables, Path())).plan


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The steps of each run's checkpoints, by name, of a working folder of its own. Below zero none is intact, and
    the bytes of step 7 are damaged."""
    monkeypatch.chdir(tmp_path)
    by_run: dict[str, list[int]] = {}

    def intact(saves: Path) -> list[int]:
        return [step for step in by_run.get(saves.parent.name, []) if step >= 0]

    monkeypatch.setattr(store, "intact_steps", intact)
    monkeypatch.setattr(store, "all_steps", lambda saves: by_run.get(saves.parent.name, []))
    monkeypatch.setattr(
        store, "newest_intact", lambda saves: saves / str(intact(saves)[-1]) if intact(saves) else None
    )
    monkeypatch.setattr(store, "why_none_intact", lambda saves: f"nothing in {saves}")
    monkeypatch.setattr(store, "defect", lambda _, step: "damaged" if step == 7 else None)
    return by_run


def _run(name: str, decided: plan.Plan, saved: dict[str, list[int]], *steps: int, called: str = "") -> Path:
    """Write a run whose checkpoints are as new as their steps are high."""
    there = Path("runs") / name
    (there / "checkpoint").mkdir(parents=True)
    plan.write(replace(decided, train=replace(decided.train, name=called or name)), there / "plan.json")
    for step in steps:
        (there / "checkpoint" / str(step)).touch()
        os.utime(there / "checkpoint" / str(step), (step, step))
    saved[name] = list(steps)
    return there


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_has_its_folder_alone_and_an_old_one_is_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided: plan.Plan, resume: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokens.json", "config.json", "outside"):
        Path(name).write_text(name)
    one = Path("runs/one")
    one.mkdir(parents=True)
    (one / "metrics.jsonl").touch()
    for name in ("tokenizer.json", f".tokenizer.json.{os.getpid()}"):  # nor what a copy left that was cut off
        (one / name).symlink_to(tmp_path / "outside")
    with folder.open_run(decided, Path("tokens.json"), resume, [Path("config.json")]) as run, ExitStack() as stack:
        with pytest.raises(InputError, match=r"^train.name = 'one': is in use by another process; choose another$"):
            folder.claim(one, stack, "train.name")
        assert run == tmp_path / one
        assert (run / "tokenizer.json").read_text() == "tokens.json"
        assert plan.read(run / "plan.json") == decided
    assert Path("outside").read_text() == "outside"
    old = {"metrics.jsonl", "tokenizer.json"} | (set() if resume else {f".tokenizer.json.{os.getpid()}"})
    names = {p.name: {f.name for f in p.iterdir()} for p in Path("runs").iterdir() if p.is_dir()}
    assert names.pop("one") == {"plan.json", "tokenizer.json"} | (old if resume else {"config.json"})
    assert list(names.values()) == ([] if resume else [old])
    assert all(re.fullmatch(r"one\.\d{8}-\d{6}-\d{6}", name) for name in names)
    with folder.open_run(decided, Path("none"), True):  # nobody has it any more
        pass


def test_a_first_run_makes_its_folder_and_a_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided: plan.Plan
) -> None:
    monkeypatch.chdir(tmp_path)
    with folder.open_run(decided, Path("none"), False) as run:
        assert [p.name for p in run.iterdir()] == ["plan.json"]
    assert not Path("runs/.one.lock").stat().st_mode & 0o111
    shutil.rmtree("runs/one")
    Path("runs/one").touch()
    with (
        pytest.raises(InputError, match=r"^train.name = 'one': runs/one cannot be used \("),
        folder.open_run(decided, Path("none"), True),
    ):
        pass


def test_the_latest_run_has_the_newest_checkpoint(decided: plan.Plan, saved: dict[str, list[int]]) -> None:
    _run("none", decided, saved)
    with pytest.raises(
        InputError, match=r"^resume: no run with a checkpoint in runs/; name the job file to start one$"
    ):
        folder.latest_run()
    _run("torn", decided, saved, -1)
    with pytest.raises(InputError, match=r"^resume = 'runs/torn': nothing in runs/torn/checkpoint$"):
        folder.latest_run()
    _run("first", decided, saved, 1, 5)
    _run("last", decided, saved, 6)
    _run("first.2026", decided, saved, 9, called="first")  # it was moved aside
    assert folder.latest_run() == Path("runs/last")


def test_a_run_is_resumed_from_its_folder_and_no_other(decided: plan.Plan, saved: dict[str, list[int]]) -> None:
    one = _run("one", decided, saved)
    none = "^resume = 'runs/one': nothing in runs/one/checkpoint; train it anew instead of resuming$"
    with pytest.raises(InputError, match=none):
        resumed_job(one, ())
    shutil.rmtree(one)
    _run("one", decided, saved, 2)
    job = resumed_job(one, ())
    assert (job.train, job.model, job.strategy) == (decided.train, decided.model, decided.strategy)
    assert resumed_job(None, ()) == job
    assert resume_point(one) == "the run continues from step 2"
    shutil.copytree(one, "copy")
    for named in ("copy", "copy/plan.json"):
        with pytest.raises(
            InputError, match=r"^resume = 'copy': is a copy of .* from runs/one; move it to runs/one f"
        ):
            resumed_job(Path(named), ())
    assert resumed_job(one / "plan.json", ()) == job
    shutil.rmtree("copy/checkpoint")
    (one / "plan.json").unlink()
    with pytest.raises(InputError, match=none):
        resumed_job(Path("copy/plan.json"), ())


@pytest.mark.parametrize(("done", "most", "ends"), [(2, 3, False), (3, 3, True), (4, 3, True), (7, 3, False)])
def test_a_run_is_finished_at_its_last_step_unless_that_is_damaged(
    decided: plan.Plan, saved: dict[str, list[int]], done: int, most: int, ends: bool
) -> None:
    _run("one", decided, saved, 1, done)
    if not ends:
        assert resumed_job(None, [f"train.steps={most}"]).train.steps == most
        return
    said = f"^resume = 'runs/one': is finished at step {done}; raise train.steps to go on$"
    with pytest.raises(InputError, match=said):
        resumed_job(None, [f"train.steps={most}"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.layers=2", "model: "),
        ("job.global_batch=16", "job.global_batch = 16: "),
        ("job.seq=16", "job.seq = 16: "),
        ('job.documents="separate"', "job.documents = 'separate': "),
        ('job.precision.compute="float16"', "job.precision = .*: "),
        ('job.optimizer.name="sgd"', "job.optimizer.name = 'sgd': "),
        ("train.seed=1", "train.seed = 1: "),
        ('train.name="two"', "train.name = 'two': "),
        ("train.lr=0.5", ""),
        ('train.data="elsewhere"', ""),
    ],
)
def test_what_makes_it_another_run(decided: plan.Plan, saved: dict[str, list[int]], change: str, said: str) -> None:
    _run("one", decided, saved, 1)
    if not said:
        assert resumed_job(None, [change]) != resumed_job(None, ())
        return
    remedy = "cannot change when a run is resumed; train it under another train.name$"
    with pytest.raises(InputError, match=f"^{said}{remedy}"):
        resumed_job(None, [change])
    if "name" not in change:
        with pytest.raises(InputError, match=f"^{said}{remedy}"):
            job_for_ranks(plan.as_job(decided, [change]), 2)


def test_a_run_on_another_world_keeps_all_but_its_replicas(decided: plan.Plan, saved: dict[str, list[int]]) -> None:
    """And replicas that step alone need what no checkpoint of its has."""
    begun = replace(decided, train=replace(decided.train, weights="/hf", tokenizer="/hf/theirs"))
    _run("one", begun, saved, 1)
    file = plan.as_job(begun, ())
    file = replace(file, strategy=None, train=replace(file.train, tokenizer=""))
    again = job_for_ranks(file, 4)
    assert again.train == begun.train
    assert again.strategy == replace(begun.strategy, dp=4)
    own = job_for_ranks(replace(file, train=replace(file.train, tokenizer="/mine")), 2)
    assert (own.train.tokenizer, own.strategy) == ("/mine", begun.strategy)
    for asked in (("strategy.local=2",), ("strategy.local=2", "job.outer.momentum=0")):
        with ExitStack() as stack:
            if len(asked) == 1:
                stack.enter_context(
                    pytest.raises(InputError, match=r"^job.outer.momentum = .*: needs state of the outer")
                )
            assert resumed_job(None, asked).strategy == replace(begun.strategy, local=2)
