"""Damaged weights, and imports and exports that must fail: one line says why, and nothing is lost."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from support.saved_models import save, tensors
from torch import Tensor
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.runs.folder import claim


def without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        t = tensors(folder)
        del t[name]
        safetensors.torch.save_file(t, folder / "model.safetensors")

    return damage


def changed(name: str, value: Tensor) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        safetensors.torch.save_file(tensors(folder) | {name: value}, folder / "model.safetensors")

    return damage


def cut(at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:at])

    return damage


def nested(folder: Path) -> None:
    header = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def text(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def shard_missing(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_lies(folder: Path) -> None:
    shard_missing(folder)
    one = {"model.norm.weight": torch.ones(32)}
    safetensors.torch.save_file(one, folder / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("model.norm.weight"), "lacks model.norm.weight [32]"),
        (without("lm_head.weight"), "lacks lm_head.weight [97, 32]; set model.tied = true if"),
        (changed("model.norm.weight", torch.ones(33)), "model.norm.weight has shape [33], the model needs [32]"),
        (changed("model.norm.weight", torch.ones(32).to(torch.float8_e4m3fn)), "is stored as F8_E4M3"),
        (changed("lm_head.weight", torch.ones(128, 32)), "has 128 rows, model.vocab is 97; a padded vocabulary"),
        (changed("model.layers.2.norm.weight", torch.ones(2)), "holds model.layers.2.norm.weight [2], which"),
        (cut(5), "is not a safetensors file"),
        (cut(200), "is cut short: 200 bytes, its header alone"),
        (cut(40_000), "is cut short: 40000 bytes of"),
        (text, "is not a safetensors file"),
        (nested, "is not a safetensors file (its header is not JSON)"),
        (only_a_pickle, "holds pytorch_model.bin, a pickle, and no model.safetensors; convert it"),
        (no_config, "config.json': no such file"),
        (shard_missing, "model-00001-of-00002.safetensors': is missing, model.safetensors.index.json names it"),
        (index_lies, "lacks lm_head.weight, which model.safetensors.index.json says is there"),
    ],
)
def test_damage_is_named_in_one_line_before_anything_is_written(  # type: ignore[no-untyped-def]
    damage: Callable[[Path], None], words: str, theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(save(tmp_path / "hf", theirs("llama"), lambda t: t))
    found = CliRunner().invoke(app, ["runs", "import", "hf"])
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert found.output.startswith("error: model.config = " if damage is no_config else "error: HF_DIR = ")
    assert found.output.count("\n") == 1
    assert not Path("runs").exists()


def test_an_import_moves_nothing_away_before_it_has_succeeded(  # type: ignore[no-untyped-def]
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    save(Path("runs/hf"), theirs("llama"), lambda t: t)
    save(Path("hf"), theirs("llama"), lambda t: t)

    def refused(words: str, source: str, name: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        found = CliRunner().invoke(app, ["runs", "import", source, "--name", name])
        assert (found.exit_code, words in found.output) == (2, True), found.output
        locks = {p for p in tmp_path.rglob("*.lock")}
        assert set(tmp_path.rglob("*")) - locks == set(before) - locks

    refused("--name = 'hf': runs/hf is where the weights are read from; choose another", "runs/hf", "")
    refused("is where the weights are read from", "runs/../runs/hf", "hf")
    with ExitStack() as stack:
        claim(Path("runs/hf"), stack, "train.name")
        assert Path("runs/.hf.lock").stat().st_mode & 0o633 == 0o600  # its owner may open it again
        refused("--name = 'hf': is in use by another process", "hf", "hf")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("phalanx.runtime.checkpoint.store.write_alone", full)
        refused("cannot be made ([Errno 28] No space left on device)", "hf", "hf")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**4))
        refused("the disk has 9.77 KiB free", "hf", "hf")
    assert CliRunner().invoke(app, ["runs", "import", "hf"]).exit_code == 0
    assert len(list(Path("runs").glob("hf.*/model.safetensors"))) == 1
    assert Path("runs/hf/model.json").exists()


def test_an_export_overwrites_nothing_loses_nothing_and_says_all(  # type: ignore[no-untyped-def]
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "hf", theirs("llama"), lambda t: t | {"model.norm.weight": torch.full((32,), 1e5)})
    assert CliRunner().invoke(app, ["runs", "import", "hf"]).exit_code == 0

    def refused(words: str, *more: str) -> None:
        found = CliRunner().invoke(app, ["runs", "export", "runs/hf", "--out", *more])
        assert (found.exit_code, words in found.output) == (2, True), found.output
        assert not [p for p in tmp_path.iterdir() if "writing" in p.name]

    refused("exists and is not empty", "hf")
    Path("file").touch(0o777)
    refused("error: --out = 'file/out': nothing can be written to", "file/out")
    assert "exporting" not in CliRunner().invoke(app, ["runs", "export", "runs/hf", "--out", "file/out"]).output
    found = CliRunner().invoke(app, ["runs", "export", "hf", "--out", "out"])
    assert "RUN = 'hf': is not a run; phalanx runs import makes one from Hugging Face weights" in found.output
    save(tmp_path / "half", folder, lambda t: {name: value.bfloat16() for name, value in t.items()})
    assert CliRunner().invoke(app, ["runs", "import", "half"]).exit_code == 0
    found = CliRunner().invoke(app, ["runs", "export", "runs/half", "--out", "out", "--dtype", "float16"])
    assert "has 99840, which overflows" in found.output  # 10^5 in bfloat16
    refused("has 100000, which overflows", "out", "--dtype", "float16")
    refused("is not a type for weights", "out", "--dtype", "int8")
    refused("no such checkpoint; it has 0", "out", "--step", "3")
    refused("is not a size", "out", "--shard-size", "many")
    about = json.loads(Path("runs/hf/model.json").read_text())
    for field, value, words in (
        ("out_bias", False, "the checkpoint has 2 parameters more than the model"),
        (
            "rotary_dim",
            4,
            "model.rotary_dim = 4: a llama config.json of transformers cannot express it (it would mean 6)",
        ),
    ):
        Path("runs/hf/model.json").write_text(json.dumps({**about, "model": about["model"] | {field: value}}))
        refused(words, "out")
    assert not Path("out").exists()
    assert folder.exists()
