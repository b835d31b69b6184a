"""A configuration as it was read: the layout that it states, and what became of every key of the file.

A reader takes keys from a `Keys`; a key that it takes is understood. The others are sorted by the framework's
verdicts: without effect on layout, memory and time; with an effect that is not modelled; or not judged, because no
list of the framework's keys has them (the nearest name is given). None is a value that the file does not state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from phalanx.frameworks import verdicts
from phalanx.frameworks.keys import KeyTable
from phalanx.frameworks.values import LARGEST_COUNT, count, number, product, truth
from phalanx.frameworks.verdicts import Verdict
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS, ZeroLevel

Config = Mapping[str, Any]
T = TypeVar("T")
_LOOKED_UP, _LONGEST = 100, 80
"""The nearest name is looked for of at most this many unknown keys, of at most this many characters each: every one
is compared with all keys of a framework."""

_ENVIRONMENT = verdicts.load(Path(__file__).parent / "environment" / "verdicts.toml")
"""What environment variables of the libraries underneath change."""
_LIBRARIES = ("NCCL_", "NVTE_", "TORCH_NCCL_")
"""Prefixes of the variables of libraries. An unknown variable with one of them is not judged; others have no
effect."""


class Partial(dict[str, Any]):
    """Tables that override a file which is missing: a key that they do not have is open, not at its default."""


@dataclass(frozen=True)
class StatedLayout:
    """The layout that a configuration states, in the names of a Strategy; None: not stated. `dp`: replicas, sharded
    ones included. `accumulation`: micro-batches of a step. `micro_batch` in sequences of a rank, `global_batch` of
    all. `offload`: where the optimizer's state and the parameters are, `none` or `cpu`."""

    world: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    zero: int | None = None
    shard: int | None = None
    sp: bool | None = None
    virtual: int | None = None
    schedule: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    seq: int | None = None
    precision: str | None = None
    recompute: str | None = None
    offload: Mapping[str, str | None] | None = None
    layers: str | None = None
    """Blocks of each chunk, where the file lists them."""
    ulysses: int | None = None
    recomputed: str | None = None
    """`recompute` as a Strategy writes it, with modules and numbers of blocks."""

    @property
    def level(self) -> ZeroLevel | None:
        """What `zero` shards; None where it is not stated."""
        return None if self.zero is None else ZERO_LEVELS[self.zero]


ALL_BLOCKS = 10**4
"""A number of blocks for "all of them", where a file says so before its model is known."""


@dataclass(frozen=True)
class Configuration:
    """A configuration as it was read. `stack`: the row of frameworks/registry.py that runs it."""

    kind: str
    stack: str
    layout: StatedLayout
    understood: Mapping[str, str]
    """Key -> the field that it sets."""
    without_effect: tuple[str, ...]
    not_modelled: Mapping[str, Verdict]
    """Keys that change layout, time or memory, and have no price."""
    unknown: Mapping[str, str]
    """Keys that are not judged -> the nearest name that the framework has, or ""."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the model that the file states, by the names of a Hugging Face config.json."""
    model_name: str = ""
    spec: ModelSpec | None = None
    """The model, where the file states all of it."""
    unpriced: str = ""
    """Why the training has no price, such as a part of the model that it trains alone; "": it has one."""
    open_model: str = ""
    """Why there is no `spec`: what the file does not state, or what a ModelSpec cannot describe."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of StackOptions that the file sets."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Strategy that the file sets and a StatedLayout does not have."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The job but for its layout: optimizer (fields of Optimizer), clip, compute (bf16, ...), types (fields of
    Precision) where state is not in fp32."""
    within_node: bool = False
    """Whether state is sharded over the ranks of a node alone, which its launcher says."""
    within: str = ""
    """Conditions that a search for this release keeps, where the stack that prices it has no rules of its own."""
    notes: tuple[str, ...] = ()
    """Assumptions of its reader, a sentence each."""
    companions: tuple[str, ...] = ()
    """Other files that were read with it."""
    missing: tuple[str, ...] = ()
    """Files that it names and that were not given: `NAME, what it is, is not here: give it too`."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The parts of `model` that are usable: counts and other finite numbers, words and truth values."""
        counted = {name: count(value) or value for name, value in self.model.items()}
        return {name: value for name, value in counted.items() if _states(value)}


