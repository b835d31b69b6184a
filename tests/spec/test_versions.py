"""Files of version 1 are read: what they say is what today's file says. Those of unknown versions are refused."""

import json
from pathlib import Path

import pytest

from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.cluster_toml import cluster_from_toml, to_toml

DATA = Path(__file__).parent / "data"


def test_a_plan_of_version_1_is_read(tmp_path: Path) -> None:
    old = plan.read(DATA / "plan_v1.json")
    rates = old.cluster.rates("float32", 2)
    assert (rates.pass_slowdown, rates.fit_error) == (1.1695886170444707, 0.08186164479967584)
    assert rates.compression_per_byte["int8"] == 1.0553138734577264e-10
    assert [f.fit_error for f in old.cluster.collectives] == [
        0.06518972413133586,
        0.011739401533380725,
        0.09359484418001213,
    ]
    assert (old.model.residual, old.model.experts.local_count) == ("serial", None)  # type: ignore[union-attr]
    plan.write(old, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 2
    assert plan.read(tmp_path / "plan.json") == old
    assert plan.job_of(DATA / "plan_v1.json", ["train.steps=99"]).train.steps == 99


def test_a_cluster_file_without_a_version_is_of_version_1(tmp_path: Path) -> None:
    old = cluster_from_toml(DATA / "cluster_v1.toml")
    assert old.rates("float32", 2) == plan.read(DATA / "plan_v1.json").cluster.rates("float32", 2)
    (tmp_path / "new.toml").write_text(to_toml(old))
    assert "\nversion = 2\n" in "\n" + (tmp_path / "new.toml").read_text()
    assert cluster_from_toml(tmp_path / "new.toml") == old


def test_a_model_of_version_1_is_read(tmp_path: Path) -> None:
    old = json.loads((DATA / "plan_v1.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({"version": 1, "model": old["model"]}))
    model = plan.model_of(tmp_path)
    assert model == plan.read(DATA / "plan_v1.json").model
    plan.write_model(model, tmp_path)
    assert plan.model_of(tmp_path) == model


def test_unknown_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 99}')
    with pytest.raises(InputError, match=r"plan\.json': has version 99; this Phalanx reads versions 1 to 2"):
        plan.read(tmp_path / "plan.json")
    (tmp_path / "c.toml").write_text("version = 3\n")
    with pytest.raises(InputError, match=r"cluster\.file = .*c\.toml': has version 3; this"):
        cluster_from_toml(tmp_path / "c.toml")
    (tmp_path / "plan.json").unlink()
    (tmp_path / "model.json").write_text('{"version": "2", "model": {}}')
    with pytest.raises(InputError, match=r"model = .*model\.json': has version '2'; this"):
        plan.model_of(tmp_path)


def test_old_keys_are_unknown_in_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("version = 2\n" + (DATA / "cluster_v1.toml").read_text())
    with pytest.raises(InputError, match=r"cluster\.kernels.*whole"):
        cluster_from_toml(tmp_path / "c.toml")
