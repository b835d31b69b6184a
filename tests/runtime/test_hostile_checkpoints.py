"""Checkpoints that an enemy has written: every command that reads one refuses it in one line, and runs none of it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import forked_cli
from support.in_process_cli import phalanx, text_of
from support.resealed import reseal
from support.sockets import Touch
from support.struck_runs import folder_of_runs, words

from phalanx.nn.hugging_face import files
from phalanx.runtime.checkpoint.manifest import MANIFEST
from phalanx.spec.documents import seal
from phalanx.spec.errors import InputError
from phalanx.spec.model import presets
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec

RANK, INDEX = "rank-00000.safetensors", "tensors.json"


def _pickle(path: Path, owned: Path) -> None:
    """Replace the tensors of a rank by a pickle of code, as torch.save would write them."""
    (path / RANK).write_bytes(pickle.dumps(Touch(owned)))
    reseal(path)


def _edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    del manifest["seal"]
    (path / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}))


def _edit_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))
    reseal(path)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """Replace a file by something else of the same name, whose size the manifest then names."""
    (path / RANK).unlink()
    make(path / RANK)
    _edit_manifest(path, lambda m: m["files"].update({RANK: [(path / RANK).lstat().st_size, "0" * 64]}))


def _names(name: str) -> Callable[[Path, Path], None]:
    return lambda path, _: _edit_manifest(path, lambda m: m["files"].update({name: [0, "0" * 64]}))


def _box(change: Callable[[list[Any]], object]) -> Callable[[Path, Path], None]:
    """Change the place of one box: [file, begin, offsets, sizes]."""
    return lambda path, _: _edit_index(path, lambda i: change(i["parameters.embed.token.weight"]["boxes"][0]))


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "a pickle of code": _pickle,
    "a file outside": _names("../../../plan.json"),
    "a device by its path": _names("/dev/zero"),
    "a file without a name": _names(""),
    "a link to a device": lambda path, _: _replace(path, lambda file: file.symlink_to("/dev/zero")),
    "a pipe": lambda path, _: _replace(path, os.mkfifo),
    "a folder for a file": lambda path, _: _replace(path, Path.mkdir),
    "a manifest of a terabyte": lambda path, _: os.truncate(path / MANIFEST, 2**40),
    "a manifest nested deeply": lambda path, _: (path / MANIFEST).write_text("[" * 10**5),  # type: ignore[dict-item, return-value]
    "a manifest of a list": lambda path, _: (path / MANIFEST).write_text("[]"),  # type: ignore[dict-item, return-value]
    "files that are numbers": lambda path, _: _edit_manifest(path, lambda m: m.update(files={"a": 1})),
    "a box beyond its file": _box(lambda box: box.__setitem__(1, 2**40)),
    "a box before its file": _box(lambda box: box.__setitem__(1, -8)),
    "a box beyond its tensor": _box(lambda box: box.__setitem__(2, [1, 0])),
    "a box in a file outside": _box(lambda box: box.__setitem__(0, "../../plan.json")),
    "a tensor larger than the disk": lambda path, _: _edit_index(
        path, lambda i: i["parameters.embed.token.weight"].update(shape=[2**31, 2**31])
    ),
    "an index of a list": lambda path, _: _edit_index(path, lambda i: i.update(a=[])),
}
HOSTILE |= {
    f"a manifest of step {str(step)[:5]}": lambda path, _, step=step: _edit_manifest(
        path, lambda m: m.update(step=step)
    )  # type: ignore[misc]
    for step in (1, 2.0, True, "2", None, 10**400)
}
HOSTILE["a manifest of version 3.0"] = lambda path, _: _edit_manifest(path, lambda m: m.update(version=3.0))
HOSTILE["another step's name"] = lambda path, _: path.rename(path.with_name("step-00000003"))  # type: ignore[dict-item, return-value]
THOROUGHLY = (
    "a pickle of code",
    "a device by its path",
    "a box beyond its file",
    "another step's name",
)  # in every command
BY_RANKS = ("a pickle of code", "a box beyond its file")  # what only the ranks of a resumed run find


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, measured: None) -> Path:
    """A folder with a run of a few steps, to be spoiled."""
    here = folder_of_runs(tmp_path_factory.mktemp("hostile"))
    code, _, err = forked_cli.phalanx(here, *words("good", "--set", "train.steps=2", "--set", "train.keep=1"))
    assert code == 0, err
    return here


def _spoiled(here: Path, kind: str) -> Path:
    """Return a copy of the run whose only checkpoint is hostile."""
    run = here / "runs" / "hostile"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(here / "runs" / "good", run)
    plan = run / "plan.json"
    plan.write_text(plan.read_text().replace('"name": "good"', '"name": "hostile"'))
    HOSTILE[kind](run / "checkpoint" / "step-00000002", here / "owned")
    return run


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_checkpoint_is_refused(here: Path, kind: str) -> None:
    _spoiled(here, kind)
    commands = [["generate", "runs/hostile", "--prompt", "the"]]
    if kind in THOROUGHLY:
        commands.append(["runs", "export", "runs/hostile", "--out", "exported"])
        commands.append(words("other", "--set", "train.weights=runs/hostile", "--set", "train.steps=1"))
    if kind in THOROUGHLY and kind not in BY_RANKS:
        commands.append(words("hostile", "--resume", "--set", "train.steps=4"))
    for command in commands:
        code, _, err = phalanx(here, *command)
        assert code in (1, 2), err
        assert err.strip().splitlines()[-1].startswith("error: "), err
        assert "Traceback" not in err
        assert not (here / "owned").exists()
        assert not (here / "exported").exists()


def test_verifying_a_run_reads_its_plan_only(here: Path) -> None:
    _spoiled(here, "a pickle of code")
    text_of(here, "verify runs/hostile")
    assert not (here / "owned").exists()


@pytest.mark.parametrize("kind", BY_RANKS)
def test_a_hostile_checkpoint_is_not_resumed(here: Path, kind: str) -> None:
    run = _spoiled(here, kind)
    code, _, err = forked_cli.phalanx(here, *words("hostile", "--resume", "--set", "train.steps=4"))
    assert code == 1, err
    assert "CheckpointError: checkpoint " in err.splitlines()[-1], err
    assert "cannot be loaded" in err.splitlines()[-1], err
    assert not (here / "owned").exists()
    assert run.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_weights_that_are_no_file_are_refused(tmp_path: Path, name: str, make: Callable[[Path], object]) -> None:
    make(tmp_path / name)
    with pytest.raises(InputError, match="not a regular file"):
        files.read(tmp_path, ModelSpec(**complete(presets.PRESETS["gpt2"])))