class Keys:
    """The keys of a file, and which of them were understood."""

    def __init__(
        self, config: Config, table: KeyTable | None = None, others: Mapping[str, KeyTable] | None = None
    ) -> None:
        """`others`: tables of other frameworks, by the beginning of the paths that their keys have here."""
        self.config = config
        self.table = table
        self.others = others or {}
        self.understood: dict[str, str] = {}

    def field(self, name: str, default: Any = None) -> Any:
        """Return the value of the key that sets a field. Raises KeyError where the framework has no such key."""
        assert self.table is not None
        return self.take(self.table[name], name, default)

    def word(self, name: str, default: Any = None) -> Any:
        """Return a field's value by the word that its key has in the file; None for a word that is not known."""
        assert self.table is not None
        value = self.field(name, _ABSENT)
        return self._default(default) if value is _ABSENT else self.table.value(name, value)

    def take(self, path: str | tuple[str, ...], meaning: str, default: Any = None) -> Any:
        """Return the value at a dotted path, or at the first of several paths that the file has, and record what the
        key means; the default where the file has none of them. Keys may be written with - or _."""
        paths = (path,) if isinstance(path, str) else path
        for n, each in enumerate(paths):
            value, taken = _at(self.config, each.split("."))
            if taken is not None:
                self.understood[taken] = meaning
                for other in paths[n + 1 :]:  # that says the same
                    same, name = _at(self.config, other.split("."))
                    if name is not None and same == value and not isinstance(same, Mapping):
                        self.understood.setdefault(name, meaning)
                return value
        return self._default(default)

    def count(self, path: str | tuple[str, ...], meaning: str, default: Any = None) -> int | None:
        """Return the count at a path, as `take`."""
        return count(self.take(path, meaning, default))

    def launched(self) -> int | None:
        """Return the ranks that a launcher starts."""
        return product(self.count("launch.nnodes", "world", 1), self.count("launch.nproc_per_node", "world"))

    def truth(self, path: str | tuple[str, ...], meaning: str, default: Any = None) -> bool | None:
        """Return the truth value at a path, as `take`."""
        return truth(self.take(path, meaning, default))

    def number(self, path: str | tuple[str, ...], meaning: str, default: float) -> float:
        """Return the number at a path, as `take`; the default for a word too."""
        return number(self.take(path, meaning), default)

    def betas(self, path: str, default: tuple[float, float]) -> tuple[float, float]:
        """Return the two betas of a list."""
        stated = self.take(path, "job.optimizer")
        first, second = stated if isinstance(stated, list) and len(stated) == 2 else default
        return number(first, default[0]), number(second, default[1])

    def _default(self, value: Any) -> Any:
        return value if value is _ABSENT or not isinstance(self.config, Partial) else None

    def configuration(
        self, kind: str, stack: str, layout: StatedLayout, table: KeyTable | None = None, **stated: Any
    ) -> Configuration:
        """Return what was read, with what became of the other keys by the framework's table. `stated`: further fields
        of Configuration."""
        table = table or self.table
        assert table is not None
        quiet, open_, unknown = self.rest(table, bool(stated.get("open_model")))
        return Configuration(kind, stack, layout, self.understood, quiet, open_, unknown, **stated)

    def rest(
        self, table: KeyTable, open_model: bool = False
    ) -> tuple[tuple[str, ...], dict[str, Verdict], dict[str, str]]:
        """Return the keys that no reader took, in three groups: without effect; not modelled, with verdicts; not
        judged, with the nearest name. A key whose effect has a price in general, and that no reader took here, is not
        modelled. `open_model`: keys that change time alone are left out, since a caveat about the model covers its
        shape."""
        priced = ("layout", "memory") if open_model else _PRICED
        quiet: list[str] = []
        open_: dict[str, Verdict] = {}
        unjudged: dict[str, str] = {}
        for path, leaf, value in self._untaken(self.config, table):
            name = _plain(leaf)
            own = next((other for start, other in self.others.items() if path.startswith(start)), table)
            if path in ("env", "launch", "args") and not value:  # a script that sets none
                quiet.append(path)
            elif path.startswith("env."):  # variables of a script: no loader reads them as its keys
                known = _ENVIRONMENT.get(leaf)
                if known is not None and known.effect == "unmodelled" and not known.is_off(value):
                    open_[path] = known
                elif known is None and leaf.startswith(_LIBRARIES):
                    unjudged[path] = ""
                else:
                    quiet.append(path)
            elif path.startswith("launch.") or leaf in _HYDRA or any(part in path for part in _OPEN):
                quiet.append(path)
            elif (verdict := own.verdict(path) or own.verdict(name)) is None:
                near = _nearest(name, own) if len(unjudged) < _LOOKED_UP and len(name) <= _LONGEST else ""
                unjudged[path] = near if near != name else ""  # known of another table
            elif verdict.effect == "unmodelled" and not verdict.is_off(value):
                open_[path] = verdict
            elif verdict.effect in priced and _is_set(value) and not verdict.is_off(value):
                open_[path] = replace(verdict, effect="unmodelled", changes=(verdict.effect,), what=_UNREAD)
            else:
                quiet.append(path)
        return tuple(quiet), open_, unjudged

    def _untaken(self, config: Config, table: KeyTable, above: str = "") -> Iterator[tuple[str, str, Any]]:
        """Yield (path, name, value) of every key that was not taken. Tables are entered, except those that count as
        one key: not modelled as a whole, misspelt (their name is close to a known one), or keyed by names with
        slashes, as of datasets."""
        for name, value in config.items():
            path = f"{above}{name}"
            if path in self.understood:
                continue
            has_part = any(taken.startswith(f"{path}.") for taken in self.understood)
            has = has_part or _plain(str(name)) in table.names
            verdict = table.verdict(path)
            whole = not has_part and verdict is not None and verdict.effect == "unmodelled"
            whole |= isinstance(value, Mapping) and any("/" in str(inner) for inner in value)
            if (
                isinstance(value, Mapping)
                and value
                and not whole
                and (has or len(name) > _LONGEST or not _is_nearly_known(_plain(str(name)), table))
            ):
                yield from self._untaken(value, table, f"{path}.")
            else:
                yield path, str(name), value


