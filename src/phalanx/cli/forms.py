"""A command with several forms: subcommands with options of their own, of which one is meant where none is named.

    plan = forms("Find the fastest strategy ...", by_source, model=plan_model, job=plan_job)

`phalanx plan --model M ...` is `phalanx plan model --model M ...`: the rule reads the words that follow. Commands
are named in a table, and imported when they run: help and completion need no more than their names.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Entry:
    """A command or a group of commands."""

    name: str
    panel: str
    """Heading in the help under which it is listed."""
    target: str | Callable[..., Any] | typer.Typer
    """The function, or the app of a group; `module:name` where it is imported when it runs."""
    help: str
    """Line of the list; the command's own help is its docstring."""

    def command(self) -> Any:
        """Import it, and make it with its options."""
        target = self.target
        if isinstance(target, str):
            module, _, name = target.partition(":")
            target = getattr(import_module(module), name)
        if isinstance(target, typer.Typer):
            group: Any = typer.main.get_group(target)
            group.name = self.name
            return group
        alone = typer.Typer(add_completion=False)
        paragraphs = inspect.cleandoc(target.__doc__ or "").split("\n\n")
        alone.command(self.name, help="\n\n".join(" ".join(p.split()) for p in paragraphs))(target)
        return typer.main.get_command(alone)

    def listed(self) -> TyperCommand:
        """Return what a list of commands says of it."""
        return TyperCommand(self.name, help=self.help, rich_help_panel=self.panel)


class Loaded(MutableMapping[str, Any]):
    """Commands by name, each made when it is first looked up."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self._made: dict[str, Any] = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Any:
        target = self._made[name]
        if isinstance(target, Entry):
            self._made[name] = target = target.command()
        return target

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class LazyGroup(TyperGroup):
    """A group whose commands stand in `entries`, in the order of the help."""

    entries: ClassVar[tuple[Entry, ...]] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = Loaded(self.entries)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what help and completion list of a command."""
        return next((entry.listed() for entry in self.entries if entry.name == cmd_name), None)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their panels."""
        width = max(len(entry.name) for entry in self.entries)
        for panel in dict.fromkeys(entry.panel for entry in self.entries):
            with formatter.section(panel):
                formatter.write_dl([(e.name.ljust(width), e.help) for e in self.entries if e.panel == panel])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command that the first of the words names, made to be run, and the other words."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.commands[str(command.name)], rest


Rule = Callable[[Sequence[str]], str]
"""Which form is meant by words that name none."""


def forms(summary: str, rule: Rule | None = None, default: str = "", **table: Any) -> typer.Typer:
    """Return a command whose forms are functions or further such commands; `default`: the one that runs where no
    words follow, if any does.

    Without a rule it is a group of commands, of which one is always named.
    """
    targets = {name.rstrip("_").replace("_", "-"): target for name, target in table.items()}

    class Forms(LazyGroup):
        """A group whose subcommands are the forms."""

        entries: ClassVar[tuple[Entry, ...]] = tuple(
            Entry(name, "Forms" if rule else "Commands", target, _about(target)) for name, target in targets.items()
        )

        rule: ClassVar[Rule | None]

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Name the form before the words that follow."""
            named = args and (args[0] in targets or args[0] == "--help" or _is_misspelt(args[0], targets))
            if rule and args and not named:
                args = [rule(args), *args]
            elif not args and default:
                args = [default]
            return list(super().parse_args(ctx, args))

    Forms.rule = rule and staticmethod(rule)
    app = typer.Typer(cls=Forms, help=summary, no_args_is_help=True, rich_markup_mode=None)
    app.callback()(lambda: None)
    return app


def _is_misspelt(word: str, names: Iterable[str]) -> bool:
    """Whether a word is nearly one of some names, no option and no file."""
    near = not word.startswith("-") and get_close_matches(word, names, n=1, cutoff=0.75)
    return bool(near) and not Path(word).exists()


def _about(target: Any) -> str:
    """Return the first paragraph of what a command says of itself."""
    text = str(target.info.help if isinstance(target, typer.Typer) else target.__doc__)
    return " ".join(text.split("\n\n")[0].split())


def has_option(words: Sequence[str], *options: str) -> bool:
    """Whether any of some options stands in the words."""
    return any(word.partition("=")[0] in options for word in words)
