"""One software stack: a framework at a release, as its folder's facts.toml describes it (facts.py).

    FieldFact  one field: its legal values, how it is written, and the line of the framework's source that says so
    Rule       a combination that is refused: a condition (spec/strategy/where.py), the reason, the remedy, the source

A documented stack has a FieldFact for every field of Strategy, and for every option that it has. Other stacks are
releases that are known by their published runs alone: they have constants that price a step, and `priced`, rules
against strategies that these constants do not cover.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeAlias, get_args, get_type_hints

from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.errors import InputError
from phalanx.spec.strategy import recompute, where
from phalanx.spec.strategy.spec import FIELDS, Schedule, Strategy
from phalanx.spec.strategy.stack_options import DEFAULTS, OPTION_FIELDS, StackOptions

DERIVED = (
    *("world", "ring", "replicas", "dp_shard", "micro_batches", "gpus_per_node", "cp_chunks", "chunks", "tp_ulysses"),
    *("tp_cp", "middle_chunks", "counted_blocks", "middle_blocks"),
)
"""Names that rules may read in addition to the fields. Products of fields: replicas, dp x cp; cp_chunks, 2 cp;
chunks, pp x virtual; tp_ulysses, tp x ulysses; tp_cp, tp x cp. middle_chunks, middle_blocks: chunks and blocks of the
pipeline ranks whose number of blocks is not given; counted_blocks: blocks, with embedding and head where options
count these as blocks; micro_batches of a step; gpus_per_node."""
OPERATORS = {
    "delta": "gated delta net",
    "ssd": "Mamba-2",
    "lightning": "lightning attention",
    "channel_delta": "Kimi delta attention",
    "selective": "Mamba",
    "short_conv": "short convolution",
    "index": "sparse attention by an index",
    "compressed": "attention to compressed keys",
    "streams": "hyper-connections",
}
"""Operators that not every stack runs, in plain words; rules read the number of blocks that have one."""
MODEL_FACTS = (
    *("blocks", "heads", "kv_heads", "experts", "top_k", "seq", "batch", "tied", "dense_blocks"),
    *OPERATORS,
    *("scans", "delta_heads", "ssd_heads", "ssd_groups"),
)
"""Names that rules may read of the model and the job; a rule about one that is not known is skipped. scans: blocks
with any recurrence; delta_heads: key heads of gated delta nets; ssd_heads, ssd_groups: of Mamba-2 (1 in models
without)."""


@dataclass(frozen=True)
class FieldFact:
    """What a stack can do with one field of a Strategy, or one option.

    `values`: the legal ones, of which a word may end in `*`; None: all values of the field. `written`: how people set
    it, "" where the value is fixed. `source`: file:line at the stack's commit. `note`: what a user should know.
    `in_code`: a program's code sets it and no configuration does, so a search does not try it; `values_in_code`: the
    values of which that holds. `key`: the flag or key that sets it, "" where several do or none does; `words`: the
    key's word -> the field's value, where they differ."""

    values: tuple[Any, ...] | None
    written: str
    source: str
    note: str = ""
    in_code: bool = False
    values_in_code: tuple[Any, ...] = ()
    key: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)

    def allows(self, value: Any) -> bool:
        """Whether a value is legal; None is a field's default."""
        if self.values is None or value is None or value in self.values:
            return True
        return isinstance(value, str) and any(isinstance(v, str) and fnmatchcase(value, v) for v in self.values)

    def offers(self, value: Any) -> bool:
        """Whether a configuration can set this value: it is legal, and not left to a program's code."""
        return value not in self.values_in_code and self.allows(value)


def in_full(source: str, files: Mapping[str, str]) -> str:
    """Return a `file:line` with the whole path in place of its abbreviation."""
    file, _, line = source.rpartition(":")
    return f"{files.get(file, file)}:{line}" if file else source


@dataclass(frozen=True)
class Rule:
    """A combination that a stack refuses. `when`: the condition; `remedy`: what to do instead; `source`: file:line,
    "" for a limit of a stack's constants."""

    when: str
    reason: str
    remedy: str
    source: str


