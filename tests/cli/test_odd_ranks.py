"""Numbers of ranks that are no powers of two: what 2 and 4 divide hides mistakes in padding, cutting and pairing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.forked_cli import phalanx
from support.in_process_cli import json_of, text_of
from support.in_process_cli import phalanx as in_process
from support.quick_runs import JOB, TEXT

BRIEF = {"phalanx.measure.worker": "support.tiny_measurement"}


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5, 6, 7))])
def test_measuring_and_training(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    here = tmp_path / "work"
    here.mkdir()
    (here / "job.toml").write_text(JOB)
    (here / "text.txt").write_text(TEXT)
    short = [] if ranks == 3 else ["--quick"]  # many ranks that wait awake on few cores take minutes
    code, _, err = phalanx(here, "measure --ranks", str(ranks), *short, instead=BRIEF)
    assert code == 0, err
    assert f"measuring collectives of {ranks} ranks ..." in err
    sets = (f"cluster.ranks={ranks}", f"job.global_batch={2 * ranks}", "train.steps=4", "train.warmup=0")
    words = [word for item in (*sets, "train.sample_tokens=0") for word in ("--set", item)]
    for line in (f"dp={ranks},zero=3",) if ranks == 3 else (f"dp={ranks}", f"dp={ranks},zero=3"):
        assert (
            json_of(here, "train job.toml --strategy", line, "--json", *words, instead=BRIEF, run=phalanx)[
                "last_step"
            ]
            == 4
        )
    in_one = f"dp={ranks},zero=1"
    sets = tuple(words)
    for command in (
        ("plan", "job.toml", "--out", "plan.json", "--set", "strategy=auto", *sets),
        ("plan", "job.toml", "--strategy", in_one, "--more", *sets),
        ("explain", "plan.json"),
        ("tables", "comm", "plan.json"),
        ("verify", "job.toml", "--strategy", in_one, *sets),
        ("collectives", "table", "--cluster", "local", "--ranks", str(ranks), "--bytes", "1000"),
        ("tables", "mesh", "--strategy", in_one),
    ):
        text_of(here, *command)
    code, _, err = in_process(here, "lint plan.json")
    assert code in (0, 1), err
    assert "error" not in err


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7])
def test_every_family_every_pipeline_parity_and_text(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes minutes: a sweep of all families, parity, generation."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    here = tmp_path / "work"
    here.mkdir()
    (here / "job.toml").write_text(JOB)
    (here / "text.txt").write_text(TEXT)
    sets = (f"cluster.ranks={ranks}", f"job.global_batch={2 * ranks}", "train.steps=4", "train.warmup=0")
    words = [word for item in (*sets, "train.sample_tokens=0") for word in ("--set", item)]
    for line in (
        ("measure", "--ranks", str(ranks), "--quick"),
        ("train", "sweep", "job.toml", "--steps", "3", *words),
    ):
        text_of(here, *line, instead=BRIEF, run=phalanx)
    line = ("parity", "job.toml", "--strategy", f"dp={ranks},zero=2", "--steps", "2", *words)
    text_of(here, *line, run=phalanx)
    out = text_of(here, "train job.toml --strategy", f"dp={ranks}", "--json", *words, instead=BRIEF, run=phalanx)
    text_of(here, "generate", json.loads(out)["run"], "--tokens", "4", "--strategy", f"dp={ranks}", run=phalanx)


def test_what_an_interrupted_measurement_kept_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    code, _, err = phalanx(tmp_path, "measure --ranks 1 --quick", instead=BRIEF)
    assert code == 0, err
    assert "kernels, 1 rank at once ... (1 of 1)" in err
    (short,) = (tmp_path / "cache" / "machines").iterdir()
    rows = json.loads(short.read_text())
    kept = short.with_name(short.name.replace(".quick.json", ".kept"))
    kept.write_text(json.dumps({"kernels": rows["kernels"], "collectives": []}))
    code, out, err = phalanx(tmp_path, "measure --ranks 1 --json", instead=BRIEF)
    assert code == 0, err
    assert "is kept" in err
    assert "kernels, 1 rank" not in err
    assert json.loads(out)["kernels"] == rows["kernels"]
    assert not kept.exists()
