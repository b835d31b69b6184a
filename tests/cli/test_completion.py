"""Shell completion: what a shell is handed for a command, and for values that name what ships."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def _completed(line: str, word: int) -> list[str]:
    """Return what bash is handed for the word of that number of a line."""
    asked = {"_PHALANX_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(word)}
    program = "import sys; sys.argv = ['phalanx']; from phalanx.cli.app import app; app(prog_name='phalanx')"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("phalanx plan --model llama3-7", ["llama3-70b"]),
        ("phalanx predict --cluster dgx-h1", ["dgx-h100"]),
        ("phalanx predict --stack megatron-core-d", ["megatron-core-dropout"]),
        ("phalanx mea", ["measure"]),
    ],
)
def test_names_that_ship_are_completed(line: str, expected: list[str]) -> None:
    assert _completed(line, line.count(" ")) == expected


def test_a_value_that_no_name_begins_with_is_left_to_the_files_of_the_shell() -> None:
    assert _completed("phalanx plan --model ./conf", 3) == []