_ReadRule: TypeAlias = tuple[Rule, tuple[where.Condition, ...], frozenset[str]]
"""A rule, its conditions, and the names that they read."""


@dataclass(frozen=True)
class Refusal:
    """Why a stack does not run a strategy: the field at fault with its value, and what would run instead."""

    field: str
    value: object
    reason: str
    remedy: str
    source: str

    def error(self, stack: str) -> InputError:
        """Return the refusal as an error that names the stack."""
        table = "options" if self.field in OPTION_FIELDS else "strategy" if self.field in FIELDS else "model"
        by = ", ".join(filter(None, (stack, self.source)))
        return InputError(f"{table}.{self.field}", self.value, f"{self.reason} ({by})", self.remedy)


@dataclass(frozen=True)
class Stack:
    """A framework at one release. Raises ValueError where a fact is missing or has no source."""

    name: str
    framework: str
    """Its folder."""
    parent: str
    """The stack whose constants, policy and limits it has where it states none; "" for the root."""
    title: str = ""
    """For people: framework and release. "": known by its published runs alone."""
    repository: str = ""
    commit: str = ""
    strategy: Mapping[str, FieldFact] = field(default_factory=dict)
    """Every field of Strategy, where the stack is documented."""
    options: Mapping[str, FieldFact] = field(default_factory=dict)
    """Every option that it has."""
    rules: tuple[Rule, ...] = ()
    priced: tuple[Rule, ...] = ()
    """Rules against what its constants do not price."""
    modules: tuple[str, ...] = ()
    """Modules that it recomputes (`recompute=selective:...`)."""
    recipes: tuple[str, ...] = ()
    """Kinds of recomputation of its published recipes, which a search tries."""
    dynamic_context: str = ""
    """Source of context parallelism whose ranks are chosen by the length of each document; "": it has none."""
    needs: tuple[str, ...] = ()
    """What a run needs in addition to its configuration, such as an environment variable."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Constants that are known from its code, its ancestors' included (cost/analytic/profile.py)."""
    policy: Mapping[str, float] = field(default_factory=dict)
    """Fields of Policy that differ from the default: when it reduces and gathers (cost/ledger/policy.py)."""
    runs: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    """Which published runs are its own: patterns by column of their table (validate/stacks.py)."""
    lineage: tuple[str, ...] = ()
    """Its own name and its ancestors' names, nearest first."""

    def __post_init__(self) -> None:
        missing = [name for name in FIELDS if name not in self.strategy]
        if missing and self.documented:
            raise ValueError(f"{self.name} says nothing about {', '.join(missing)}")
        if self.documented and not (self.repository and self.commit):
            raise ValueError(f"{self.name} has no repository or no commit")
        unknown = [n for n in (*self.strategy, *self.options) if n not in FIELDS and n not in OPTION_FIELDS]
        if unknown:
            raise ValueError(f"{self.name}: {', '.join(unknown)} are neither fields nor options")
        for name, entry in (*self.strategy.items(), *self.options.items()):
            if not entry.source:
                raise ValueError(f"{self.name}.{name} has no source")

    @property
    def documented(self) -> bool:
        """Whether its source was read; else it is known by its published runs alone."""
        return bool(self.title)

    @cached_property
    def as_priced(self) -> Stack:
        """The stack with the limits of its constants in place of the rules of its source, for runs that took
        place."""
        return replace(self, title="", strategy={}, options={}, modules=(), rules=self.priced)

    @cached_property
    def fields_in_code(self) -> tuple[str, ...]:
        """Fields that a program's code sets and no configuration does: a search leaves degrees among them at 1."""
        return tuple(name for name, entry in self.strategy.items() if entry.in_code)

    @cached_property
    def zero(self) -> tuple[int, ...]:
        """Levels of ZeRO that it runs without a pipeline."""
        return self._runs("zero", (0, 1, 2, 3), dp=2)

    @cached_property
    def zero_in_pipeline(self) -> tuple[int, ...]:
        """Levels of ZeRO that it runs with a pipeline."""
        if not self.schedules:
            return ()
        return self._runs("zero", self.zero, dp=2, pp=2, schedule=self.schedules[0])

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """Pipeline schedules that it runs; none: it has no pipeline."""
        entry = self.strategy.get("schedule")
        legal = SCHEDULES if entry is None or entry.values is None else entry.values
        return self._runs("schedule", tuple(name for name in SCHEDULES if name in legal), pp=2)

    @cached_property
    def ulysses(self) -> bool:
        """Whether its context parallelism may exchange tokens for heads."""
        return self.refusal(Strategy(cp=2, ulysses=2)) is None

    def has_option(self, name: str, value: Any) -> bool:
        """Whether it has an option, and the option may have this value."""
        return name in self.options and self.options[name].allows(value)

    def _runs(self, name: str, values: tuple[Any, ...], **others: Any) -> tuple[Any, ...]:
        """Return the values of a field with which it runs a strategy."""
        return tuple(v for v in values if self.refusal(Strategy(**others | {name: v})) is None)

    @cached_property
    def conditions(self) -> tuple[tuple[Rule, tuple[where.Condition, ...]], ...]:
        """Every rule with its parsed condition. Raises InputError for a rule that cannot be read."""
        known = (*FIELDS, *OPTION_FIELDS, *DERIVED, *MODEL_FACTS)
        return tuple((r, where.parse(r.when, known, WORDS, f"{self.name} rule")) for r in self.rules)

    @cached_property
    def _of_options(self) -> dict[StackOptions, tuple[_ReadRule, ...]]:
        return {}

    def _rules_under(self, options: StackOptions) -> tuple[_ReadRule, ...]:
        """Return the rules that can hold under these options, each with its conditions and the names that they read.
        Most rules are about options that are not set, and a search judges thousands of strategies."""
        if options not in self._of_options:
            given = {name: getattr(options, name) for name in OPTION_FIELDS}
            self._of_options[options] = tuple(
                (rule, conditions, frozenset[str]().union(*(c.fields for c in conditions)))
                for rule, conditions in self.conditions
                if where.holds((c for c in conditions if c.fields <= given.keys()), given)
            )
        return self._of_options[options]

    def refusal(
        self, s: Strategy, options: StackOptions | None = None, about: Mapping[str, Any] | None = None
    ) -> Refusal | None:
        """Return why the stack does not run a strategy with these options, or None if it does. `about`: names of
        MODEL_FACTS and DERIVED that are known, with their numbers."""
        options = options or StackOptions()
        if self.documented and (illegal := self._illegal(s, options, about)):
            return illegal
        values = of_strategy(s, options) | dict(about or {})
        if "blocks" in values:
            values |= counted(options, values["blocks"])
        for rule, conditions, fields in self._rules_under(options):
            if fields <= values.keys() and bool(where.holds(conditions, values)):
                if fields <= OPERATORS.keys():
                    return Refusal("pattern", None, rule.reason, rule.remedy, rule.source)
                name = next((f for f in _ordered(conditions) if f in FIELDS or f in OPTION_FIELDS), "zero")
                value = getattr(s, name) if name in FIELDS else getattr(options, name)
                return Refusal(name, value, rule.reason, rule.remedy, rule.source)
        return None

    def _illegal(self, s: Strategy, options: StackOptions, about: Mapping[str, Any] | None) -> Refusal | None:
        """Return the first field or option whose value is not one that the stack has."""
        for name, entry in self.strategy.items():
            value = getattr(s, name)
            given = value != FIELDS[name].default or name == "schedule"  # whose default not every stack has
            if given and not entry.allows(value) and _has_effect(name, s, options):
                remedy = self._remedy(name, entry, s, options, about)
                return Refusal(name, value, "is not in the stack", remedy, entry.source)
        how, source = recompute.parse(s.recompute), self.strategy["recompute"].source
        for module in how.modules if ":" in s.recompute else ():
            if module not in self.modules:
                remedy = f"use {', '.join(self.modules)}" if self.modules else "leave it out"
                return Refusal("recompute", s.recompute, f"{module} is not recomputed alone", remedy, source)
        for name, value in options.changed().items():
            known = self.options.get(name)
            if known is None:
                reason = "is not an option of the stack"
                return Refusal(name, value, reason, "leave it out", self.strategy["zero"].source)
            if not known.allows(value):
                return Refusal(name, value, "is not in the stack", _choices(known), known.source)
        return None

    def _remedy(
        self, name: str, entry: FieldFact, s: Strategy, options: StackOptions, about: Mapping[str, Any] | None
    ) -> str:
        """Return what to use in place of a field's value: the values that the stack has; of ZeRO's levels, those that
        it runs with the rest of the strategy, if there are any, since rules about pipelines exclude some."""
        if name != "zero" or s.shard is not None:  # not every level shards over parts of the ranks
            return _choices(entry)
        run = [v for v in entry.values or () if self.refusal(replace(s, zero=v), options, about) is None]
        return _choices(replace(entry, values=tuple(run)) if run else entry)