_ABSENT = object()
_PRICED = ("layout", "time", "memory")
_UNREAD = "is not read where it stands, or only with other keys"
_HYDRA = ("_component_", "_target_", "_partial_", "_convert_", "_call_")
"""Keys of hydra, and of torchtune, that name what is built."""
_OPEN = (".params.", "lr_scheduler_kwargs.", "gradient_checkpointing_kwargs.")
"""Tables of whatever an optimizer, a scheduler or torch's checkpoint() takes."""


def _is_set(value: Any) -> bool:
    """Whether a value is set: not a table, not a reference to another key, and not filled in by an integration."""
    other = isinstance(value, str) and value.startswith("${")
    return value not in (None, "", "auto") and not other and not isinstance(value, Mapping)


@cache
def _nearest(name: str, table: KeyTable) -> str:
    """Return the known name that a misspelt or shortened key is closest to; "" if none is close."""
    length = len(name)
    words = set(name.split("_"))
    known = [
        other
        for other, parts in _in_words(table)
        if other[0] == name[:1] or abs(len(other) - length) < 3 or words <= parts
    ]
    near = get_close_matches(name, known, 1, 0.75)
    if near and SequenceMatcher(None, near[0], name).ratio() >= 0.85:
        return near[0]
    beginnings = {other[:length]: other for other in sorted(known, key=len, reverse=True)}
    beginning = get_close_matches(name, beginnings, 1, 0.85)
    return beginnings[beginning[0]] if beginning and len(name) > 5 else near[0] if near else ""


@cache
def _in_words(table: KeyTable) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return a framework's keys, sorted, with their words."""
    return tuple((name, frozenset(name.split("_"))) for name in sorted(table.names))


@cache
def _is_nearly_known(name: str, table: KeyTable) -> bool:
    return bool(get_close_matches(name, table.names, 1, 0.85))


def _plain(name: str) -> str:
    """Return a key as the framework's source spells it: with _, and without the prefix of its table."""
    plain = name.lstrip("-").replace("-", "_")
    for prefix in ("fsdp_", "parallelism_config_"):
        plain = plain.removeprefix(prefix) or plain
    return plain


def _at(config: Any, parts: list[str]) -> tuple[Any, str | None]:
    """Return the value at a path and the path in the file's spelling, or (None, None)."""
    written = []
    for part in parts:
        if not isinstance(config, Mapping):
            return None, None
        for name in (part, part.replace("_", "-"), part.replace("-", "_")):
            if name in config:
                written.append(name)
                config = config[name]
                break
        else:
            return None, None
    return config, ".".join(written)


def with_file_keys(c: Configuration, file: Configuration, table: str) -> Configuration:
    """Return `c` with the keys of a file that it names, under the path of the table that the file was read into."""

    def under(names: Mapping[str, T]) -> dict[str, T]:
        return {f"{table}.{name}": value for name, value in names.items()}

    return replace(
        c,
        understood={**c.understood, **under(file.understood)},
        without_effect=(*c.without_effect, *(f"{table}.{name}" for name in file.without_effect)),
        not_modelled={**c.not_modelled, **under(file.not_modelled)},
        unknown={**c.unknown, **under(file.unknown)},
        notes=(*c.notes, *file.notes),
    )


def shown(key: str) -> str:
    """Return a key as its file writes it: without `args.` and other tables that only readers have."""
    for table in ("args.", "launch.", "env.", "accelerate."):
        key = key.removeprefix(table)
    return key


def _states(value: Any) -> bool:
    if isinstance(value, float):
        return 0 <= value < 1e15
    return isinstance(value, bool | str) or (isinstance(value, int) and 0 <= value <= LARGEST_COUNT)
