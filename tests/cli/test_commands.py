"""The command line as a newcomer meets it: real runs, mistakes and interruptions.

One complete run starts a new process, other runs are forked (support/forked_cli.py), and commands that start no rank
are called in this process (support/in_process_cli.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from support.forked_cli import Launcher
from support.forked_cli import phalanx as forked
from support.in_process_cli import error_of, json_of, phalanx, text_of
from support.quick_runs import JOB, TEXT, at_work, rows, wait_for_step

from phalanx.answers.machine import this_machine
from phalanx.answers.plan import with_strategy
from phalanx.answers.runs import parity
from phalanx.answers.runs.train import outcome
from phalanx.cli.app import app
from phalanx.cli.terminal import printable
from phalanx.runs.resume import resumed_job
from phalanx.runtime.process import launch, status
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, measured: None) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "job.toml").write_text(JOB)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def whole(here: Path) -> dict[str, Any]:
    """Return the JSON result of an undisturbed run of the job."""
    command = [sys.executable, "-m", "phalanx", "train", "job.toml", "--json", "--set", "train.name=whole"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_run_from_job_to_comparison(here: Path, whole: dict[str, Any]) -> None:
    result = whole
    assert result["last_step"] == 30
    assert result["differences"] == []
    by_name = {c["name"]: c for c in result["comparison"]}
    assert by_name["sent over dp_replicate"]["error"] == 0
    assert by_name["sent over world"]["measured"] == 32
    assert abs(by_name["peak memory"]["error"]) < 0.03
    assert by_name["step time (median)"]["predicted"] > 0
    run = here / "runs" / "whole"
    wanted = {
        "checkpoint",
        "metrics.jsonl",
        "plan.json",
        "recorded.json",
        "report.html",
        "tokenizer.json",
        "trace.json",
    }
    assert {p.name for p in run.iterdir()} == wanted
    assert [p.name for p in sorted((run / "checkpoint").iterdir())] == ["step-00000020", "step-00000030"]
    metrics = rows(run)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    wanted = {"step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu", "mem_bytes"}
    assert wanted <= metrics[0].keys()
    for row in metrics:
        assert row["exposed_communication_s"].keys() == row["overlap"].keys() == {"dp_replicate", "world"}
        assert 0 < sum(row["exposed_communication_s"].values()) < 2 * row["step_time_s"]
        assert all(0 <= part <= 1 for part in row["overlap"].values())
    assert result["timeline"]["traced_step"] == 3
    assert result["timeline"]["exposed_communication_s"] > 0
    trace = json.loads((run / "trace.json").read_text())
    assert trace["otherData"]["step"] == 3
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0 (dp_replicate 0)", "rank 1 (dp_replicate 1)"}
    assert {"forward head", "backward embed", "optimizer"} <= {e["name"] for e in trace["traceEvents"]}
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert metrics[-1]["eval_loss"] == result["eval_loss"] < metrics[0]["loss"] - 1
    assert 2 < result["unigram_entropy"] < 5
    plan = json.loads((run / "plan.json").read_text())
    assert plan["version"] == 2
    bucket = plan["choices"]["bucket"]
    assert bucket["bytes"] == int(plan["strategy"]["bucket"] * 2**20)
    assert bucket["reason"].startswith("G = ")

    recorded = json.loads((run / "recorded.json").read_text())
    assert outcome(run, 1.0).comparison
    (run / "recorded.json").write_text(json.dumps({**recorded, "events": []}))  # as of ranks with no step left to do
    nothing = outcome(run, 1.0)
    assert (nothing.comparison, nothing.differences) == ((), ())

    words = ("generate", "runs/whole", "--prompt", "the quick", "--tokens", "8")
    text = text_of(here, *words, run=forked)
    assert text.startswith("the quick")
    assert phalanx(here, *words)[1] == text
    assert json_of(here, *words, "--strategy", "tp=2", "--json", run=forked)["text"] == text.removesuffix("\n")
    several = ("--prompt", "the lazy", "--slots", "1", "--page", "3")
    assert phalanx(here, *words, *several)[1].startswith(text + "\nthe lazy")
    for more, said in (
        (("--tokens", "70"), "model.max_seq is 64; shorten it, or ask for fewer tokens"),
        (("--strategy", "tp=4"), "strategy.tp = 4: is more than the model's 2 heads"),
        (("--strategy", "pp=2,schedule=gpipe"), "strategy.schedule = 'gpipe': is of training"),
        (("--prompt", ""), "--prompt 2 = '': is empty"),
        (("--page", "2", "--pages", "1"), "--pages = 1: hold 2 tokens"),
        (("--page", "9" * 21), f"--page = {'9' * 21}: is a number of more than 63 bits"),
        (("--pages", "9" * 12), "--pages = 999999999999: 999,999,999,999 pages of 16 tokens would take "),
        (("--prompts", "none.txt"), "--prompts = 'none.txt': no such file"),
    ):
        assert said in error_of(here, *words, *more)


def _few_families_and_an_interruption() -> None:
    """Let a sweep have four strategies, and end as Ctrl-C does before the ranks of the second run have begun."""
    from phalanx.answers.runs import sweep

    lines = ["dp=2,zero=1,micro_batch=4", "tp=5", "micro_batch=8", "dp=2,zero=3,micro_batch=4"]
    train, begun = sweep.run_training, []

    def interrupted(job: Any, *rest: Any) -> Any:
        begun.append(job)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return train(job, *rest)

    sweep.families, sweep.run_training = lambda *_: iter(lines), interrupted  # type: ignore[assignment]


def test_a_sweep_trains_every_family_and_says_what_it_leaves_out(here: Path) -> None:
    from phalanx.answers.runs import sweep
    from phalanx.spec.files import job_file

    file = job_file.load(here / "job.toml")
    lines = list(sweep.families(file, 2))
    assert {line.split("schedule=")[1].split(",")[0] for line in lines if "schedule=" in line} == set(SCHEDULES)
    assert {f"dp=2,zero={zero},micro_batch=4" for zero in range(4)} < set(lines)
    words = ("train", "sweep", "job.toml", "--steps", "3", "--json")
    code, out, err = forked(here, *words, before=_few_families_and_an_interruption)
    assert code == 130, err
    assert err.endswith("interrupted after 1 run\n")
    assert "left out: tp=5: strategy.tp = 5" in err
    (row,) = json.loads(out)["tables"][0]["rows"]
    assert row["strategy"] == "dp=2,zero=1,micro_batch=4"
    assert abs(row["memory_off"]) < 0.03
    assert not (here / "runs" / "job-sweep").exists()
    assert error_of(here, "train sweep job.toml --set cluster.ranks=9999").startswith(
        "error: cluster.ranks = 9999: is too many"
    )


def _no_ranks(*_: Any) -> None:
    raise InputError("ranks", None, "were to begin")


@pytest.mark.parametrize("silent_s", [1e-9, 1e9])
def test_a_training_of_long_steps_says_so_first(here: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float) -> None:
    from phalanx.answers.runs import train

    monkeypatch.setattr(launch, "launch", _no_ranks)
    monkeypatch.setattr(train, "_SILENT_S", silent_s)
    code, _, err = phalanx(here, "train job.toml --set train.name=announced --json")
    assert (code, err.splitlines()[-1]) == (2, "error: ranks: were to begin")
    assert ("training: each step is predicted to take 0 s; the first is said when it is done" in err) == (
        silent_s < 1
    )


def test_a_sweep_of_nothing_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.answers.runs import sweep

    monkeypatch.setattr(sweep, "families", lambda *_: iter(("tp=5", "tp=7")))
    for word, said in (
        ("train.data=none.txt", f"error: train.data = '{here / 'none.txt'}': no such file or folder; or use"),
        ("train.weights=none", "error: train.weights = "),
        ("train.name=job", "error: job = 'job': allows none of 2 families; tp=5: strategy.tp = 5: "),
    ):
        code, out, err = phalanx(here, "train sweep job.toml --set", word, "--json")
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith(said)


_NEED_TORCH = ("train job", "train sweep", "generate", "runs import", "runs export")
_NEED_TORCH += ("verify", "observe", "parity", "measure machine", "serve verify")


@pytest.mark.parametrize("command", _NEED_TORCH)
def test_what_needs_torch_says_so_before_it_begins(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only planning is installed: one line with the remedy, not an ImportError."""
    here = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else here(name, *a))
    (tmp_path / "job.toml").write_text(JOB)
    words = {
        "generate": "job.toml --prompt a",
        "runs export": "job.toml --out x",
        "serve verify": "--model gpt2",
    }.get(command, "job.toml")
    said = error_of(tmp_path, *command.split(), *([] if command == "measure machine" else words.split()))
    assert "torch is not installed" in said


