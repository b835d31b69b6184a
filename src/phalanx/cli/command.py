"""A command from a function: options are derived from the question and the output that it takes.

    @command
    def comm(query: Annotated[Query, OF_A_STRATEGY], output: Annotated[Display, "json", "save"]) -> None:

A parameter of type Query or Display becomes the options of its fields (options.py), all of them or those that the
annotation names. The function runs with errors turned into one line, and with files to be written checked first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from phalanx.answers.query import Query
from phalanx.cli.options import OUTPUT_OPTIONS, QUERY_OPTIONS
from phalanx.cli.output import Display
from phalanx.cli.terminal import exit_on_error

_DERIVED: dict[type, dict[str, Any]] = {Query: QUERY_OPTIONS, Display: OUTPUT_OPTIONS}
_DEFAULTS: dict[str, Any] = {"json": False, "strict": False}

Command = Callable[..., Any]


def command(function: Command) -> Command:
    """Return a function that Typer makes a command of."""
    return _derive(function, reports_progress=False)


def command_with_progress(function: Command) -> Command:
    """As `command`, for a function that announces by itself what it does."""
    return _derive(function, reports_progress=True)


def _derive(body: Command, reports_progress: bool) -> Command:
    parameters: list[inspect.Parameter] = []
    derived: dict[str, tuple[type, tuple[str, ...]]] = {}
    for parameter in inspect.signature(body, eval_str=True).parameters.values():
        kind, names = _derived(parameter.annotation)
        if kind is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        derived[parameter.name] = kind, names
        for name in names:
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=_DEFAULTS.get(name),
                    annotation=_DERIVED[kind][name],
                )
            )

    def run(**given: Any) -> Any:
        with exit_on_error(reports_progress):
            for name, (kind, names) in derived.items():
                fields = {field: given.pop(field) for field in names}
                if "source" in fields:  # the first of several files, which belong to it
                    fields["source"], *more = fields["source"] or [None]
                    fields["files"] = tuple(more)
                if "changes" in fields:
                    fields["changes"] = tuple(fields["changes"] or ())
                given[name] = kind(**fields)
                if isinstance(given[name], Display):
                    given[name].require_writable()
            return body(**given)

    run.__name__, run.__qualname__, run.__doc__, run.__module__ = (
        body.__name__,
        body.__qualname__,
        inspect.getdoc(body),
        body.__module__,
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _derived(annotation: Any) -> tuple[type | None, tuple[str, ...]]:
    """Return the question or output that a parameter is, and the fields that become options."""
    of, *names = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if of not in _DERIVED:
        return None, ()
    flat = [n for name in names for n in ((name,) if isinstance(name, str) else name)]
    return of, tuple(flat or _DERIVED[of])
