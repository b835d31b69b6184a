"""A command from a function: its options are derived from parameters, docstring, and records such as Query.

    @command
    def comm(query: Annotated[Query, STRATEGY_FIELDS], output: Annotated[Display, "json", "save"], rate: float = 25):
        '''Tabulate what each mesh axis of a strategy sends.

        --rate GB/S: Bandwidth of a rank in one direction.
        '''

A parameter of type Query, Display or another frozen dataclass becomes options, one for each field or for the fields
that the annotation names. One of type `Annotated[Stated, Record]` does too, and gets only the fields on the command
line. Every other parameter is described by an entry of the docstring's last paragraph, of the module's OPTIONS, or of
the shared entries (options.py): `--flag METAVAR: help` for an option, `name METAVAR: help` for an argument, `name
--flag METAVAR: help` where the flag is not the parameter's name. Errors of the function become one line, and files to
write are checked before it runs.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from phalanx.answers.question.query import Query
from phalanx.cli.options import COMPLETED, OUTPUT_TYPES, QUERY_TYPES, SHARED
from phalanx.cli.output import Display
from phalanx.cli.terminal import context, exit_on_error, is_stated
from phalanx.spec.byte_sizes import parse_count
from phalanx.spec.errors import InputError
from phalanx.spec.ranges import require_64_bits

_DERIVED: dict[type, dict[str, Any]] = {Query: QUERY_TYPES, Display: OUTPUT_TYPES}
_ENTRY = re.compile(r"(?:(?P<name>\w+) ?)?(?P<flags>--[\w/-]+)?(?: ?(?P<metavar>.+?))??: (?P<help>.*)", re.DOTALL)


class Stated(dict[str, Any]):
    """The fields of a record that a command line states, by name; others are missing, without their defaults."""


Command = Callable[..., Any]
Info = Any
"""Typer's description of an option or argument."""


def command(function: Command) -> Command:
    """Return a function that Typer can make a command of."""
    return _derive(function, reports_progress=False)


def command_with_progress(function: Command) -> Command:
    """As `command`, for a function that prints its own progress."""
    return _derive(function, reports_progress=True)


def _derive(body: Command, reports_progress: bool) -> Command:
    signature = inspect.signature(body, eval_str=True).parameters
    about, _, last = (inspect.getdoc(body) or "").rpartition("\n\n")
    records = {name: _record_options(parameter.annotation) for name, parameter in signature.items()}
    own = _entries(last, [*signature, *(option for _, options in records.values() for option in options)])
    about = about if own else f"{about}\n\n{last}".strip()
    entries = {**_entries(SHARED), **_entries(body.__globals__.get("OPTIONS", "")), **own}
    parameters: list[inspect.Parameter] = []
    derived: dict[str, tuple[type, dict[str, Any]]] = {}

    def add(name: str, annotation: Any, default: Any) -> None:
        if get_origin(annotation) is not Annotated:
            described = entries[name](name)
            if annotation in (int, int | None):
                described.parser = _count
            if annotation is bool:
                described.metavar = ""  # a flag takes no value
            annotation = Annotated[annotation, described]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))

    for parameter in signature.values():
        kind, options = records[parameter.name]
        if kind is None and parameter.annotation is typer.Context:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        elif kind is None:
            add(parameter.name, parameter.annotation, parameter.default)
        else:
            derived[parameter.name] = kind, options
            for name, (annotation, default) in options.items():
                add(name, annotation, default)

    def run(**given: Any) -> Any:
        with exit_on_error(reports_progress):
            for name, value in given.items():
                require_64_bits(name, value)
            for name, (kind, options) in derived.items():
                values = {field: given.pop(field) for field in options}
                if kind is Stated:
                    values = {field: value for field, value in values.items() if is_stated(context(), field)}
                if kind is Query and "source" in values:  # the first of several files, which belong to it
                    values["source"], *more = values["source"] or [None]
                    values["files"] = tuple(more)
                if "changes" in values:
                    values["changes"] = tuple(values["changes"] or ())
                given[name] = kind(**values)
                if isinstance(given[name], Display):
                    given[name].require_writable()
            return body(**given)

    run.__name__, run.__qualname__, run.__module__ = body.__name__, body.__qualname__, body.__module__
    run.__doc__ = about
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _count(text: str | int) -> int:
    number = text if isinstance(text, int) else parse_count(text)
    if number is None:
        raise typer.BadParameter("should be a valid integer, such as 8192 or 8k")
    return number


def _entries(paragraph: str, names: Sequence[str] = ()) -> dict[str, Callable[[str], Info]]:
    """Return parameter -> function that makes Typer's description of it, from a paragraph of entries; {} for any
    other paragraph. `names`: the only names that entries may have, if given."""
    entries: dict[str, Callable[[str], Info]] = {}
    for text in re.split(r"\n(?!\s)", paragraph.strip()):
        entry = _ENTRY.fullmatch(" ".join(text.split()))
        name = entry and (entry["name"] or entry["flags"].strip("-").replace("-", "_"))
        if entry is None or (names and name not in names):
            return {}

        def info(name: str, entry: re.Match[str] = entry) -> Info:
            flags, metavar, about = entry["flags"], entry["metavar"], entry["help"]
            if flags is None:
                return typer.Argument(metavar=metavar, help=about, show_default=False)
            return typer.Option(flags, metavar=metavar, help=about, autocompletion=COMPLETED.get(name))

        entries[str(name)] = info
    return entries


def _record_options(annotation: Any) -> tuple[type | None, dict[str, tuple[Any, Any]]]:
    """Return (the record that a parameter's type is, option -> (type, default)); (None, {}) for other types."""
    of, *names = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    record = names.pop(0) if of is Stated else of
    if record in _DERIVED:
        options = {name: (kind, False if kind is bool else None) for name, kind in _DERIVED[record].items()}
    elif isinstance(record, type) and is_dataclass(record):
        hints = get_type_hints(record)
        options = {
            f.name: (_option(hints[f.name]), None if f.default is MISSING else f.default) for f in fields(record)
        }
    else:
        return None, {}
    flat = [n for name in names for n in ((name,) if isinstance(name, str) else name)]
    return of, {name: options[name] for name in flat or options}


def _option(hint: Any) -> Any:
    """Return the type of the option for a field: text where the field may be text."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return (str if str in kinds else kinds[0]) | None
    return hint


_OUTPUT_OPTIONS = frozenset({"save", "json"})


def require_only(line: typer.Context, *read: str, reason: str, remedy: str = "leave it out") -> None:
    """Require that a command line gives no parameters but `read` (by their names in the command's function) and the
    output's. Raises InputError."""
    for parameter in line.command.params:
        name = str(parameter.name)
        if name in read or name in _OUTPUT_OPTIONS or not is_stated(line, name):
            continue
        option = parameter.opts[0] if parameter.param_type_name == "option" else str(parameter.metavar or name)
        raise InputError(option, _shown(line.params[name]), reason, remedy)


def _shown(value: object) -> object:
    """Return a value as it is written on a command line; None for a flag."""
    if isinstance(value, bool):
        return None
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, int | float) else str(value)
