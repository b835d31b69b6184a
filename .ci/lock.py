"""Writes requirements.lock, every pinned package with the hashes of its files, and sbom.cdx.json: `make lock`.

uv resolves pyproject.toml under constraints.txt for all platforms (https://docs.astral.sh/uv/pip/compile/). torch and
what only its builds for GPUs need stay out: every platform has a build and an index of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK, BILL = ROOT / "requirements.lock", ROOT / "sbom.cdx.json"
COMPILE = (
    "uv pip compile pyproject.toml --all-extras --group dev --group build -c constraints.txt --universal "
    "--python-version 3.11 --generate-hashes --no-header --no-annotate "
    "--no-strip-extras"  # pip before 23.3 pins `coverage[toml]` only where the lock says the extra
)
_PIN = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?==([^\s;]+)")
_OUTSIDE = re.compile(r"(torch|triton|nvidia-|cuda-)")
_HEAD = """# Every pinned package but torch, with the hashes of all files that PyPI has of it: written by `make lock`.
# make install LOCKED=1 installs from here, and refuses any other file.
"""


def blocks(compiled: str) -> list[str]:
    """Return the lock's entries, a requirement with its hashes each, without torch's."""
    entries = re.split(r"\n(?=[A-Za-z])", compiled.strip())
    return [entry for entry in entries if not _OUTSIDE.match(entry)]


def bill(entries: list[str]) -> dict[str, object]:
    """Return a CycloneDX 1.6 bill of materials of the lock's entries and torch."""
    pins = [(found[1], found[2]) for entry in entries if (found := _PIN.match(entry))]
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("torch=="):
            pins.append(("torch", line.partition("==")[2]))
    components = [_component(name, version) for name, version in sorted(pins)]
    about = {"type": "application", "name": "phalanx", "licenses": [{"expression": "Apache-2.0"}]}
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": about}} | {
        "components": components
    }


def _component(name: str, version: str) -> dict[str, object]:
    row: dict[str, object] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
    }
    try:
        expression = importlib.metadata.metadata(name).get("License-Expression")
    except importlib.metadata.PackageNotFoundError:  # for another platform
        expression = None
    return row | ({"licenses": [{"expression": expression}]} if expression else {})


def main() -> None:
    """Write both files."""
    compiled = subprocess.run(COMPILE.split(), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    entries = blocks(compiled)
    LOCK.write_text(_HEAD + "\n".join(entries) + "\n")
    BILL.write_text(json.dumps(bill(entries), indent=1) + "\n")
    print(f"{len(entries)} packages in {LOCK.name} and {BILL.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
