"""The scripts of examples/gpu: they parse, set what the page explains, and refuse what they do not know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/gpu"
FABRICS = ("node", "infiniband", "roce", "efa", "ethernet")


@pytest.mark.parametrize("name", ["nccl.sh", "train.slurm", "torchrun.sh"])
def test_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_every_variable_is_explained_and_every_explained_one_is_set() -> None:
    script, page = (FOLDER / "nccl.sh").read_text(), (ROOT / "docs/gpu.md").read_text()
    explained = set(re.findall(r"`((?:NCCL|GLOO|FI)_\w+)", page))
    assert set(re.findall(r"export (\w+)=", script)) == explained
    assert all(f"`{name}`" in page for name in ("Dockerfile", "phalanx.def", "train.slurm", "torchrun.sh", "nccl.sh"))


def test_a_fabric_sets_its_variables_and_an_unknown_one_is_refused() -> None:
    def source(fabric: str) -> tuple[int, str, str]:
        command = f'. "{FOLDER}/nccl.sh" && env'
        ran = subprocess.run(
            ["bash", "-c", command], env={"FABRIC": fabric, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
        )
        return ran.returncode, ran.stdout, ran.stderr

    found = {fabric: source(fabric)[1] for fabric in FABRICS}
    assert "NCCL_IB_HCA=mlx5" in found["infiniband"]
    assert "NCCL_IB_GID_INDEX=3" in found["roce"]
    assert "NCCL_IB_GID_INDEX" not in found["infiniband"]
    assert "FI_PROVIDER=efa" in found["efa"]
    assert "NCCL_IB_DISABLE=1" in found["ethernet"]
    assert "NCCL_SOCKET_IFNAME" not in found["node"]
    assert "GLOO_SOCKET_IFNAME=ib0" in found["infiniband"]
    assert "GLOO_SOCKET_IFNAME" not in found["efa"]  # Gloo has no list of what to leave out
    code, _, err = source("token-ring")
    assert code == 2
    assert "FABRIC=token-ring is none of: node, infiniband, roce, efa, ethernet" in err


def test_images_install_what_the_project_names() -> None:
    torch = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TORCH"))
    version = torch.split("==")[1].strip()
    for name in ("Dockerfile", "phalanx.def"):
        text = (FOLDER / name).read_text()
        assert f"torch=={version} --index-url" in text
        assert "[train]" in text
        files = ["pyproject.toml", "README.md", "LICENSE", "constraints.txt", "src"]
        assert all((ROOT / file).exists() and f"{file} " in text for file in files)
