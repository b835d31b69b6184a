"""Mistakes in a configuration that its own loader accepts, each from a reported issue, and the lints that find them.

Most lints are rows of a folder's lints.toml, a condition each; what needs code is in its lints.py; lints.toml next to
this file is for every framework. Each has a case with the mistake and one without (tests/frameworks/test_read.py).

    [[uneven-experts]]           several rows may share a name
    issue                        where it was reported: owner/repository#number
    kinds, stacks                configurations that it is for; none: all
    tables                       tables that the file must have
    stated, open                 fields of the layout, or arguments, that the file must state; must not state
    when                         a condition on numbers (spec/strategy/where.py): fields of the layout, arguments,
                                 names of `numbers` and of _DERIVED; asked: GPUs that a batch job asks for;
                                 unranked: processes that find no rank in their environment
    numbers                      name -> dotted paths at which its number may be
    computes                     types of matrix products, one of which the file must have
    options                      options of the stack that the file must have: name -> value
    arguments, environment       name -> required value: a truth value, a number, or a pattern of a text
    key, problem, remedy         the message; {tp*pp} is a number, {axes} and {in_experts} are texts

An argument that is missing counts as false, and a degree that is not stated as 1. A key such as `strategy.zero` is
replaced by the file's own key for that field; where the file has none, nothing is reported.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout, shown
from phalanx.frameworks.framework import Framework
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.frameworks.values import count, product, truth
from phalanx.spec.rows import record
from phalanx.spec.strategy import where

Mistakes = Iterator[tuple[str, str, str]]
"""(key, problem, remedy) of each mistake."""
ROOT = Path(__file__).parent
_LAUNCH_FIELDS = ("asked", "unranked")
_DEGREES = ("tp", "pp", "cp", "ep", "virtual")
_LAYOUT = {f.name for f in fields(StatedLayout)}


@dataclass(frozen=True)
class Lint:
    """A check of a file's tables and of what was read from them. Several lints may share a name."""

    name: str
    issue: str
    """Where it was reported: owner/repository#number."""
    examine: Callable[[Config, Configuration], Mistakes]


@dataclass(frozen=True)
class Mistake:
    """A mistake in a configuration. `source`: the issue that reported it."""

    name: str
    key: str
    problem: str
    remedy: str
    source: str


def argument(config: Config, name: str) -> Any:
    """Return an argument of a program, from its command line or from the tables; None where it is missing. `name` may
    have - or _."""
    args = config.get("args")
    return Keys(args if isinstance(args, Mapping) else config).take(name, "")


def _axes(s: StatedLayout) -> str:
    """Return the axes of a replica as text, such as "tp 2 x pp 4"."""
    degrees = {name: getattr(s, name) for name in ("tp", "pp", "cp")}
    return " x ".join(f"{name} {n}" for name, n in degrees.items() if n and n > 1) or "1"


def _offloaded(name: str) -> Callable[[StatedLayout], int]:
    return lambda s: int((s.offload or {}).get(name) not in (None, "none"))


_DERIVED: dict[str, Callable[[StatedLayout], int | None]] = {
    "inner": lambda s: (s.tp or 1) * (s.pp or 1) * (s.cp or 1),  # ranks of a replica
    "chunks": lambda s: (s.pp or 1) * (s.virtual or 1),
    "etp": lambda s: s.etp or s.tp or 1,
    "expert_ranks": lambda s: (s.etp or s.tp or 1) * (s.ep or 1) * (s.pp or 1),
    "per_micro_batch": lambda s: product(s.micro_batch, s.dp),
    "per_replica": lambda s: product(s.micro_batch, s.accumulation),
    "sharers": lambda s: product(s.dp, s.cp or 1),  # ranks that ZeRO shards over
    "optimizer_away": _offloaded("optimizer"),
    "parameters_away": _offloaded("param"),
}
"""Numbers that follow from a layout."""
_TEXTS: dict[str, Callable[[StatedLayout], str]] = {
    "axes": _axes,
    "in_experts": lambda s: f"{'' if s.etp in (None, s.tp) else 'expert '}tensor parallelism",
}


