"""The command line makes no command but the one that it runs."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import typer

from phalanx.cli.app import app
from phalanx.cli.root import only


def _commands(of: typer.Typer) -> set[str]:
    group: Any = typer.main.get_command(of)
    return set(group.commands)


def test_what_is_named_is_made_alone() -> None:
    for name in _commands(app):
        one = copy(app)
        only(one, [name, "--help"])
        assert _commands(one) == {name}


@pytest.mark.parametrize("words", [[], ["--help"], ["trian"], ["--version", "train"]])
def test_all_are_made_where_none_is_named(words: list[str]) -> None:
    """A mistake is told from what there is."""
    every = copy(app)
    only(every, words)
    assert _commands(every) == _commands(app)
