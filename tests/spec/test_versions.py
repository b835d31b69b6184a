"""Files of another version are refused in one line; a cluster file need not name one."""

from pathlib import Path

import pytest

from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.cluster_toml import cluster_from_toml, to_toml


def test_a_cluster_file_may_leave_out_its_version(tmp_path: Path) -> None:
    cluster = preset("dgx-h100", 2)
    (tmp_path / "c.toml").write_text(to_toml(cluster))
    written = (tmp_path / "c.toml").read_text()
    assert "\nversion = 2\n" in "\n" + written
    (tmp_path / "c.toml").write_text(written.replace("version = 2\n", "", 1))
    assert cluster_from_toml(tmp_path / "c.toml") == cluster


def test_other_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 99}')
    with pytest.raises(InputError, match=r"plan\.json': has version 99; this Phalanx reads version 2"):
        plan.read(tmp_path / "plan.json")
    (tmp_path / "c.toml").write_text("version = 1\n")
    with pytest.raises(InputError, match=r"cluster\.file = .*c\.toml': has version 1; this"):
        cluster_from_toml(tmp_path / "c.toml")
    (tmp_path / "plan.json").unlink()
    (tmp_path / "model.json").write_text('{"version": "2", "model": {}}')
    with pytest.raises(InputError, match=r"model = .*model\.json': has version '2'; this"):
        plan.model_of(tmp_path)
