"""What is installed is what was pinned, and the ways in that are closed stay closed."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AUDIT = runpy.run_path(str(ROOT / ".ci" / "audit.py"))
UNLOCKED = {"torch", "pip"}  # torch: every platform has its own build; pip installs the others


def test_every_pin_is_locked_with_hashes() -> None:
    pinned = AUDIT["pins"]((ROOT / "constraints.txt").read_text())
    lock = (ROOT / "requirements.lock").read_text()
    locked = AUDIT["pins"](lock)
    assert {name: locked.get(name) for name in pinned.keys() - UNLOCKED} == {
        name: version for name, version in pinned.items() if name not in UNLOCKED
    }
    entries = re.split(r"\n(?=[A-Za-z])", lock.partition("\n\n")[0])
    assert all("--hash=sha256:" in entry for entry in entries if not entry.startswith("#"))


def test_the_bill_of_materials_lists_what_is_locked() -> None:
    bill = json.loads((ROOT / "sbom.cdx.json").read_text())
    listed = {AUDIT["normalised"](c["name"]): c["version"] for c in bill["components"]}
    locked = AUDIT["pins"]((ROOT / "requirements.lock").read_text())
    assert listed.keys() - {"torch"} == locked.keys()
    assert {name: str(version) for name, version in locked.items()} == {n: listed[n] for n in locked}


def test_an_old_pin_is_vulnerable() -> None:
    advisories = (ROOT / ".ci" / "advisories.txt").read_text()
    pinned = AUDIT["pins"]((ROOT / "constraints.txt").read_text())
    assert AUDIT["vulnerable"](pinned, advisories) == []
    old = AUDIT["pins"]("torch==2.9.1\nJinja2==3.1.5\n")
    assert AUDIT["vulnerable"](old, advisories) == [
        "torch 2.9.1: CVE-2026-24747, mended in 2.10.0 (GHSA-63cw-57p8-fm3p)",
        "torch 2.9.1: CVE-2025-3001, mended in 2.10.0 (bnnr-team/bnnr#293)",
        "jinja2 3.1.5: CVE-2025-27516, mended in 3.1.6 (GHSA-cpwx-vrp4-4pq7)",
    ]


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import pickle", "TID251"),
        ("import torch\n\ntorch.load('a')", "TID251"),
        ("import torch\n\ntorch.load('a', weights_only=True)", "TID251"),
        ("import yaml\n\nyaml.load('a')", "S506"),
        ("import subprocess\n\nsubprocess.run('a', shell=True)", "S602"),
        ("import socket\n\nsocket.socket().bind(('0.0.0.0', 80))", "S104"),
        ("eval(input())", "S307"),
        ("from torch.distributed import all_gather_object", "TID251"),
    ],
)
def test_a_way_in_is_refused(code: str, rule: str) -> None:
    command = ["check", "--no-cache", "--output-format", "concise", "--stdin-filename", "src/phalanx/new.py", "-"]
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command], input=code, cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert result.returncode == 1
    assert f" {rule} " in result.stdout
