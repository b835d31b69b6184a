"""A command with several forms: subcommands with options of their own, of which one is meant where none is named.

    plan = forms("Find the fastest strategy ...", {"model": Form(...), "job": Form(...)}, by_source)

`phalanx plan --model M ...` is `phalanx plan model --model M ...`: the rule reads the words that follow. A form's
module is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer

from phalanx.cli.lazy import Entry, LazyGroup


@dataclass(frozen=True)
class Form:
    """One form of a command."""

    function: str
    """Where it is: "module:function"."""
    help: str
    """One line."""


Rule = Callable[[Sequence[str]], str]
"""Which form is meant by words that name none."""


def forms(summary: str, table: Mapping[str, Form], rule: Rule | None = None, default: str = "") -> typer.Typer:
    """Return a command with forms; `default`: the one that runs where no words follow, if any does.

    Without a rule it is a group of commands, of which one is always named.
    """

    class Forms(LazyGroup):
        """A group whose subcommands are the forms."""

        entries: ClassVar[tuple[Entry, ...]] = tuple(
            Entry(name, "Forms" if rule else "Commands", form.function, form.help) for name, form in table.items()
        )

        rule: ClassVar[Rule | None]

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Name the form before the words that follow."""
            if rule and args and args[0] not in table and args[0] != "--help":
                args = [rule(args), *args]
            elif not args and default:
                args = [default]
            return list(super().parse_args(ctx, args))

    Forms.rule = rule and staticmethod(rule)
    app = typer.Typer(cls=Forms, help=summary, no_args_is_help=True, rich_markup_mode=None)
    app.callback()(lambda: None)
    return app


def given(words: Sequence[str], *options: str) -> bool:
    """Whether any of some options stands in the words."""
    return any(word.partition("=")[0] in options for word in words)
