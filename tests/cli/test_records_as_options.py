"""A record's fields are options, with its types and defaults; a command line's own fields are told from defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from typer.testing import CliRunner

from phalanx.cli.command import Stated, command
from phalanx.cli.forms import forms

OPTIONS = """
--tokens: Tokens.
word --name WORD: A word.
--limit 3|inf: A number, or words.
"""
_SEEN: list[Any] = []


@dataclass(frozen=True)
class Wanted:
    """A question."""

    tokens: int
    word: str = "a"
    limit: int | str | None = None


@command
def whole(wanted: Annotated[Wanted, "tokens", "word"]) -> None:
    """Take some fields."""
    _SEEN.append(wanted)


@command
def stated(wanted: Annotated[Stated, Wanted]) -> None:
    """Take what stands there."""
    _SEEN.append(wanted)


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("", {}),
        ("--name a", {"word": "a"}),  # stated, though it is the default
        ("--tokens 8k --limit inf", {"tokens": 8192, "limit": "inf"}),
    ],
)
def test_stated_has_what_stands_on_the_command_line(words: str, seen: dict[str, Any]) -> None:
    assert CliRunner().invoke(forms("Group.", stated=stated, whole=whole), ["stated", *words.split()]).exit_code == 0
    assert _SEEN.pop() == seen


def test_a_record_has_its_defaults_where_a_command_line_says_nothing() -> None:
    assert CliRunner().invoke(forms("Group.", stated=stated, whole=whole), ["whole", "--tokens", "3"]).exit_code == 0
    assert _SEEN.pop() == Wanted(3, "a", None)
