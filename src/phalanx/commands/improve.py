"""What `phalanx plan --from FILE` does: a faster strategy under the file's own stack, and the settings to change.

    change     fields that belong together (tp with sp; pp with its schedule), as the file has them and better
    alone      the file with this change and no other; dp takes the ranks that are left
    together   with every change before it in the list, which begins with the one that brings most

Settings are those that `phalanx export` would write, spelt as the file spells them. Options that change a result or a
number type stay as the file has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from phalanx.commands.export import TARGETS
from phalanx.commands.question import Question
from phalanx.commands.read import Reading
from phalanx.formats.read.configuration import shown
from phalanx.formats.training.subject import subject
from phalanx.plan.explain.analytic import AnalyticSubject
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.planner import answer
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Train
from phalanx.spec.strategy.spec import Strategy, format_field
from phalanx.spec.strategy.stack_options import DEFAULTS, StackOptions
from phalanx.stacks.registry import ROWS, facts

GROUPS: tuple[tuple[str, ...], ...] = (
    ("tp", "sp"),
    ("cp", "ulysses", "context"),
    ("pp", "virtual", "schedule", "layers", *(f"{n}_stage_layers" for n in ("first", "last"))),
    ("embedding_as_layer", "loss_as_layer"),
    ("zero", "shard"),
    ("ep", "etp"),
    ("micro_batch",),
    ("recompute",),
    ("order",),
    ("cross_entropy",),
    ("tp_overlap",),
    ("dispatch",),
    ("overlap_experts",),
)
"""Fields that change together."""
_FREE = ("context", "cross_entropy", "tp_overlap", "dispatch", "overlap_experts")
"""Options that a search sets (plan/search/stack_options.py)."""
_WORTH = 0.002
"""Share of the step by which a change must shorten it."""


@dataclass(frozen=True)
class State:
    """A strategy with its options and price."""

    strategy: Strategy
    options: StackOptions
    seconds: float
    bytes_: float
    fits: bool
    mfu: float
    blocks: tuple[int, ...] = ()
    """Blocks of each chunk of its pipeline."""


@dataclass(frozen=True)
class Edit:
    """A setting to change: `old` and `new` as the framework writes them, "" where it is not written."""

    key: str
    old: str
    new: str


@dataclass(frozen=True)
class Change:
    """Fields that change together, the settings that write them, and what they bring."""

    fields: dict[str, tuple[str, str]]
    """Field -> (as the file has it, as it should be)."""
    edits: tuple[Edit, ...]
    alone: State | None
    """The file with this change alone; None where that is no legal strategy."""
    reason: str
    """Why it is none."""
    together: State
    """With all changes up to this one."""


@dataclass(frozen=True)
class Improvement:
    """A configuration's price, a better one's, and the changes between them; without changes it is the best."""

    now: State
    better: State
    changes: tuple[Change, ...]
    plan: Plan | None
    """Of the better one; None where there is none."""
    evaluated: int
    seconds: float
    """Time of the search."""
    refused: str = ""
    """Why the stack's row refuses what the file has; "" if it does not."""