@dataclass(frozen=True)
class LintRow:
    """A row of a lints.toml; the fields are described above."""

    name: str
    issue: str
    key: str
    problem: str
    remedy: str
    when: str = ""
    kinds: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    computes: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of numbers in the condition and in the texts."""
        texts = (self.when, *re.findall(r"{(.*?)}", f"{self.problem} {self.remedy}"))
        return tuple(set(re.findall(r"[a-z_]\w*", " ".join(texts))) - set(_TEXTS))

    @cached_property
    def conditions(self) -> tuple[where.Condition, ...]:
        """The parsed condition."""
        return where.parse(self.when, self.names, {}, f"lint {self.name}") if self.when else ()

    def number(self, name: str, c: Config, s: StatedLayout) -> int | None:
        """Return the number that a name has in a configuration; None where it is not stated."""
        if name in self.numbers:
            return Keys(c).count(tuple(self.numbers[name]), "")
        if name in _LAUNCH_FIELDS:
            return getattr(c.get("launched"), name, None)
        if name in _DERIVED:
            return _DERIVED[name](s)
        if name not in _LAYOUT:
            return count(argument(c, name))
        value = getattr(s, name)
        return 1 if value is None and name in _DEGREES and name not in self.stated else value

    def examine(self, c: Config, x: Configuration) -> Mistakes:
        """Yield the mistake where every condition of the row holds."""
        s, env = x.layout, c.get("env")
        variables = env if isinstance(env, Mapping) else {}
        if (
            (self.kinds and x.kind not in self.kinds)
            or (self.stacks and x.stack not in self.stacks)
            or not all(c.get(table) for table in self.tables)
            or any(self.number(name, c, s) is None for name in self.stated)
            or any(self.number(name, c, s) is not None for name in self.open)
            or not all(_matches(variables.get(name), value) for name, value in self.environment.items())
            or not all(_matches(argument(c, name), value) for name, value in self.arguments.items())
            or (self.computes and x.job.get("compute") not in self.computes)
            or any(x.options.get(name) != value for name, value in self.options.items())
        ):
            return
        values = {name: self.number(name, c, s) for name in self.names}
        known = all(values[name] is not None for condition in self.conditions for name in condition.fields)
        key = self._key(x)
        if key and known and where.holds(self.conditions, values):
            yield key, self._fill_in(self.problem, values, s), self._fill_in(self.remedy, values, s)

    def _key(self, x: Configuration) -> str:
        """Return the key of the message: the file's own key where the row names a field; "" where the file has
        none."""
        if not self.key.startswith("strategy."):
            return self.key
        return next((shown(key) for key, meaning in x.understood.items() if meaning == self.key), "")

    def _fill_in(self, text: str, values: Mapping[str, Any], s: StatedLayout) -> str:
        """Return a text with the values of its {names} and {products}."""

        def value(match: re.Match[str]) -> str:
            if match[1] in _TEXTS:
                return _TEXTS[match[1]](s)
            return str(where.amount(match[1], self.names, f"lint {self.name}")(values))

        return re.sub(r"{(.*?)}", value, text)


def _matches(value: Any, wanted: Any) -> bool:
    """Whether an argument or a variable has the value that a lint requires."""
    if wanted is False:
        return value in (None, "", False) or truth(value) is False
    if wanted is True:
        return truth(value) is True
    return count(value) == wanted if isinstance(wanted, int) else bool(value) and fnmatchcase(str(value), wanted)


def lints_of(framework: Framework) -> tuple[Lint, ...]:
    """Return the lints of a framework's folder; none where it has none."""
    path = ROOT / framework.folder / "lints.toml"
    lints = _rows(path)
    if path.with_suffix(".py").is_file():
        lints += import_module(f"{__package__}.{framework.folder}.lints").LINTS
    return lints


def _rows(path: Path) -> tuple[Lint, ...]:
    """Return the lints of a lints.toml; none where there is no such file."""
    make, tables = record(LintRow, "name"), tomllib.loads(path.read_text()) if path.is_file() else {}
    rows = (make(name, table) for name, several in tables.items() for table in several)
    return tuple(Lint(row.name, row.issue, row.examine) for row in rows)


def _unknown_flag(_: Config, x: Configuration) -> Mistakes:
    """Yield unknown flags that differ by a letter or two from one of Megatron-LM's; others may be flags of a fork."""
    for key, near in x.unknown.items():
        name, other = (text.rpartition(".")[2].lstrip("-").replace("_", "-") for text in (key, near))
        if x.kind == "megatron" and key.startswith("args.") and SequenceMatcher(None, name, other).ratio() > 0.9:
            yield name, "is not a flag of Megatron-LM, which stops at it", f"--{other}"


def _typo(c: Config, x: Configuration) -> Mistakes:
    """Yield misspelt keys, but of no other dialect with the same tables (GPT-NeoX, axolotl): it has keys of its
    own."""
    dialect = {"base_model", "deepspeed", "fsdp"} & set(c) or x.layout.pp is not None
    if x.kind not in ("deepspeed", "accelerate") or dialect:
        return
    for key, near in x.unknown.items():
        name = key.rpartition(".")[2]
        if not near or key.startswith("_"):
            continue
        shortened = set(name.split("_")) < set(near.split("_")) and len(name.split("_")) > 2
        if shortened or SequenceMatcher(None, name, near).ratio() > 0.82:
            yield key, "is not a key of the framework, which ignores it", f"did you mean {near}"


_NAME_PATTERNS = (
    Lint("unknown-flag", "NVIDIA/Megatron-LM#394", _unknown_flag),
    Lint("silent-typo", "deepspeedai/DeepSpeed#653, #1103", _typo),
)


@cache
def lints() -> tuple[Lint, ...]:
    """Return all lints: of single frameworks, of every framework, and of misspelt names."""
    own = tuple(lint for framework in FRAMEWORKS.values() for lint in lints_of(framework))
    return own + _rows(ROOT / "lints.toml") + _NAME_PATTERNS


def lint(config: Config, read: Configuration) -> list[Mistake]:
    """Return the mistakes of a configuration, in the order of the lints."""
    return [
        Mistake(lint.name, key, problem, remedy, lint.issue)
        for lint in lints()
        for key, problem, remedy in lint.examine(config, read)
    ]
