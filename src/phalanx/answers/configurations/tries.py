"""What `phalanx plan --from FILE --try LINE` does: the file with one change at a time, priced side by side.

    fp8, zero=3, seq=32768, gpus=256, chip=b200, dp_overlap=none

Each item is a precision, a field of the strategy, an option of the stack, or one of gpus, batch, seq, cluster and
chip; `+` joins items that change together, as in zero=1+recompute=none. dp takes the GPUs that are left.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from phalanx.answers.answer import Answer
from phalanx.answers.expenses import expense, rates_of, training_of
from phalanx.answers.question.query import Query
from phalanx.answers.question.question import Premises, Question
from phalanx.answers.question.resolution import read
from phalanx.planning.expense.expense import Expense
from phalanx.planning.training_cost import TrainingCost
from phalanx.spec.cluster.presets import PRESETS, named
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.number_formats import PRECISIONS
from phalanx.spec.strategy import spec as strategies
from phalanx.spec.strategy.spec import FIELDS, Strategy
from phalanx.spec.strategy.stack_options import DEFAULTS, OPTION_FIELDS
from phalanx.spec.strategy.stack_options import parse as parse_options

_NUMBERS = ("gpus", "batch", "seq")
_SITES = ("cluster", "chip")
_SPLITS = ("pp", "virtual", "schedule")
"""Fields whose change divides the blocks among chunks anew."""


@dataclass(frozen=True)
class TriedChange:
    """The file with one change; where it has no price, `reason` says why."""

    change: str
    strategy: Strategy | None = None
    gpus: int | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    memory_bytes: float | None = None
    usable_bytes: float | None = None
    fits: bool = False
    expense: Expense | None = None
    """For a million tokens, or for the whole training."""
    reason: str = ""
    """Why there is no price, or what the stack refuses of it; what else was changed for it."""
    training: TrainingCost | None = None
    """Of all its tokens, where these were asked for."""


@dataclass(frozen=True)
class TriedChanges(Answer):
    """A configuration unchanged, and with each change alone."""

    question: Premises
    now: TriedChange
    changes: tuple[TriedChange, ...]


def try_changes(query: Query, line: str, rates: str | None = None, tokens: str | None = None) -> TriedChanges:
    """Price a configuration, and the configuration with each item of a line. `rates`: the user's prices
    (planning/expense); `tokens`: number for the whole training. Raises InputError."""
    base = read(query)
    items = [item.strip() for item in line.split(",") if item.strip()]
    if not items:
        raise InputError("try", line, "names no change", "e.g. fp8, zero=3, seq=32768, gpus=256, chip=b200")
    for item in items:
        _parts(item)
    now = _price("unchanged", base, "", rates, tokens)
    return TriedChanges(base.premises, now, tuple(_try_item(i, query, base, rates, tokens) for i in items))


def _parts(item: str) -> list[tuple[str, str]]:
    """Return the (name, value) of an item's parts. Raises InputError for what is no change, or has no value."""
    parts = []
    for part in item.split("+"):
        name, equals, value = (text.strip() for text in part.partition("="))
        if not equals and name in PRECISIONS:
            name, value = "precision", name
        if not equals and isinstance(DEFAULTS.get(name), bool):
            value = "1"
        known = (*_NUMBERS, *_SITES, "precision", *FIELDS, *OPTION_FIELDS)
        if name not in known:
            raise InputError("try", part.strip(), "is not a change", nearest(name, (*PRECISIONS, *known)))
        if not value:
            raise InputError("try", part.strip(), "has no value", f"write {name}=VALUE{_example(name)}")
        if name in _NUMBERS and not value.isdigit():
            raise InputError("try", part.strip(), "is not a whole number", f"e.g. {name}=64")
        parts.append((name, value))
    return parts


def _example(name: str) -> str:
    default = DEFAULTS.get(name)
    return f", such as {name}=1" if isinstance(default, (int, float)) else ""


def _try_item(item: str, query: Query, base: Question, rates: str | None, tokens: str | None) -> TriedChange:
    try:
        return _price(item, *_question_of(item, query, base), rates, tokens)
    except InputError as error:
        return TriedChange(item, reason="; ".join(filter(None, (error.reason, error.remedy))))


def _question_of(item: str, query: Query, base: Question) -> tuple[Question, str]:
    """Return the question of an item, and as text what else was changed for it. Raises InputError."""
    assert base.strategy is not None
    table = strategies.parse(str(base.strategy))
    table.pop("dp", None)
    fields: dict[str, Any] = {}
    options, also = parse_options(query.options or ""), ""
    for name, value in _parts(item):
        if name in _NUMBERS:
            fields[name] = int(value)
        elif name in _SITES:
            fields["cluster"] = _site(value)
        elif name == "precision":
            fields["precision"] = value
        elif name in OPTION_FIELDS:
            options[name] = value
        else:
            table[name] = value
            if name in _SPLITS:
                table.pop("layers", None)
    for name, other in base.followed.items():
        if name not in dict(_parts(item)):
            table[name] = table.get(other, 1)
    seq = fields.get("seq", 0)
    if seq > base.pricing.model.max_seq:
        fields["changes"] = (*query.changes, f"model.max_seq={seq}")
        also = f"with model.max_seq={seq}"
    if options:
        fields["options"] = ",".join(f"{name}={strategies.format_field(value)}" for name, value in options.items())
    if base.void_zero is not None and "zero" not in table:
        ranks = prod(int(table.get(name, 1)) for name in ("tp", "pp"))
        if fields.get("gpus", base.gpus) > ranks:
            table["zero"] = base.void_zero
    if base.void_sp and "sp" not in table and int(table.get("tp", 1)) > 1:
        table["sp"] = 1
    line = ",".join(f"{name}={strategies.format_field(value)}" for name, value in table.items())
    return read(replace(query, **fields, strategy=line or "tp=1")), also


def _site(value: str) -> str:
    """Return the name or file of a cluster, given by its name, its file or its chip. Raises InputError."""
    site = value if value.lower().endswith(".toml") else named(value)
    if site is None:
        raise InputError("try", value, "is not a cluster and no chip of one", nearest(value, PRESETS))
    return site


def _price(item: str, q: Question, also: str, line: str | None, tokens: str | None) -> TriedChange:
    x = q.subject
    p, job = x.priced, q.pricing.job
    rate = job.global_batch * job.seq / p.seconds
    reason = "; ".join(filter(None, (also, f"{q.stack} does not run it: {q.refused}" if q.refused else "")))
    memory = (float(p.bytes_), float(p.usable), bool(p.fits))
    training = training_of(q, job.global_batch * job.seq, p.seconds, tokens) if tokens else None
    cost = expense(q, rate, rates_of(q, line), training)
    return TriedChange(item, x.strategy, q.gpus, p.seconds, rate, rate / q.gpus, *memory, cost, reason, training)