@pytest.mark.parametrize("command", ["measure --quick", "train job.toml --strategy dp=2"])
def test_ranks_are_launched_without_torch(tmp_path: Path, command: str) -> None:
    """Each rank imports it, which takes two seconds; a launcher that did so first would keep them waiting."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text(TEXT)
    script = """
import sys
from phalanx.runtime.process import launch
from phalanx.cli.app import app
def begin(*_, **__):
    sys.exit(3 if "torch" in sys.modules else 4)
launch.launch = begin
app(sys.argv[1:])
"""
    environment = os.environ | {"PHALANX_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()], cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 4


@pytest.mark.usefixtures("whole")
def test_interrupted_and_resumed_is_as_if_never_stopped(here: Path) -> None:
    process = Launcher(here, "train job.toml --set train.name=stopped --set train.steps=30")
    run = here / "runs" / "stopped"
    wait_for_step(run, 3)
    process.signal(signal.SIGINT)
    code, _, err = process.finish(60)
    if code != 130:  # it was faster than the signal
        assert code == 0, err
    else:
        assert "state saved" in err
        assert len(rows(run)) < 30
        text_of(here, "train --resume", run=forked)
    straight, stopped = rows(here / "runs" / "whole"), rows(run)
    assert [r["step"] for r in stopped] == list(range(1, 31))
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in stopped] == [r[key] for r in straight]
    assert not at_work(here)


@pytest.mark.usefixtures("whole")
def test_what_a_resumed_run_may_not_become(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    plan = (here / "runs" / "whole" / "plan.json").read_text()
    alone = ["strategy.dp=2", "strategy.local=2"]
    for changes, said in (
        ([], "is finished at step 30"),
        (["train.steps=40", "model.hidden=64"], "model: cannot change"),
        (["train.steps=40", "train.seed=5"], "train.seed = 5: cannot change"),
        (["train.steps=40", *alone], r"job.outer.momentum = 0.9: needs state of the outer optimizer, .*; use 0"),
        (["train.steps=40", *alone, "job.outer.momentum=0", "job.outer.mix=0.5"], "job.outer.mix = 0.5: needs state"),
    ):
        with pytest.raises(InputError, match=said):
            resumed_job(Path("job.toml"), ["train.name=whole", *changes])
    with monkeypatch.context() as damaged:  # an earlier checkpoint has steps left
        damaged.setattr(
            "phalanx.runtime.checkpoint.store.defect",
            lambda _, step, *__: "damaged" if step == 30 else None,
        )
        assert resumed_job(Path("job.toml"), ["train.name=whole"]).train.steps == 30
    text = here / "text.txt"
    text.write_text(TEXT + "and one more line")
    code, _, err = phalanx(here, "train job.toml --set train.name=whole --set train.steps=40 --resume")
    text.write_text(TEXT)
    assert code == 2
    assert "has changed since the run began" in err
    assert (here / "runs" / "whole" / "plan.json").read_text() == plan
    elsewhere = here / "elsewhere.txt"  # a text is known by its content
    elsewhere.write_text(TEXT)
    monkeypatch.setattr(launch, "launch", _no_ranks)
    moved = ("train", "job.toml", "--set", "train.name=whole", "--set", "train.steps=40", "--resume")
    code, _, err = phalanx(here, *moved, "--set", "train.data=elsewhere.txt")
    assert (code, err.splitlines()[-1]) == (2, "error: ranks: were to begin")
    assert phalanx(here, "generate runs/whole --tokens 2")[0] == 0


@pytest.mark.usefixtures("whole")
def test_a_run_in_another_place_is_not_taken_for_the_one_of_its_name(here: Path) -> None:
    shutil.copytree(here / "runs" / "whole", here / "copy")
    shutil.copytree(here / "runs" / "whole", here / "runs" / "whole.20261126")
    for named in ("copy", "copy/plan.json", "runs/whole.20261126"):
        assert (
            f"--resume = '{named.removesuffix('/plan.json')}': is a copy of a run that is resumed from"
            in error_of(here, "train", named, "--resume", "--set", "train.steps=40")
        )
    assert "is finished at step 30" in error_of(here, "train runs/whole --resume --set train.steps=30")
    shutil.rmtree(here / "copy")
    shutil.rmtree(here / "runs" / "whole.20261126")


@pytest.mark.usefixtures("whole")
def test_a_run_whose_only_checkpoint_is_damaged_says_so(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "runs" / "whole", tmp_path / "runs" / "whole")
    shutil.copy(here / "job.toml", tmp_path)
    saved = tmp_path / "runs" / "whole" / "checkpoint"
    for step in ("10", "20"):
        shutil.rmtree(saved / f"step-000000{step}", ignore_errors=True)
    (saved / "step-00000030" / "rank-00001.safetensors").unlink()
    why = "holds no intact checkpoint: that of step 30 is damaged (rank-00001.safetensors is missing)"
    for words in (
        ("generate", "runs/whole"),
        ("runs", "export", "runs/whole", "--out", "hf"),
        ("train", "--resume"),
        ("train", "job.toml", "--resume", "--set", "train.name=whole"),
    ):
        assert why in error_of(tmp_path, *words)


def test_little_text_and_a_long_prompt_still_end_well(here: Path) -> None:
    (here / "little.txt").write_text(TEXT[:900])
    words = ("--set", "train.name=little", "--set", "train.data=little.txt", "--set", "train.steps=4")
    long = "a truth " * 80
    code, out, err = forked(here, "train job.toml", *words, "--set", f"train.prompt={long}", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["eval_loss"], result["last_step"], result["sample"]) == (None, 4, "")
    assert "no sample of text" in err


def test_a_run_of_one_step_has_no_timeline_and_goes_on_with_its_buckets(here: Path) -> None:
    """Its only step is the instrumented one, too slow to be timed. On resume buckets keep their size, whatever a new
    measurement of this machine says."""
    words = ("--set", "train.name=short", "--set", "train.steps=1", "--set", "train.warmup=0")
    out = text_of(here, "train job.toml", *words, run=forked)
    assert "buckets of " in out
    assert "a step of" not in out
    run = here / "runs" / "short"
    assert not (run / "trace.json").exists()
    assert json.loads((run / "recorded.json").read_text())["timeline"] is None
    old = json.loads((run / "plan.json").read_text())
    old["strategy"]["bucket"] = 0.0078125
    old["choices"]["bucket"] = {"bytes": 8192, "reason": "of another day"}
    (run / "plan.json").write_text(json.dumps(old))
    out = text_of(here, "train job.toml", *words, "--resume", "--set", "train.steps=3", run=forked)
    line = next(line for line in out.splitlines() if line.startswith("a step of"))
    assert line.endswith("; timeline in runs/short/trace.json")
    assert json.loads((run / "trace.json").read_text())["otherData"]["step"] == 3
    assert "buckets of 8 KiB: of another day" in out
    assert "the recorded step equals the plan" in out
    new = json.loads((run / "plan.json").read_text())
    assert (new["strategy"], new["choices"]["bucket"]) == (old["strategy"], old["choices"]["bucket"])


def test_a_run_is_trained_by_one_process_at_a_time(here: Path) -> None:
    process = Launcher(here, "train job.toml --set train.name=mine --set train.steps=100000")
    wait_for_step(here / "runs" / "mine", 2)
    code, _, err = phalanx(here, "train job.toml --set train.name=mine")
    process.signal(signal.SIGTERM)
    assert (code, "another process" in err) == (2, True), err
    code, _, other = process.finish()
    assert code == 130, other
    assert "state saved" in other


def test_ctrl_c_during_parity_is_an_interruption(here: Path, tmp_path: Path) -> None:
    words = ("parity", "job.toml", "--steps", "100000")
    process = Launcher(here, *words, environment={"TMPDIR": str(tmp_path)})
    for _ in range(300):
        pages = [page for attempt in tmp_path.glob("*/attempt-0") for page in status.read(attempt).values()]
        if len(pages) == 2 and all("micro-batch" in page.doing for page in pages):
            break
        time.sleep(0.1)
    assert len(at_work(here)) == 3
    process.signal(signal.SIGINT)
    code, _, err = process.finish()
    assert code == 130, err
    assert "Traceback" not in err
    assert not at_work(here)


def test_another_layout_reads_the_checkpoint(here: Path) -> None:
    """The data are many short documents, which are kept separate."""
    lines = [json.dumps({"text": f"{sentence}."}) for sentence in TEXT.split(".\n\n") if sentence]
    (here / "lines.jsonl").write_text("\n".join(lines))
    words = ("train", "job.toml", "--set", "train.name=moved", "--set", "train.data=lines.jsonl")
    words += ("--set", "job.documents=separate")
    assert forked(here, *words)[0] == 0
    longer = ("--resume", "--set", "train.steps=36", "--strategy", "dp=1,micro_batch=4")
    text_of(here, *words, *longer, run=forked)
    metrics = rows(here / "runs" / "moved")
    assert [r["step"] for r in metrics] == list(range(1, 37))
    assert metrics[-1]["overlap"] == metrics[-1]["exposed_communication_s"] == {}  # one rank, nobody to talk to
    trace = json.loads((here / "runs" / "moved" / "trace.json").read_text())
    assert trace["otherData"]["step"] == 33  # of the run that went on
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert json.loads((here / "runs" / "moved" / "plan.json").read_text())["choices"]["bucket"] is None


@pytest.mark.usefixtures("whole")
def test_torchrun_starts_the_same_file(here: Path) -> None:
    """In forked processes; a new interpreter under torchrun is test_torchrun_starts_generation's."""
    options = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    words = ("train", "job.toml", "--set", "train.name=torchrun")
    out = text_of(here, *words, torchrun=options, instead={"phalanx": "phalanx.__main__"}, run=forked)
    assert "predicted against measured" in out
    ours, theirs = rows(here / "runs" / "whole"), rows(here / "runs" / "torchrun")
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]