def improve(reading: Reading, q: Question, headroom: float, cluster: str) -> Improvement:
    """Search the strategies of a configuration's stack and return what to change. Raises InputError."""
    assert q.strategy is not None
    own = q.pricing.extra
    wanted = q.pricing.wanted

    def pricing(count: int) -> Pricing:  # what a search may set is left to it
        free = StackOptions(**{n: v for n, v in own.changed().items() if n not in _FREE})
        return replace(q.pricing_on(count), extra=free, headroom=headroom, wanted=wanted)

    prices = _Prices(q, pricing)
    now = prices.of(q.strategy, own)
    searched = answer(pricing, q.gpus)
    s = searched.best.strategy
    options = _as_in_file(prices, s, searched.pricing.extra, own)
    words = _Settings(reading, q)
    better = _needed(prices, now, _written(prices, words, now, prices.of(s, options)))
    refusal = ROWS[q.stack].refusal(q.strategy, own, facts(q.pricing.model, q.pricing.job, q.strategy))
    refused = "" if refusal is None else f"{refusal.field} = {refusal.value} {refusal.reason} ({refusal.source})"
    if now.fits and not refused and better.seconds > (1 - _WORTH) * now.seconds:
        return Improvement(now, now, (), None, searched.evaluated, searched.seconds)
    steps = _steps(prices, now, better)
    changes, before = [], now
    for names, alone, reason, after in steps:
        changed = {n: (_value(before, n), _value(after, n)) for n in names if _value(before, n) != _value(after, n)}
        changes.append(Change(changed, words.edits(before, after, changed), alone, reason, after))
        before = after
    from phalanx.commands.priced_plan import plan_of

    best = replace(searched.pricing, extra=better.options)
    x = AnalyticSubject(lambda _: best, better.strategy, q.gpus)
    plan = plan_of(best, x.priced, x.run, x.mfu, cluster, q.precision)
    return Improvement(now, better, tuple(changes), plan, searched.evaluated, searched.seconds, refused)


class _Prices:
    """Prices of strategies with options, each computed once."""

    def __init__(self, q: Question, pricing: Callable[[int], Pricing]) -> None:
        self.q, self.pricing = q, pricing
        self.known: dict[tuple[Strategy, StackOptions], State | InputError] = {}

    def of(self, s: Strategy, options: StackOptions, legal: bool = False) -> State:
        """Return the price. Raises InputError for a strategy that is not legal; with `legal`, also for one that the
        stack refuses."""
        price_or_error = self.known.get((s, options))
        if price_or_error is None:
            try:
                price_or_error = self._priced(s, options)
            except InputError as error:
                price_or_error = error
            self.known[s, options] = price_or_error
        if isinstance(price_or_error, InputError):
            raise price_or_error
        if legal:
            p = self.q.pricing
            refusal = ROWS[self.q.stack].refusal(s, options, facts(p.model, p.job, s))
            if refusal is not None:
                raise refusal.error(self.q.stack)
        return price_or_error

    def _priced(self, s: Strategy, options: StackOptions) -> State:
        def on(count: int) -> Pricing:
            return replace(self.pricing(count), extra=options)

        x = AnalyticSubject(on, s, self.q.gpus)
        p = x.priced
        return State(s, options, p.seconds, p.bytes_, p.fits, x.mfu, x.run.blocks)


def _as_in_file(prices: _Prices, s: Strategy, searched_options: StackOptions, own: StackOptions) -> StackOptions:
    """Return the options of a search, with each that the file sets kept where another is no better."""
    for name in _FREE:
        kept = getattr(own, name)
        if kept != getattr(searched_options, name):
            other = StackOptions(**searched_options.changed() | {name: kept})
            try:
                there = prices.of(s, other, legal=True)
            except InputError:
                continue
            if there.fits and there.seconds <= (1 + _WORTH) * prices.of(s, searched_options).seconds:
                searched_options = other
    return searched_options


def _written(prices: _Prices, words: _Settings, now: State, better: State) -> State:
    """Return a better state without options that stand in a program's code, where a configuration cannot set them."""
    if words.of(now) is None:
        return better
    for name in _FREE:
        if words.of(better) is None and _value(now, name) != _value(better, name):
            with suppress(InputError):
                better = _with(prices, better, now, (name,))
    return better


def _needed(prices: _Prices, now: State, better: State) -> State:
    """Return a better state without the changes that bring less than is worth a line of configuration."""
    for names in GROUPS:
        if all(_value(now, n) == _value(better, n) for n in names):
            continue
        try:
            there = _with(prices, better, now, names)
        except InputError:
            continue
        if there.fits and there.seconds <= (1 + _WORTH / 2) * better.seconds:
            better = there
    return better


