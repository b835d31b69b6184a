"""Checks the pinned packages against known vulnerabilities: `make audit`, and first of all in `make check`.

Always against the list that is kept here (advisories.txt). With --online also against the Python Packaging Advisory
Database, by pip-audit (https://pypi.org/project/pip-audit).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

HERE = Path(__file__).parent


def pins(text: str) -> dict[str, Version]:
    """Return the versions that lines such as `name==version` or `name[extra]==version` pin, by normalised name."""
    rows = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)", text, flags=re.MULTILINE)
    return {normalised(name): Version(version) for name, version in rows}


def normalised(name: str) -> str:
    """Return a package's name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def vulnerable(pinned: dict[str, Version], advisories: str) -> list[str]:
    """Return a sentence for each advisory that a pinned version is too old for."""
    found = []
    for line in advisories.splitlines():
        if line and not line.startswith("#"):
            name, mended, advisory, source = line.split()
            version = pinned.get(normalised(name))
            if version is not None and version < Version(mended):
                found.append(f"{name} {version}: {advisory}, mended in {mended} ({source})")
    return found


def main() -> int:
    """Print what is vulnerable; return 1 if anything is."""
    pinned = pins((HERE.parent / "constraints.txt").read_text())
    found = vulnerable(pinned, (HERE / "advisories.txt").read_text())
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    if "--online" in sys.argv[1:]:
        program = shutil.which("pip-audit")
        if program is None:
            print("error: pip-audit is not installed; pip install pip-audit", file=sys.stderr)
            return 1
        lock = str(HERE.parent / "requirements.lock")
        return subprocess.run([program, "-r", lock, "--require-hashes", "--disable-pip"], check=False).returncode
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
