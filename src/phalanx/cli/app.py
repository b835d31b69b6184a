"""The command line: every command parses its options, calls `phalanx.answers` and renders the result.

Nothing heavy is imported before a command runs, so that `--help` is quick.

Exit codes: 0 done; 1 a check or a rank failed; 2 the input was wrong (what Typer finds wrong is one line too); 130
interrupted, state saved.
"""

import dataclasses
import gc
import os
import re
import sys
import tomllib
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.forms import Entry, LazyGroup
from phalanx.cli.terminal import DONE, FAILED, INTERRUPTED, WRONG_INPUT, announce, os_error_words, prepare_streams

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
        except SystemExit as ended:
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            # Whoever read the output has seen enough, which typer takes for a failure.
            code = DONE
        except OSError as error:  # the disk behind stdout is full
            announce(f"error: {os_error_words(error)}")
            code = FAILED
        except (typer.Abort, KeyboardInterrupt):
            announce("interrupted")
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


_PRICE = "here write --rates price=2.5"
"""Remedy for `--price` in commands that have no such option."""


def _one_line(error: Any, words: Sequence[str]) -> str:
    """Write an error of usage as `field = value: reason; remedy`."""
    from phalanx.spec.errors import InputError, nearest

    context, param, name = error.ctx, getattr(error, "param", None), type(error).__name__
    remedy = f"see {context.command_path} --help" if context else ""
    reason = str(error.message).removeprefix("Input ").rstrip(".")
    reason = reason[:1].lower() + reason[1:]
    if name == "NoSuchOption":
        has_rates = bool(context) and any("--rates" in p.opts for p in context.command.params)
        others = _others_with(error.option_name, context)
        homes = [f"it is of {' and '.join(others)}"] if others else []
        homes += [_PRICE] if error.option_name == "--price" and has_rates else []
        if homes:
            reason = f"no such option of {context.command_path}"
            return str(InputError(error.option_name, None, reason, "; ".join(homes)))
        options = {"--help", *(option for p in context.command.params for option in p.opts)} if context else ()
        remedy = _inside(error.option_name, _last_value([error.option_name], words), options)
        remedy = remedy or nearest(error.option_name, options)
        return str(InputError(error.option_name, None, "no such option", remedy))
    if name == "BadOptionUsage":
        return str(InputError(error.option_name, None, reason.partition("' ")[2] or reason, remedy))
    if command := re.match(r"no such command '([^']*)'", reason):
        known = context.command.list_commands(context) if context else ()
        if moved := _new_place(command[1], context):
            return str(InputError("command", command[1], "no such command", f"it is `{moved}`"))
        return str(InputError("command", command[1], "no such command", nearest(command[1], known)))
    if param is not None:
        field = param.opts[-1] if param.param_type_name == "option" else param.metavar or param.name
        if name == "MissingParameter":
            loose = _loose(context, words) if param.param_type_name == "option" else ""
            reason, remedy = "is missing", f"write {field} {loose}" if loose else remedy
        elif reason.startswith("should be a valid number") and (about := getattr(param, "help", None)):
            reason = "should be a number alone"
            remedy = f"--help says: {about.rstrip('.')}"  # which has its unit
        return str(InputError(field, _last_value(param.opts, words), reason, remedy))
    extra = re.match(r"got unexpected extra argument\S* \((.*)\)", reason)
    if extra and not any(p.param_type_name == "argument" for p in context.command.params):
        reason = f"'{extra[1]}' is the value of no option, and this takes options alone"
    return str(InputError("command line", None, reason, remedy))


def _loose(context: Any, words: Sequence[str]) -> str:
    """Return the word after the name of a command that takes only options; "" where there is none."""
    if any(p.param_type_name == "argument" for p in context.command.params) or context.info_name not in words:
        return ""
    after = words[words.index(context.info_name) + 1 :]
    return after[0] if after and not after[0].startswith("-") else ""


def _inside(option: str, value: str | None, options: Collection[str]) -> str:
    """Return the remedy for an option that is a field of a strategy, an option of stacks or a precision, such as
    `write --strategy tp=8` for `--tp 8`; "" for other words."""
    from phalanx.spec.number_formats import PRECISIONS
    from phalanx.spec.strategy.spec import Strategy
    from phalanx.spec.strategy.stack_options import OPTION_FIELDS

    word = option.removeprefix("--").replace("-", "_")
    if word in PRECISIONS and "--precision" in options:
        return f"write --precision {word}"
    axes = {f.name for f in dataclasses.fields(Strategy)}
    homes = {"--where": axes, "--strategy": axes, "--options": OPTION_FIELDS}
    home = next((home for home, names in homes.items() if home in options and word in names), "")
    stated = value if value and not value.startswith("-") else "..."
    return f"write {home} {word}={stated}" if home else ""


_SYNONYMS = {
    "doctor": "check machine",
    "calibrate": "measure steps",
    "presets": "tables models` or `phalanx tables clusters",
    "weights": "runs import` or `phalanx runs export",
}
"""Words that a user may try -> the command that does it."""


def _new_place(word: str, context: Any) -> str:
    """Return the whole command for a synonym, or the commands of a word in groups, such as `place` or
    `serve-plan`; "" for other words."""
    if context is None or context.parent is not None:
        return ""
    if word in _SYNONYMS:
        return f"{context.command_path} {_SYNONYMS[word]}"
    group, _, own = word.partition("-")
    places = []
    for name in context.command.list_commands(context):
        commands = getattr(context.command.commands[name], "commands", {})
        if word in commands or (name == group and own in commands):
            places.append(f"{context.command_path} {name} {word if word in commands else own}")
    return "` or `".join(places)


def _others_with(option: str, context: Any) -> list[str]:
    """Return the other forms of a command, or commands of its group, that have an option."""
    group = context.parent if context else None
    if group is None or group.parent is None:
        return []
    commands = group.command.commands.items()
    return [f"{group.command_path} {name}" for name, c in commands if any(option in p.opts for p in c.params)]


def _last_value(options: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the last value given to an option; None if there is none, as for an argument."""
    given = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in options:
            given = value if equals else after
    return given


_ROWS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())
COMMANDS = tuple(Entry(name, **row) for name, row in _ROWS.items())
"""The commands by panel."""


class _Root(OneLineErrors):
    entries = COMMANDS


app = typer.Typer(
    cls=_Root,
    help="Plan, prove, run and measure the parallel training of large models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # this list is plain: rich takes as long to import as all else here
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(f"phalanx {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. Interrupted, the process ends without the seconds that the teardown of torch may take."""
    # Imported modules live to the end; rescanning them at every collection costs a quick command a fifth of its time.
    gc.set_threshold(50_000)
    prepare_streams()
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # the reader is gone
                    stream.flush()
            os._exit(INTERRUPTED)
        raise