def _value(state: State, name: str) -> str:
    value = getattr(state.strategy, name) if hasattr(state.strategy, name) else getattr(state.options, name)
    return "all" if value is None else format_field(value)


def _steps(prices: _Prices, now: State, better: State) -> Iterator[tuple[tuple[str, ...], State | None, str, State]]:
    """Yield (fields, price of them alone, why there is none, price together) from one state to the other, whichever
    brings most first; what is legal only together is one step."""
    left = [g for g in GROUPS if any(_value(now, n) != _value(better, n) for n in g)]
    state = now
    while left:
        best = _best(prices, state, better, [(i,) for i in range(len(left))], left)
        if best is None or best[1].seconds > state.seconds:  # two that pay only together are one change
            pairs = [(i, j) for i in range(len(left)) for j in range(i)]
            pair = _best(prices, state, better, pairs, left)
            if pair is not None and (best is None or pair[1].seconds < min(state.seconds, best[1].seconds)):
                best = pair
        chosen, there = best or (tuple(range(len(left))), better)
        names = tuple(n for i in chosen for n in left[i])
        left = [g for i, g in enumerate(left) if i not in chosen]
        yield names, *_alone(prices, now, better, names), there if left else better
        state = there


def _best(
    prices: _Prices, state: State, better: State, tried: Sequence[tuple[int, ...]], left: Sequence[tuple[str, ...]]
) -> tuple[tuple[int, ...], State] | None:
    """Return the groups of `left`, of those tried, that bring most, and what they give; None where none is legal."""
    candidates = []
    for chosen in tried:
        try:
            there = _with(prices, state, better, tuple(n for i in chosen for n in left[i]))
        except InputError:
            continue
        candidates.append((not there.fits, there.seconds, chosen, there))
    return min(candidates, key=lambda f: f[:3])[2:] if candidates else None


def _alone(prices: _Prices, now: State, better: State, names: tuple[str, ...]) -> tuple[State | None, str]:
    try:
        return _with(prices, now, better, names), ""
    except InputError as error:
        return None, error.reason


def _with(prices: _Prices, state: State, better: State, names: tuple[str, ...]) -> State:
    """Return a state with some fields of a better one; dp takes the ranks that are left. Raises InputError."""
    table = {f.name: getattr(state.strategy, f.name) for f in fields(Strategy)}
    options = state.options.changed()
    for name in names:
        if name in table:
            table[name] = getattr(better.strategy, name)
        else:
            options = {n: v for n, v in options.items() if n != name} | {name: getattr(better.options, name)}
    inner = table["tp"] * table["cp"] * table["pp"]
    world = better.strategy.world
    if world % inner:
        raise InputError("strategy", None, f"{inner} ranks of tp x cp x pp do not divide {world}")
    table["dp"] = world // inner
    if table["shard"] and table["dp"] % table["shard"]:
        table["shard"] = None
    table["sp"] = table["sp"] and table["tp"] > 1
    if table["pp"] == 1:
        table |= {"virtual": 1, "schedule": "1f1b", "layers": "auto"}
    elif names and "pp" in names and "layers" not in names:
        table["layers"] = "auto"
    clean = StackOptions(**{n: v for n, v in options.items() if v != DEFAULTS[n]})
    return prices.of(Strategy(**table), clean, legal=True)


