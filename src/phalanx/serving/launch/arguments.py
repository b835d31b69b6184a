"""The published command-line arguments of engines, against which every launch line is checked.

data/arguments.json has, for a version of each program, the options without a value, the options with a value, and the
allowed values of some. The lists of vLLM and SGLang are from their built parsers; the lists of TensorRT-LLM and
Dynamo are from their sources.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Published:
    """The options of one program."""

    version: str
    source: str
    flags: frozenset[str]
    """Options without a value."""
    values: frozenset[str]
    """Options with a value."""
    choices: dict[str, list[str]]
    """Option -> its allowed values, for some."""


@cache
def published(program: str) -> Published:
    """Return the options of `vllm`, `sglang`, `trtllm` or `dynamo.ENGINE`."""
    row = json.loads(files(__package__).joinpath("data/arguments.json").read_text())[program]
    flags, values = frozenset(row["flags"].split()), frozenset(row["values"].split())
    return Published(row["version"], row["source"], flags, values, row["choices"])


def option_error(programs: Sequence[str], options: Sequence[str]) -> str:
    """Return the error in a command line's options, each checked against the first of the programs that has it;
    empty: there is none."""
    known = [published(name) for name in programs]
    i = 0
    while i < len(options):
        name = options[i]
        owner = next((p for p in known if name in p.flags or name in p.values), None)
        if owner is None:
            return f"{name} is no option of {' or '.join(programs)}"
        if name in owner.flags:
            i += 1
            continue
        if i + 1 == len(options) or options[i + 1].startswith("--"):
            return f"{name} needs a value"
        if name in owner.choices and options[i + 1] not in owner.choices[name]:
            return f"{name} does not take {options[i + 1]}"
        i += 2
    return ""
