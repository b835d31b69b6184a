"""The command-line arguments that each engine publishes; every launch line is checked against them.

data/arguments.json holds, by program and version, the options without a value, those with one, and the values that
some may take. vLLM's and SGLang's lists are what their own parsers hold when built; TensorRT-LLM's and Dynamo's are
read from their sources.
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
    """Options with one."""
    choices: dict[str, list[str]]
    """The values that some of them may take."""


@cache
def published(program: str) -> Published:
    """Return the options of `vllm`, `sglang`, `trtllm` or `dynamo.ENGINE`."""
    row = json.loads(files(__package__).joinpath("data/arguments.json").read_text())[program]
    flags, values = frozenset(row["flags"].split()), frozenset(row["values"].split())
    return Published(row["version"], row["source"], flags, values, row["choices"])


def refused(programs: Sequence[str], options: Sequence[str]) -> str:
    """Return what is wrong with a command line's options, each checked against the first program that has it; empty
    if nothing is."""
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
