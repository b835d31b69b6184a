"""Limits of a search: what a stack refuses (frameworks/), and what a user's conditions (`where`) exclude.

Limits are conditions on columns (spec/strategy/where.py). A row is dropped as soon as the columns read by a limit are
chosen, before the next step of the search multiplies it:

    core       dp tp sp cp ulysses pp micro_batch, and world, ring, micro_batches, ...
    experts    ep etp          pipeline   schedule virtual          recompute          sharding   zero shard order

Of recomputation a search offers the kinds that a stack supports and that differ for the model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.frameworks.stack import DERIVED, WORDS, Stack, of_strategy
from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy import where
from phalanx.spec.strategy.recompute import encode, parse, to_text
from phalanx.spec.strategy.spec import FIELDS, Strategy
from phalanx.spec.strategy.stack_options import DEFAULTS, OPTION_FIELDS, StackOptions
from phalanx.spec.strategy.stack_options import parse as parse_options
from phalanx.spec.strategy.where import Condition
from phalanx.spec.strategy.zero_levels import level_columns

_DEGREES = ("dp", "tp", "sp", "cp", "ulysses", "pp", "micro_batch")
_PRODUCTS = ("world", "ring", "replicas", "cp_chunks", "tp_ulysses", "tp_cp", "micro_batches")
CORE = frozenset((*_DEGREES, *_PRODUCTS))
_EXPERTS = CORE | {"ep", "etp"}
_PIPELINE = _EXPERTS | {"schedule", "virtual", "chunks", "middle_chunks"}
_RECOMPUTE = _PIPELINE | {"recompute"}
_SHARDING = _RECOMPUTE | {"zero", "shard", "dp_shard", "local", "order"}
STAGES = {
    **{"core": CORE, "experts": _EXPERTS, "pipeline": _PIPELINE, "recompute": _RECOMPUTE, "sharding": _SHARDING}
}
"""Columns chosen after each step of the search."""
_BEFORE: dict[str, frozenset[str]] = dict(zip(STAGES, [frozenset[str](), *list(STAGES.values())[:-1]], strict=True))
SEARCHED_FIELDS = STAGES["sharding"]
_FIXED_LOCAL = re.compile(r"local==?([0-9]{1,9})")

_Due: TypeAlias = tuple[list[Condition], list[tuple[Condition, ...]], list[str], tuple[str, ...]]


@dataclass(frozen=True)
class SearchLimits:
    """The limits of a search. `row`: the stack; `wanted`: the user's conditions; `constants`: values of model, job
    and options that rules read."""

    row: Stack | None = None
    wanted: tuple[Condition, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.row is not None or bool(self.wanted)

    @cached_property
    def _wanted_at(self) -> dict[str, list[Condition]]:
        return {stage: [c for c in self.wanted if self._due(c.fields, stage)] for stage in STAGES}

    @cached_property
    def _refused_at(self) -> dict[str, list[tuple[Condition, ...]]]:
        rules = self._rules
        fields = [frozenset[str]().union(*(c.fields for c in conditions)) for conditions in rules]
        return {s: [r for r, f in zip(rules, fields, strict=True) if self._due(f, s)] for s in STAGES}

    @cached_property
    def _legal_at(self) -> dict[str, list[str]]:
        """Fields whose legal values the row restricts, by the step that chooses them."""
        entries = self.row.strategy if self.row else {}
        names = [name for name, entry in entries.items() if entry.values is not None and name in SEARCHED_FIELDS]
        return {stage: [n for n in names if n in STAGES[stage] - _BEFORE[stage]] for stage in STAGES}

    def _due(self, fields: frozenset[str], stage: str) -> bool:
        open_fields = fields - self.constants.keys()
        return open_fields <= STAGES[stage] and not open_fields <= _BEFORE[stage]

    def keeps(self, columns: Mapping[str, Any], stage: str, rows: int) -> npt.NDArray[np.bool_]:
        """Return the mask of rows that satisfy the limits due after a step of the search."""
        return self._mask(
            self._wanted_at[stage], self._refused_at[stage], self._legal_at[stage], columns, np.ones(rows, dtype=bool)
        )

    def _mask(
        self,
        wanted: Iterable[Condition],
        rules: Iterable[tuple[Condition, ...]],
        legal: Iterable[str],
        columns: Mapping[str, Any],
        keep: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Clear in `keep` the rows that violate a condition, satisfy a rule, or have an illegal value in a field."""
        values = {**self.constants, **columns}
        for condition in wanted:
            keep &= np.asarray(condition.holds(values), dtype=bool)
        for rule in rules:
            keep &= ~np.asarray(where.holds(rule, values), dtype=bool)
        for name in legal:
            keep &= self._legal(name, values)
        return keep

    def way(self, own: tuple[str, ...], values: Mapping[str, Any]) -> bool:
        """Whether a choice of the fields `own` satisfies the limits that can be evaluated on `values`, which are
        scalars. Thousands of choices differ only in values that no limit reads: each distinct one is judged once."""
        names = (own, tuple(values))
        if names not in self._due_on:
            self._due_on[names] = self._due_of(own, values.keys())
        wanted, rules, legal, read = self._due_on[names]
        key = (names, *(values[name] for name in read))
        if key not in self._judged:
            self._judged[key] = bool(self._mask(wanted, rules, legal, values, np.ones(1, dtype=bool))[0])
        return self._judged[key]

    def keeps_ways(self, own: tuple[str, ...], columns: Mapping[str, Any], count: int) -> npt.NDArray[np.bool_]:
        """Return the mask of the `count` rows of `columns` that satisfy the limits, as `way` does for scalars."""
        wanted, rules, legal, _ = self._due_of(own, columns.keys())
        return self._mask(wanted, rules, legal, columns, np.ones(count, dtype=bool))

    def _due_of(self, own: tuple[str, ...], columns: Iterable[str]) -> _Due:
        """Return the conditions, rules and restricted fields that concern `own` and read only fields in `columns`."""
        chosen, there = set(own), {*self.constants, *columns}
        wanted = [c for c in self.wanted if c.fields <= there and c.fields & chosen]
        fields = [frozenset[str]().union(*(c.fields for c in rule)) for rule in self._rules]
        rules = [rule for rule, f in zip(self._rules, fields, strict=True) if f <= there and f & chosen]
        entries = self.row.strategy if self.row else {}
        legal = [n for n in own if n in entries and entries[n].values is not None]
        read = set(legal).union(*(c.fields for c in wanted), *(c.fields for rule in rules for c in rule))
        if legal:
            read |= {"pp", "zero", "dp"}  # `_legal` also reads these fields
        return wanted, rules, legal, tuple(n for n in columns if n in read)

    @cached_property
    def _due_on(self) -> dict[tuple[tuple[str, ...], ...], _Due]:
        return {}

    @cached_property
    def _judged(self) -> dict[tuple[Any, ...], bool]:
        return {}

    @cached_property
    def _rules(self) -> list[tuple[Condition, ...]]:
        return [conditions for _, conditions in self.row.conditions] if self.row else []

    def _legal(self, name: str, values: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
        assert self.row is not None
        entry, column = self.row.strategy[name], values[name]
        if isinstance(column, where.Words):
            legal = np.array([entry.allows(word) for word in column.names], dtype=bool)[column.codes]
        elif isinstance(column, str):
            legal = np.array(entry.allows(column))
        elif name == "shard":  # cannot have fewer shards than replicas
            legal = ~level_columns(np.asarray(values["zero"])).state | (column == values["dp"])
        else:
            legal = np.isin(column, [int(v) for v in entry.values or ()])
        result: npt.NDArray[np.bool_] = legal | (name in ("schedule", "virtual") and values["pp"] == 1)
        return result

    def allows(self, s: Strategy, micro_batches: int, options: StackOptions) -> bool:
        """Whether one strategy is within the limits."""
        about = {**self.constants, "micro_batches": micro_batches}
        if self.row is not None and self.row.refusal(s, options, about) is not None:
            return False
        return bool(where.holds(self.wanted, {**about, **of_strategy(s, options)}))


UNLIMITED = SearchLimits()


def conditions(line: str, field: str = "where") -> tuple[tuple[Condition, ...], StackOptions]:
    """Parse a line of conditions on a strategy, and of stack options set by `option=value`. Raises InputError for
    anything else, and for fields that no search chooses."""
    known = (*FIELDS, *OPTION_FIELDS, *DERIVED)
    on_strategy: list[Condition] = []
    settings: list[str] = []
    for condition in where.parse(line, known, WORDS | {name: () for name in DEFAULTS}, field):
        if condition.fields <= OPTION_FIELDS.keys():
            if any(op in condition.text for op in ("<", ">", "!", "(")):
                raise InputError(field, condition.text, "an option is set, not searched", "write option=value")
            settings.append(condition.text.replace("==", "="))
            continue
        fixed = sorted(condition.fields - SEARCHED_FIELDS)
        if fixed:
            reason = f"{fixed[0]} is not searched: every strategy has its default"
            raise InputError(
                field, condition.text, reason, f"use {', '.join(sorted(SEARCHED_FIELDS & FIELDS.keys()))}"
            )
        if "local" in condition.fields and not _FIXED_LOCAL.fullmatch(condition.text.replace(" ", "")):
            reason = "is searched at one number of steps"
            raise InputError(field, condition.text, reason, "write local=32, and compare the answers of several")
        on_strategy.append(condition)
    from phalanx.spec.files.job_file import build

    options = build(StackOptions, parse_options(",".join(settings)), "options") if settings else StackOptions()
    return tuple(on_strategy), options


def steps_alone(wanted: Sequence[Condition]) -> int:
    """Return the steps between synchronisations of replicas that step alone, as a condition fixes them; else 0."""
    texts = [c.text.replace(" ", "") for c in wanted if "local" in c.fields]
    return max((int(_FIXED_LOCAL.fullmatch(text)[1]) for text in texts), default=0)  # type: ignore[index]


def schedule_files(wanted: Sequence[Condition]) -> tuple[str, ...]:
    """Return the files of pipeline schedules that conditions name; a search uses no others."""
    return tuple(name for c in wanted if "schedule" in c.fields for name in re.findall(r"[^\s,()=!]+\.csv", c.text))


def conditions_without(wanted: Sequence[Condition], text: str) -> tuple[Condition, ...]:
    """Return the conditions except those written as `text`."""
    return tuple(c for c in wanted if c.text != text)


UNDOCUMENTED = ("none", "selective", "full", "every:2", "every:4")
"""Kinds of recomputation that a search offers for a stack without a row."""
_COUNTED = ("block:1", "block:2", "block:4", "block:8")


def recompute_kinds(stack: Stack | None, model: ModelSpec, flash: bool, by_operation: bool) -> tuple[str, ...]:
    """Return the kinds of recomputation that a search chooses from. With `flash` attention, whose core keeps nothing,
    plain selective recomputation frees nothing, unless the stack recomputes `by_operation`."""
    if stack is None:
        return tuple(kind for kind in UNDOCUMENTED if not (flash and kind == "selective"))
    entry = stack.strategy["recompute"]
    kinds = [kind for kind in (*UNDOCUMENTED, *_COUNTED, *stack.recipes) if entry.allows(kind)]
    return tuple(to_text(encode(kind)) for kind in kinds if _differs(kind, stack, model, flash and not by_operation))


def _differs(kind: str, stack: Stack, model: ModelSpec, nothing_in_core: bool) -> bool:
    """Whether a kind frees memory in this model under this stack that other kinds do not."""
    if kind == "selective":
        return not nothing_in_core
    x = model.experts
    has = {
        "mlp": x is None or bool(x.dense_layers),
        "mlp_act": x is None or bool(x.dense_layers),
        "moe": x is not None,
        "moe_act": x is not None,
        "mla_up_proj": model.latent is not None,
        "mhc": model.streams > 1,
    }
    parts = [name in stack.modules and has.get(name, True) for name in parse(kind).modules]
    # Words for sets of modules name each that they may repeat, whether or not a model has it.
    return all(parts) or (any(parts) and bool(stack.strategy["recompute"].words))
