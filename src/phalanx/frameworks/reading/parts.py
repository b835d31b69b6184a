"""The modules of a framework's folder, imported when they are used: so no file lists the frameworks.

read.py           `read(config, world)`: its configuration as a Configuration
read_python.py    `tables(file)`: a configuration in Python as tables, None for one of another framework
write.py          `program(subject)`: a plan as its program
lints.toml, .py   mistakes that its own loader accepts (frameworks/lints.py)
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration
from phalanx.frameworks.framework import Framework
from phalanx.frameworks.reading.python import PythonFile
from phalanx.frameworks.writing.program import TrainingProgram
from phalanx.frameworks.writing.subject import Subject


def reader(framework: Framework) -> Callable[[Config, int | None], Configuration]:
    """Return the function that reads a configuration: (tables, number of ranks where the file does not state it)."""

    def read(config: Config, world: int | None = None) -> Configuration:
        result: Configuration = _module(framework, "read").read(config, world)
        return result

    return read


def writer(framework: Framework) -> Callable[[Subject], TrainingProgram]:
    """Return the function that writes a plan as a program of the framework; it raises InputError for a plan that the
    framework cannot run."""

    def program(subject: Subject) -> TrainingProgram:
        result: TrainingProgram = _module(framework, "write").program(subject)
        return result

    return program


def python_tables(framework: Framework, file: PythonFile) -> dict[str, Any] | None:
    """Return the tables of a configuration in Python, which is followed and not run; None for one of another
    framework. Raises InputError."""
    result: dict[str, Any] | None = _module(framework, "read_python").tables(file)
    return result


def _module(framework: Framework, name: str) -> Any:
    return import_module(f"phalanx.frameworks.{framework.folder}.{name}")
