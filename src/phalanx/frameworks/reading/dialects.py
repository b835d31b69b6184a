"""Programs that take another framework's flags under other names, or with other defaults: rows of dialects.toml."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.spec.rows import Rows, record

_MIXED = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}
"""Type of the loaded weights -> flag of mixed precision."""
METHOD = "rl"
"""A flag that the name of a program sets, whatever its other flags are: the method of learning from preferences."""


@dataclass(frozen=True)
class Dialect:
    """A program's flags: a row of dialects.toml, which describes the fields."""

    title: str
    programs: tuple[str, ...]
    reads: str
    source: str
    words: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    weights: tuple[str, ...] = ()
    """Flags that name converted weights: their folder is the model's name with -mcore (ms-swift's export)."""
    launcher: str = ""
    loaded: str = ""

    def to_framework(self, args: Mapping[str, Any], whole: bool = True) -> dict[str, Any]:
        """Return flags under the names of the framework that reads them, with the program's defaults. `whole`: False
        where flags may be missing from `args`, so that defaults are not known. A LoRA rank of 0 is left out."""
        plain = {name.replace("-", "_"): value for name, value in args.items()}
        named = {self.renamed.get(name, name): value for name, value in plain.items() if name != self.model}
        named = {name: value for name, value in named.items() if (name, value) != ("lora_rank", 0)}
        if (type_ := _MIXED.get(str(named.get(self.loaded)))) and not {"bf16", "fp16"} & named.keys():
            named[type_] = True
            if named[self.loaded] != "float32":  # weights of the type that computes, as they are without the flag
                del named[self.loaded]
        own = self.own(named)
        return {**(own if whole else {n: own[n] for n in own if n == METHOD}), **named}

    def own(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the program's defaults for flags that are not set; bf16 among them only where fp16 is off."""
        return {
            name: value
            for name, value in self.defaults.items()
            if name not in args and not (name == "bf16" and args.get("fp16"))
        }

    def model_of(self, args: Mapping[str, Any]) -> str:
        """Return the name of the model that flags state; "": none."""
        plain = {name.replace("-", "_"): value for name, value in args.items()}
        named = plain.get(self.model) if self.model else None
        converted = (str(plain[flag]) for flag in self.weights if plain.get(flag))
        return str(named or next(converted, "").rstrip("/").removesuffix("-mcore"))


@cache
def _dialects() -> tuple[Dialect, ...]:
    return tuple(Rows(Path(__file__).with_name("dialects.toml"), record(Dialect, "title")).values())


def dialect_of(program: str, positional: Sequence[str], flags: Collection[str] = ()) -> Dialect | None:
    """Return the dialect of a program by its name and the words before its flags, or by its flags where the name is
    unknown; None for other programs."""
    name, given = re.sub(r"\.py$", "", program), {flag.replace("-", "_") for flag in flags}
    for row in _dialects():
        worded = not row.words or (positional and positional[0] in row.words)
        if any(re.search(rf"(^|[./]){p}$", name) for p in row.programs) and worded:
            if not row.needs or given.intersection(row.needs):
                return row
        elif not name and row.flags and given.issuperset(row.flags):
            return row
    return None