class _Settings:
    """The settings of a framework for a strategy, spelt as a file spells them."""

    def __init__(self, reading: Reading, q: Question) -> None:
        self.q, self.c = q, reading.configuration
        self.target = next((t for t in TARGETS.values() if q.stack in t.stacks), None)
        self.own: dict[str, tuple[str, str]] = {}
        """Plain name of a key -> (the key as in the file, its value)."""
        self.first: dict[str, str] = {}
        """The settings of the file's own strategy."""
        for path, value in _leaves(reading.config):
            self.own.setdefault(_plain(path), (shown(path), _text(value)))

    def of(self, x: State) -> dict[str, str] | None:
        """Return every setting of a strategy; None where the stack has no export, or cannot express it."""
        if self.target is None:
            return None
        p = self.q.pricing
        choices = {"precision": self.q.precision, "chunks": {"blocks": list(x.blocks)}}
        plan = Plan(p.model, p.cluster, p.job, x.strategy, Train(), choices, {}, x.options)
        try:
            program = self.target.program(subject(plan, ROWS[self.q.stack]))
        except InputError:
            return None
        settings = {setting.key: _text(setting.value) for g in program.groups for setting in g.settings}
        given = program.files.get("training_arguments.json")
        more = json.loads(given) if given and self.c.kind != "deepspeed" else {}  # which has its own of these
        return settings | {name: _text(value) for name, value in more.items() if name not in settings}

    def edits(self, before: State, after: State, changed: Mapping[str, Any]) -> tuple[Edit, ...]:
        """Return the settings that differ between two states; by fields where they cannot be written."""
        old, new = self.of(before), self.of(after)
        if new is None:
            entries = {**ROWS[self.q.stack].strategy, **ROWS[self.q.stack].options}
            return tuple(Edit(entries[n].written or n, a, b) for n, (a, b) in changed.items() if n in entries)
        old = old or {}
        self.first = self.first or old
        result = []
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) == new.get(key):
                continue
            name, own = self.own.get(_plain(key), (key.lstrip("-"), ""))
            if own == "auto" or (not own and key not in new):  # follows another setting; is not in the file
                continue
            spelt = f"--{name}" if key.startswith("--") else name
            result.append(Edit(spelt, self.now(key, own, old), new.get(key, "")))
        result += self._left_over(old, new, changed)
        return tuple(result)

    def now(self, key: str, own: str, old: Mapping[str, str]) -> str:
        """Return a setting as the file has it, or as an earlier change left it."""
        before = self.first.get(key)
        return own if before is None or before == old.get(key) else old.get(key, "")

    def _left_over(
        self, old: Mapping[str, str], new: Mapping[str, str], changed: Mapping[str, Any]
    ) -> Iterator[Edit]:
        """Yield settings of the file that say a changed field in words that the export has not."""
        written = {_plain(key) for key in (*old, *new)}
        for path, meaning in self.c.understood.items():
            table, _, name = meaning.partition(".")
            if table in ("strategy", "options") and name in changed and _plain(path) not in written:
                key, value = self.own.get(_plain(path), (shown(path), ""))
                if value not in ("", "auto"):
                    yield Edit(f"--{key}" if path.startswith("args.") else key, value, "")


def _plain(key: str) -> str:
    """Return a key's last part in one spelling."""
    return key.lstrip("-").rpartition(".")[2].replace("-", "_")


def _text(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) if not any(isinstance(v, list | dict) for v in value) else json.dumps(value)
    return format_field(value) if isinstance(value, float) else str(value)


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def as_json(x: Improvement) -> dict[str, Any]:
    """Return the result as `phalanx plan --from --json` prints it."""

    def state(s: State | None) -> dict[str, Any] | None:
        if s is None:
            return None
        return {
            "strategy": str(s.strategy),
            "options": s.options.changed(),
            "step_time_s": s.seconds,
            "memory_bytes": int(s.bytes_),
            "fits": s.fits,
            "mfu": s.mfu,
        }

    return {
        "now": state(x.now) | {"refused": x.refused or None},  # type: ignore[operator]
        "better": state(x.better) if x.changes else None,
        "changes": [
            {
                "fields": {name: list(pair) for name, pair in c.fields.items()},
                "settings": [asdict(e) for e in c.edits],
                "alone": state(c.alone),
                "alone_refused": c.reason or None,
                "together": state(c.together),
            }
            for c in x.changes
        ],
        "strategies_evaluated": x.evaluated,
        "seconds": x.seconds,
    }
