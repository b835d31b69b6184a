"""The group of all commands: what Typer finds wrong with a command line is one line too, with exit code 2."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from phalanx.cli.lazy import LazyGroup
from phalanx.cli.terminal import DONE, INTERRUPTED, WRONG_INPUT, announce

# Typer has its own copy of click or imports click's, by version; both have this class, which it does not export.
_UsageError: Any = typer.BadParameter.__mro__[1]


class OneLineErrors(LazyGroup):
    """Prints errors of usage as InputErrors are printed: `error: --ranks = x: is not an integer`."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run the command line in `args`, by default that of this process, and exit."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, *rest, **{**options, "standalone_mode": False})
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                announce(f"error: {_one_line(error, words)}")
            code = WRONG_INPUT
        except BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = DONE
        except (typer.Abort, KeyboardInterrupt):
            announce("interrupted")
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


def _one_line(error: Any, words: Sequence[str]) -> str:
    """Write an error of usage as `field = value: reason; remedy`."""
    from phalanx.spec.errors import InputError, nearest

    context, param, name = error.ctx, getattr(error, "param", None), type(error).__name__
    remedy = f"see {context.command_path} --help" if context else ""
    reason = str(error.message).removeprefix("Input ").rstrip(".")
    reason = reason[:1].lower() + reason[1:]
    if name == "NoSuchOption":
        if others := _others_with(error.option_name, context):
            reason = f"no such option of {context.command_path}"
            return str(InputError(error.option_name, None, reason, f"it is of {' and '.join(others)}"))
        options = {"--help", *(option for p in context.command.params for option in p.opts)} if context else ()
        return str(InputError(error.option_name, None, "no such option", nearest(error.option_name, options)))
    if name == "BadOptionUsage":
        return str(InputError(error.option_name, None, reason.partition("' ")[2] or reason, remedy))
    if command := re.match(r"no such command '([^']*)'", reason):
        known = context.command.list_commands(context) if context else ()
        return str(InputError("command", command[1], "no such command", nearest(command[1], known)))
    if param is not None:
        field = param.opts[-1] if param.param_type_name == "option" else param.metavar or param.name
        reason = "is missing" if name == "MissingParameter" else reason
        return str(InputError(field, _given(param.opts, words), reason, remedy))
    return str(InputError("command line", None, reason, remedy))


def _others_with(option: str, context: Any) -> list[str]:
    """Return the other forms of a command, or commands of its group, that have an option."""
    group = context.parent if context else None
    if group is None or group.parent is None:
        return []
    commands = group.command.commands.items()
    return [f"{group.command_path} {name}" for name, c in commands if any(option in p.opts for p in c.params)]


def _given(options: Sequence[str], words: Sequence[str]) -> str | None:
    """The value that an option was given last; None if it was not, or is an argument."""
    given = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in options:
            given = value if equals else after
    return given
