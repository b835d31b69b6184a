"""Nothing is ignored: what a form of a command would not read is refused by name.

Many commands have several forms, such as `comm` of a plan and `comm --params`. Each names what it reads; an option of
another form that stands on the command line is then an error, also where its value is the default.
"""

from __future__ import annotations

import typer

from phalanx.spec.errors import InputError

_OF_OUTPUT = frozenset({"save", "json", "as_json"})


def require_only(line: typer.Context, *read: str, reason: str, remedy: str = "leave it out") -> None:
    """Require that a command line gives no parameters but `read` (by their names in the command's function) and the
    output's. Raises InputError."""
    for parameter in line.command.params:
        name = str(parameter.name)
        source = line.get_parameter_source(name)
        if name in read or name in _OF_OUTPUT or source is None or source.name != "COMMANDLINE":
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