@pytest.mark.long
@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("ranks", [2, 3])
def test_under_torchrun_too_the_reason_is_one_line(here: Path, ranks: int) -> None:
    """Of two ranks one is killed; three are too many for the job."""
    options = ("--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    words = ("train", "job.toml", "--set", f"train.name=lost-{ranks}", "--set", "train.steps=100000")
    process = Launcher(here, *words, torchrun=options, instead={"phalanx": "phalanx.__main__"})
    if ranks == 2:
        wait_for_step(here / "runs" / "lost-2", 3)
        os.kill(max(set(at_work(here)) - {process.pid}), signal.SIGKILL)
    code, _, err = process.finish()
    (error,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert re.search("rank 1 (died|did not arrive)" if ranks == 2 else "= 2 ranks, but there are 3", error), error
    assert code == 1


@pytest.mark.long
@pytest.mark.usefixtures("whole")
def test_torchrun_starts_generation(here: Path) -> None:
    """The text is that of one process, and rank 0 alone speaks, also of a mistake."""
    words = ("generate", "runs/whole", "--prompt", "the quick", "--tokens", "8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "phalanx", *words]
    for line, code in ((("--strategy", "tp=2"), 0), ((), 1)):
        done = subprocess.run([*command, *line], cwd=here, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == code, done.stderr
        if not code:
            assert done.stdout == printable(phalanx(here, *words)[1])
        else:
            assert done.stderr.count("takes 1 ranks, torchrun or srun started 2") == 1


def test_parity_from_the_command_line(here: Path) -> None:
    result = json_of(here, "parity job.toml --strategy dp=2,micro_batch=4 --steps 3 --json", run=forked)
    assert result["passed"] is True
    assert result["loss_rel_max"] <= 1e-9
    assert result["grad_rel_max"] <= 1e-9
    assert [d["optimizer"] for d in result["optimizers"]] == ["sgd", "adamw"]
    assert result["compression"] is None


def test_parity_of_a_compressed_strategy_says_that_nothing_is_lost(here: Path) -> None:
    out = text_of(here, "parity job.toml --strategy dp=2,micro_batch=4,compression=int4 --steps 2", run=forked)
    assert "sent + kept back = gradient to" in out
    assert "holds" in out


def test_planning_for_a_preset_needs_no_torch(here: Path) -> None:
    """torch is hidden; a plan needs only arithmetic."""
    code = """
import json, sys
sys.modules["torch"] = sys.modules["tokenizers"] = None
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from phalanx.cli.app import main
for name in ("8b", "70b", "xl"):
    sys.argv[1:] = ["plan", name + ".toml", "--json"]
    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
    for name, model, job in (
        ("8b", "llama3-8b", 'seq = 4096\nprecision = { compute = "bfloat16" }'),
        ("70b", "llama3-70b", "seq = 4096"),
        ("xl", "gpt2-xl", "seq = 1024"),
    ):
        text = f'[model]\npreset = "{model}"\n[cluster]\npreset = "dgx-h100"\n[job]\nglobal_batch = 64\n{job}\n'
        (here / f"{name}.toml").write_text(text)
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (fits, small, err), (fails, _, why), (fits_too, tiny, err_too) = map(json.loads, done.stdout.splitlines())
    assert fits == 0, err
    result = json.loads(small)
    # zero=0 keeps 18 bytes for each of 8 G parameters on every GPU; sharded over 8 of them the model fits.
    assert "zero=" in result["best"]["strategy"]
    assert all("GiB" in c["rejected"] for c in result["alternatives"] if "zero" not in c["strategy"])
    assert fails == 2, why
    assert "nothing fits" in why
    assert fits_too == 0, err_too
    result = json.loads(tiny)
    assert "pp=" not in result["best"]["strategy"]  # it fits, and nothing would have to wait
    assert len(result["alternatives"]) > 10


WRONG_PIPELINES = [  # a model of two layers, on two ranks
    ("pp=3", "needs 3 ranks"),
    ("pp=2,schedule=zbv", "strategy.schedule = 'zbv': is not a pipeline schedule; did you mean zb-v?"),
    ("pp=2,schedule=interleaved", "strategy.virtual = 1: interleaved has several chunks per rank; use virtual=2"),
    ("pp=2,virtual=2", "strategy.virtual = 2: 1f1b has one chunk per rank"),
    ("pp=2,schedule=zb-v,virtual=2", "zb-v always has two chunks per rank"),
    (
        "pp=2,schedule=interleaved,virtual=3",
        "pp = 2: makes 6 chunks (3 per rank), too many for model.layers = 2; use fewer",
    ),
    (
        "pp=2,schedule=dualpipe-v,micro_batch=4",
        "strategy.micro_batch = 4: makes 2 micro-batches, and dualpipe-v needs",
    ),
    ("pp=2,layers=1/2", "'1/2': gives 3 blocks to 2 chunks; there are 2 blocks and 2 chunks"),
    ("pp=2,layers=1/1/0", "gives 2 blocks to 3 chunks"),
    ("pp=2,schedule=zb-v,layers=1/0/1/0", "leaves a chunk without blocks that has neither"),
    ("layers=2", "strategy.layers = '2': applies to pipelines only, and pp = 1"),
    ("schedule=gpipe", "applies to pipelines only, and pp = 1; use pp >= 2"),
]
_STEP = (
    *("--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "8"),
    *("--batch", "64", "--seq", "1024", "--strategy", "zero=1"),
)
WRONG = [
    (("train", "none.toml"), "no such file"),
    (("train",), "JOB.toml"),
    (("train", "--modle", "x"), "--modle: no such option"),
    (("plan", "--model", "gpt2", "--tp", "2"), "--tp: no such option; write --where tp=2"),
    (("predict", "--tp=2"), "--tp: no such option; write --strategy tp=2"),
    (("predict", "--attention", "flash3"), "--attention: no such option; write --options attention=flash3"),
    (("simulate", *_STEP, "--jitter", "2%", "--seed", "-1"), "--seed = -1: must be from 0 to 2^63 - 1"),
    (("simulate", *_STEP, "--lengths", "lognormal:500,1.2", "--seed", "-1"), "--seed = -1: must be from 0"),
    (("simulate", "goodput", *_STEP, "--days", "3", "--seed", "-1"), "--seed = -1: must be from 0"),
    (("predict", "--fp8"), "--fp8: no such option; write --precision fp8"),
    (("trian",), "command = 'trian': no such command; did you mean train?"),
    (("pipeline", "show", "1f1b", "--ranks", "x"), "--ranks = 'x': should be a valid integer"),
    (
        ("collectives", "table", "--alpha", "5us"),
        "--alpha = '5us': should be a number alone; --help says: Latency of a message, in µs",
    ),
    (("pipeline", "show", "1f1b", "--ranks", "1,02"), "--ranks = '1,02': should be a valid integer, such as"),
    (("generate", "runs/job", "--tokens"), "--tokens: requires an argument"),
    (("tables", "models", "llama3-8b", "gpt2"), "unexpected extra argument"),
    (("cluster", "simulate", "jobs.csv", "--cluster", "2x8"), "--trace: is missing; write --trace jobs.csv"),
    (("serve", "memory", "llama3-70b"), "--model: is missing; write --model llama3-70b"),
    (("serve", "plan", "llama3-70b"), "'llama3-70b' is the value of no option, and this takes options alone; see"),
    (("plan", "job.toml", "--set", f"train.name={'x' * 5000}"), "train.name = 'xxx"),
    (("plan", "job.toml", "--set", "cluster.nodes=99999999999999"), "99999999999999: must be at most"),
    (("plan", "job.toml", "--set", "strategy.recompute=every:99"), "recomputes the first block alone"),
    (("train", "broken.toml"), "is not TOML"),
    (("plan", "cut.json"), "a job file is TOML; phalanx train, explain and lint read plans"),
    (("explain", "job.toml"), "a plan is JSON; phalanx plan job.toml writes its plan.json"),
    (("train", "binary.toml"), "cannot be read"),
    (("train", "job.toml", "--set", "strategy.dp=3"), "dp = 3"),
    (("train", "job.toml", "--set", "strategy.dp=4"), "cluster.ranks is 2"),
    (("train", "job.toml", "--set", "strategy.micro_batch=3"), "use one of 1, 2, 4"),
    (("train", "job.toml", "--set", "strategy.micro_bach=2"), "did you mean micro_batch?"),
    (("train", "job.toml", "--set", "strategy.ep=2"), "the model has no experts"),
    (("train", "job.toml", "--set", "strategy.pp=2"), "needs 4 ranks, cluster.ranks is 2"),
    *((("train", "job.toml", "--strategy", line), said) for line, said in WRONG_PIPELINES),
    (("train", "job.toml", "--strategy", "dp=2;zero=1"), "strategy"),
    (("train", "job.toml", "--set", "nonsense"), "--set"),
    (("train", "job.toml", "--set", "modle.hidden=3"), "no such table"),
    (("train", "job.toml", "--set", "train.lr=fast"), "train.lr = 'fast'"),
    (("train", "job.toml", "--set", "train.lr=nan"), "train.lr"),
    (("train", "job.toml", "--set", "train.steps=2.5"), "train.steps"),
    (("train", "job.toml", "--set", "train.seed=-1"), "train.seed"),
    (("train", "job.toml", "--set", "train.check_sync=-1"), "train.check_sync"),
    (("train", "job.toml", "--set", "train.lr_base_batch=-4"), "lr_base_batch"),
    (("train", "job.toml", "--set", "job.optimizer.betas=[0.9, 1.5]"), "betas[1]"),
    (("train", "job.toml", "--set", "job.precision.reduce=float16"), "needs the loss scale"),
    (("train", "job.toml", "--set", "train.nonfinite=halt"), "should be 'stop' or 'skip'"),
    (("train", "job.toml", "--set", "strategy.bucket=inf"), "finite"),
    (("plan", "job.toml", "--set", "cluster.file=odd.toml"), "bandwith"),
    (("plan", "job.toml", "--set", "cluster.preset=dgx-h100"), "cluster.ranks"),
    (("train", "job.toml", "--set", "model.config=list.json"), "not supported"),
    (("train", "job.toml", "--set", "train.name=../x"), "plain folder name"),
    (("train", "job.toml", "--set", "train.data=none.txt"), "no such file or folder"),
    (("train", "job.toml", "--set", "train.data=empty.txt"), "is empty"),
    (("train", "job.toml", "--set", "train.data=bad.jsonl"), "bad.jsonl:1 has body"),
    (("train", "job.toml", "--set", "train.data=ids.bin"), "token 65535 when read as uint16"),
    (("train", "job.toml", "--set", "train.tokenizer=none.json"), "train.tokenizer"),
    (("train", "job.toml", "--set", "train.end_of_text=</s>"), "needs a train.tokenizer"),
    (("train", "job.toml", "--set", "train.data_dtype=int7"), "train.data_dtype"),
    (("train", "job.toml", "--set", "job.documents=separate"), "no end-of-text separates documents"),
    (("train", "job.toml", "--set", "job.documents=apart"), "job.documents"),
    (("train", "job.toml", "--set", "job.seq=65"), "max_seq"),
    (("train", "job.toml", "--set", "job.global_batch=0"), "at least 1"),
    (("train", "job.toml", "--set", "job.optimizer.name=adam"), "job.optimizer.name"),
    (("train", "job.toml", "--set", "job.precision.compute=fp8"), "job.precision.compute"),
    (("train", "job.toml", "--set", "model.heads=3"), "heads"),
    (("train", "job.toml", "--set", "model.vocab=100"), "256 bytes"),
    (("train", "job.toml", "--set", "model.preset=lama"), "did you mean"),
    (("train", "job.toml", "--set", "model.config=config.json"), "is not JSON"),
    (("train", "gpus.toml", "--set", "cluster.preset=dgx-h10"), "did you mean"),
    (("train", "gpus.toml"), "is not this machine"),
    (("train", "job.toml", "--set", "cluster.ranks=4000", "--set", "strategy=auto"), "too many for this machine"),
    (("train", "job.toml", "--set", "cluster.file=none.toml"), "cluster"),
    (("plan", "gpus.toml", "--strategy", "dp=16"), "dp = 16"),
    (("plan", "gpus.toml", "--strategy", "dp=16", "--set", "job.global_batch=32"), "has 8 ranks"),
    (("plan", "gpus.toml", "--set", "cluster.nodes=0"), "nodes"),
    (("parity", "job.toml", "--dtype", "float16"), "--dtype"),
    (("parity", "job.toml", "--strategy", "auto"), "parity examines one strategy"),
    (("parity", "job.toml", "--steps", "0"), "--steps"),
    (("generate", "runs/none"), "no such file"),
    (("generate", "job.toml"), "is not a folder"),
    (("measure", "--ranks", "0"), "--ranks"),
    (("collectives", "show", "rign"), "did you mean ring?"),
    (("collectives", "show", "ring", "--op", "all_reduse"), "did you mean all_reduce"),
    (("collectives", "show", "ring", "--ranks", "40"), "too many to draw"),
    (("collectives", "show", "ring", "--ranks", "0"), "--ranks"),
    (("collectives", "prove", "--max-ranks", "0"), "--max-ranks"),
    (("collectives", "prove", "--max-ranks", "34"), "--max-ranks"),
    (("collectives", "table", "--bytes", "5QB"), "is not a size"),
    (("collectives", "table", "--cluster", "dgx-h10"), "did you mean dgx-h100"),
    (("train", "job.toml", "--max-restarts", "-1"), "--max-restarts = -1: must not be negative"),
    (("collectives", "table", "--ranks", "0"), "--ranks"),
    (("measure", "--dtype", "int8"), "--dtype"),
]


def test_without_tensorboard_one_line_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from phalanx.cli.app import app

    monkeypatch.chdir(here)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = CliRunner().invoke(app, ["train", "job.toml", "--set", "train.tensorboard=true"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert "pip install 'phalanx[tensorboard]'" in result.stderr


@pytest.fixture
def spoiled(here: Path) -> Path:
    (here / "broken.toml").write_text("[model\n")
    (here / "cut.json").write_text("{")
    (here / "binary.toml").write_bytes(b"\xff\xfe")
    (here / "empty.txt").write_text("")
    (here / "bad.jsonl").write_text('{"body": "some text"}\n')
    (here / "ids.bin").write_bytes(b"\xff" * 1000)
    (here / "config.json").write_text("{")
    (here / "list.json").write_text('{"model_type": ["llama"]}')
    (here / "odd.toml").write_text('name = "odd"\n[[tiers]]\nname = "a"\nbandwith = 3\n')
    (here / "gpus.toml").write_text(JOB.replace("ranks = 2", 'preset = "dgx-h100"'))
    return here


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, tuple) else None)
def test_wrong_input_gets_one_line(
    spoiled: Path, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from phalanx.cli.app import app

    monkeypatch.chdir(spoiled)
    before = {p.name for p in spoiled.glob("runs/*")}
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert {p.name for p in spoiled.glob("runs/*")} == before


def test_collectives_are_proved_shown_and_compared(here: Path) -> None:
    out = text_of(here, "collectives prove --max-ranks 5")
    assert out.strip().splitlines()[-1].endswith("schedules proved, 1 to 5 ranks")
    out = text_of(here, "collectives show ring --ranks 3")
    assert "round 4 of 4" in out
    assert out.count("ABC       ABC       ABC") == 3
    assert (
        json_of(here, "collectives table --bytes 100MB --ranks 64 --json")["rows"][0]["algorithm"] == "hierarchical"
    )


def test_resume_with_nothing_to_resume(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    code, _, err = phalanx(tmp_path, "train job.toml --resume")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "holds no checkpoint" in err


def test_every_command_that_answers_has_json() -> None:
    def missing(command: Any, name: str) -> list[str]:
        inside = getattr(command, "commands", None)
        if inside is not None:
            return [found for key, child in inside.items() for found in missing(child, f"{name} {key}".strip())]
        return [] if any("--json" in p.opts for p in command.params) else [name]

    # Two commands that write files, a page, and the server for agents.
    assert sorted(missing(typer.main.get_command(app), "")) == ["mcp", "pipeline csv", "runs report", "ui"]


def test_more_ranks_than_gpus_are_refused_unless_they_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "fingerprint", lambda: {"gpus": ["H100"], "cores": 16})
    monkeypatch.setenv("PHALANX_SHARE_GPUS", "0")
    with pytest.raises(
        InputError, match=r"2: is too many for this machine with 1 GPU; .*or set PHALANX_SHARE_GPUS=1"
    ):
        this_machine.require_local(2)
    monkeypatch.setenv("PHALANX_SHARE_GPUS", "1")
    this_machine.require_local(2)
    assert this_machine.share_gpus(2)
    assert not this_machine.share_gpus(1)


def test_parity_of_ranks_that_share_a_gpu_measures_nothing_first(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("measures the machine")

    monkeypatch.setattr(parity, "local_cluster", measured)
    file = with_strategy(job_file.load(here / "job.toml", ()), "dp=2,micro_batch=4")
    with pytest.raises(AssertionError, match="measures"):
        parity.parity(file, 1, "float64", lambda _: None)
    monkeypatch.setattr(parity, "share_gpus", lambda ranks: ranks == 2)
    assert parity.parity(file, 1, "float64", lambda _: None).passed


def test_the_cluster_of_a_file_is_shown_as_a_preset_is(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'preset = "pcie-a10"\nnodes = 2\nranks_per_node = 2\ngb_per_s = { ethernet = 1.25 }\n'
    )
    shown = text_of(tmp_path, "tables", "clusters", "mine.toml")
    assert "ethernet, 1.25 shared" in shown
    assert "as the cluster's file says" in shown
    assert "--nodes = 3: is said by mine.toml; leave it out" in error_of(
        tmp_path, "tables", "clusters", "mine.toml", "--nodes", "3"
    )