def of_strategy(s: Strategy, options: StackOptions) -> dict[str, Any]:
    """Return the names that rules read of a strategy, with their values: fields as they take effect (ZeRO with
    nothing to shard over is 0), options, and DERIVED but for the names of a model and a job."""
    values: dict[str, Any] = {name: getattr(s, name) for name in FIELDS}
    values |= {name: getattr(options, name) for name in OPTION_FIELDS}
    zero = s.zero if _has_effect("zero", s, options) else 0
    values |= {"zero": zero, "shard": s.dp_shard, "sp": int(s.sp), "world": s.world}
    values |= {"replicas": s.dp * s.cp, "ring": s.ring, "dp_shard": s.dp_shard, "cp_chunks": 2 * s.cp}
    values |= {"chunks": s.pp * s.virtual, "middle_chunks": (s.pp - given_ends(options)) * s.virtual}
    values |= {"tp_cp": s.tp * s.cp, "tp_ulysses": s.tp * s.ulysses}
    return {name: "auto" if value is None else value for name, value in values.items()}


def given_ends(options: StackOptions) -> int:
    """Return 0 to 2: how many of the first and the last pipeline rank have a number of blocks given by options."""
    return bool(options.first_stage_layers) + bool(options.last_stage_layers)


def counted(options: StackOptions, blocks: int) -> dict[str, int]:
    """Return `counted_blocks` and `middle_blocks` (DERIVED) of a model of `blocks` blocks."""
    ends = options.embedding_as_layer + options.loss_as_layer
    middle = blocks - options.first_stage_layers - options.last_stage_layers
    return {"counted_blocks": blocks + ends, "middle_blocks": middle}


def _words() -> dict[str, tuple[str, ...]]:
    """Return the fields and options whose values are words -> these words, () where any word is legal."""
    result: dict[str, tuple[str, ...]] = {"recompute": (), "compression": (), "layers": (), "order": (), "bucket": ()}
    result |= {"schedule": (*get_args(Schedule), "*.csv")}
    result |= {"grad_sync": ("auto", "step", "micro"), "reshard": ("auto", "step", "action")}
    hints = get_type_hints(StackOptions)
    return result | {name: get_args(hints[name]) for name, value in DEFAULTS.items() if isinstance(value, str)}


WORDS = _words()


def _ordered(conditions: tuple[where.Condition, ...]) -> Iterator[str]:
    for condition in conditions:
        yield from sorted(condition.fields)


def _has_effect(name: str, s: Strategy, options: StackOptions) -> bool:
    """Whether a field of a strategy changes anything: `schedule` without a pipeline and `zero` with nothing to shard
    over do not, unless the state is on the host."""
    if name in ("schedule", "virtual"):
        return s.pp > 1
    return s.shards > 1 or options.state_on_host if name == "zero" else True


def _choices(entry: FieldFact) -> str:
    return f"use {' or '.join(str(v) for v in entry.values)}" if entry.values else "leave it out"
