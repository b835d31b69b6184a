"""What `phalanx plan --from FILE` does: a faster strategy under the file's own stack, and the settings to change.

    change     fields that belong together (tp with sp; pp with its schedule), as the file has them and better
    alone      the file with this change and no other; dp takes the ranks that are left
    together   with every change before it in the list, which begins with the one that brings most

Settings are those that `phalanx export` would write, spelt as the file spells them. Options that change a result or a
number type stay as the file has them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from phalanx.answers.answer import DRAWN, Answer
from phalanx.answers.configurations.file_settings import FileSettings, FileState
from phalanx.answers.expenses import expense, rates_of, training_of
from phalanx.answers.plan import plan_of
from phalanx.answers.question.query import Query
from phalanx.answers.question.question import Premises, Question
from phalanx.answers.question.read import Reading, is_configuration
from phalanx.answers.question.read import read as configuration
from phalanx.answers.question.searches import first_answer, searches_of
from phalanx.frameworks.registry import facts, row_of
from phalanx.frameworks.writing.source_file import Edit, file_entry
from phalanx.planning.expense.expense import Expense
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.search import HEADROOM
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.planner import answer
from phalanx.planning.search.stack_options import SEARCHED_OPTIONS
from phalanx.planning.training_cost import TrainingCost
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.strategy.spec import Strategy, format_field
from phalanx.spec.strategy.stack_options import DEFAULTS, StackOptions

_CONDITIONAL_OPTIONS = ("accumulate", "optimizer_offload", "parameter_offload")
"""Options that a condition may set for the search alone."""
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
    ("dp_overlap",),
    ("dispatch",),
    ("overlap_experts",),
    ("accumulate",),
    _CONDITIONAL_OPTIONS[1:],
)
"""Fields that change together."""
_WORTH = 0.002
"""Share of the step by which a change must shorten it."""


@dataclass(frozen=True)
class PricedState:
    """A strategy with its price, before or after a change."""

    strategy: Strategy
    options: StackOptions
    step_time_s: float
    memory_bytes: float
    fits: bool
    mfu: float
    training: TrainingCost | None = None
    """Of all its tokens; None where nothing says how many these are."""
    expense: Expense | None = None
    """For the whole training."""


@dataclass(frozen=True)
class Change:
    """Fields that change together, the settings that write them, and what they bring."""

    fields: Mapping[str, tuple[str, str]]
    """Field -> (as the file has it, as it should be)."""
    settings: tuple[Edit, ...]
    alone: PricedState | None
    """The file with this change alone; None where that is no legal strategy."""
    alone_refused: str
    """Why that is illegal; "" where it is legal."""
    together: PricedState
    """With all changes up to this one."""


@dataclass(frozen=True)
class Improvement(Answer):
    """A configuration's price, the price of a better one, and the changes between them: none where it is the best."""

    question: Premises
    now: PricedState
    refused: str
    """Why the stack's facts refuse what the file has; "" if they do not."""
    better: PricedState | None
    changes: tuple[Change, ...]
    strategies_evaluated: int
    search_s: float
    notes: tuple[str, ...]
    rates: ExpenseRates
    """Prices of a GPU-hour, of energy and of carbon, with their sources."""
    plan: Plan | None = field(default=None, repr=False, compare=False, metadata=DRAWN)
    """The better configuration as a plan; None where there is none."""


def improvement_of(
    source: Path, query: Query, headroom: float = HEADROOM, tokens: str | None = None, rates: str | None = None
) -> Improvement:
    """Find what to change in another framework's configuration. `tokens`: number for the whole training, else the
    file's; `rates`: the user's prices (planning/expense). Raises InputError."""
    if source.exists() and not is_configuration(source):
        configuration([source, *query.files])  # says why it cannot be read
        raise InputError(
            "from", str(source), "is not a configuration of a known framework", "phalanx read lists them"
        )
    reading = configuration([source, *query.files], None, query.gpus)
    stack = reading.configuration.stack
    if query.stack not in (None, stack):
        remedy = f"phalanx plan --model ... --stack {query.stack} plans the same job for it"
        raise InputError("stack", query.stack, f"{source} is a configuration of {stack}", remedy)
    where = ", ".join(filter(None, (query.where, reading.configuration.within))) or None
    query = replace(query, source=source, stack=None, where=where)
    questions = searches_of(query, stack, reading.configuration.layout)
    return first_answer(questions, lambda q: improve(reading, q, headroom, query.cluster or "", tokens, rates), True)


def improve(
    reading: Reading,
    q: Question,
    headroom: float,
    cluster: str | ClusterSpec,
    tokens: str | None = None,
    line: str | None = None,
) -> Improvement:
    """Search the strategies of a configuration's stack and return what to change. Raises InputError."""
    assert q.strategy is not None
    asked, wanted = q.pricing.extra, q.pricing.wanted
    own = {name: reading.configuration.options.get(name, DEFAULTS[name]) for name in _CONDITIONAL_OPTIONS}
    in_file = StackOptions(**asked.changed() | own)

    def pricing(count: int) -> Pricing:  # what a search may set is left to it
        free = StackOptions(**{n: v for n, v in asked.changed().items() if n not in SEARCHED_OPTIONS})
        return replace(q.pricing_on(count), extra=free, headroom=headroom, wanted=wanted)

    rates = rates_of(q, line)
    prices = _Prices(q, pricing)
    now = prices.price(q.strategy, in_file)
    searched = answer(pricing, q.gpus)
    s = searched.best.strategy
    options = _as_in_file(prices, s, searched.pricing.extra, in_file)
    file = FileSettings(reading, q)
    target = _without_small_gains(prices, now, _writable(prices, file, now, prices.price(s, options)))
    refusal = row_of(q.stack).refusal(q.strategy, in_file, facts(q.pricing.model, q.pricing.job, q.strategy))
    refused = "" if refusal is None else f"{refusal.field} = {refusal.value} {refusal.reason} ({refusal.source})"
    step_tokens = q.pricing.job.global_batch * q.pricing.job.seq

    def whole(x: FileState) -> PricedState:
        training = training_of(q, step_tokens, x.seconds, tokens)
        cost = None if training is None else expense(q, step_tokens / x.seconds, rates, training)
        return replace(_state(x), training=training, expense=cost)

    result = Improvement(
        q.premises, whole(now), refused, None, (), searched.evaluated, searched.seconds, q.notes, rates
    )
    if now.fits and not refused and target.seconds > (1 - _WORTH) * now.seconds:
        return result
    steps = _steps(prices, now, target)
    changes, before = [], now
    for names, alone, reason, after in steps:
        changed = {n: (_value(before, n), _value(after, n)) for n in names if _value(before, n) != _value(after, n)}
        edits = file.edits(before, after, changed)
        changes.append(Change(changed, edits, None if alone is None else _state(alone), reason, _state(after)))
        before = after
    if reading.layout.ep not in (None, now.strategy.ep) and changes and "ep" not in changes[0].fields:
        changes[0] = replace(changes[0], settings=(*file.resized(target), *changes[0].settings))
    best = replace(searched.pricing, extra=target.options)
    x = AnalyticSubject(lambda _: best, target.strategy, q.gpus)
    plan = plan_of(best, x.priced, x.run, x.mfu, cluster, q.precision)
    everything = {n: (_value(now, n), _value(target, n)) for c in changes for n in c.fields}
    edits = file.edits(now, replace(target, blocks=x.run.blocks), everything)
    if reading.layout.ep not in (None, target.strategy.ep):
        edits = tuple(dict.fromkeys((*file.resized(target), *edits)))
    plan.choices["source"] = file_entry(reading.title, reading.configuration.kind, reading.config, edits)
    return replace(result, better=whole(target), changes=tuple(changes), plan=plan)


def _state(s: FileState) -> PricedState:
    return PricedState(s.strategy, s.options, s.seconds, s.bytes_, s.fits, s.mfu)


class _Prices:
    """Prices of strategies with options, each computed once."""

    def __init__(self, q: Question, pricing: Callable[[int], Pricing]) -> None:
        self.q, self.pricing = q, pricing
        self.known: dict[tuple[Strategy, StackOptions], FileState | InputError] = {}

    def price(self, s: Strategy, options: StackOptions, legal: bool = False) -> FileState:
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
            refusal = row_of(self.q.stack).refusal(s, options, facts(p.model, p.job, s))
            if refusal is not None:
                raise refusal.error(self.q.stack)
        return price_or_error

    def _priced(self, s: Strategy, options: StackOptions) -> FileState:
        def on(count: int) -> Pricing:
            return replace(self.pricing(count), extra=options)

        x = AnalyticSubject(on, s, self.q.gpus)
        p = x.priced
        return FileState(s, options, p.seconds, p.bytes_, p.fits, x.mfu, x.run.blocks)


def _as_in_file(prices: _Prices, s: Strategy, searched_options: StackOptions, own: StackOptions) -> StackOptions:
    """Return the options of a search, with the file's (`own`) wherever the search's are no better."""
    for name in SEARCHED_OPTIONS:
        kept = getattr(own, name)
        if kept != getattr(searched_options, name):
            other = StackOptions(**searched_options.changed() | {name: kept})
            try:
                there = prices.price(s, other, legal=True)
            except InputError:
                continue
            if there.fits and there.seconds <= (1 + _WORTH) * prices.price(s, searched_options).seconds:
                searched_options = other
    return searched_options


def _writable(prices: _Prices, file: FileSettings, now: FileState, target: FileState) -> FileState:
    """Return a better state without the options that a configuration cannot set, because the program's code does."""
    if file.settings(now) is None:
        return target
    for name in SEARCHED_OPTIONS:
        if file.settings(target) is None and _value(now, name) != _value(target, name):
            with suppress(InputError):
                target = _with_fields(prices, target, now, (name,))
    return target


def _without_small_gains(prices: _Prices, now: FileState, target: FileState) -> FileState:
    """Return a better state without the changes that gain too little to be worth a line of configuration."""
    for names in GROUPS:
        if all(_value(now, n) == _value(target, n) for n in names):
            continue
        if "zero" in names and target.strategy.dp * target.strategy.cp == 1:  # there is nothing to shard over
            continue
        try:
            there = _with_fields(prices, target, now, names)
        except InputError:
            continue
        if there.fits and there.seconds <= (1 + _WORTH / 2) * target.seconds:
            target = there
    return target


def _value(state: FileState, name: str) -> str:
    value = getattr(state.strategy, name) if hasattr(state.strategy, name) else getattr(state.options, name)
    return "all" if value is None else format_field(value)


def _steps(
    prices: _Prices, now: FileState, target: FileState
) -> Iterator[tuple[tuple[str, ...], FileState | None, str, FileState]]:
    """Yield (fields, state with them alone, why there is none, state with all changes so far) from one state to the
    other, the largest gain first. Fields that are legal only together are one step; what gains little comes last."""
    along = {n for n, other in prices.q.followed.items() if _value(target, n) == _value(target, other)}
    left = [g for g in GROUPS if any(_value(now, n) != _value(target, n) for n in g if n not in along)]
    if target.strategy.dp * target.strategy.cp == 1:  # there is nothing to shard over
        left = [g for g in left if "zero" not in g]
    elif target.strategy.zero == prices.q.void_zero:  # as the file says already
        left = [g for g in left if "zero" not in g or target.strategy.shard is not None]
    state = now
    while left:
        best = _best(prices, state, target, [(i,) for i in range(len(left))], left)
        if best is None or best[1].seconds > state.seconds:  # two that pay only together are one change
            pairs = [(i, j) for i in range(len(left)) for j in range(i)]
            pair = _best(prices, state, target, pairs, left)
            if pair is not None and (best is None or pair[1].seconds < min(state.seconds, best[1].seconds)):
                best = pair
        chosen, there = best or (tuple(range(len(left))), target)
        names = tuple(n for i in chosen for n in left[i])
        left = [g for i, g in enumerate(left) if i not in chosen]
        yield names, *_alone(prices, now, target, names), there if left else target
        state = there


def _best(
    prices: _Prices,
    state: FileState,
    target: FileState,
    tried: Sequence[tuple[int, ...]],
    left: Sequence[tuple[str, ...]],
) -> tuple[tuple[int, ...], FileState] | None:
    """Return the combination of groups in `left`, among those tried, that gains most, and the state with it; None
    where none is legal."""
    candidates = []
    for chosen in tried:
        try:
            there = _with_fields(prices, state, target, tuple(n for i in chosen for n in left[i]))
        except InputError:
            continue
        little = there.fits is state.fits and abs(there.seconds - state.seconds) < _WORTH * state.seconds
        candidates.append((little, not there.fits, there.seconds, chosen, there))
    return min(candidates, key=lambda f: f[:4])[3:] if candidates else None


def _alone(
    prices: _Prices, now: FileState, target: FileState, names: tuple[str, ...]
) -> tuple[FileState | None, str]:
    try:
        return _with_fields(prices, now, target, names), ""
    except InputError as error:
        return None, error.reason


def _with_fields(prices: _Prices, state: FileState, target: FileState, names: tuple[str, ...]) -> FileState:
    """Return a state with some fields of a better one; dp takes the ranks that are left. Raises InputError."""
    table = {f.name: getattr(state.strategy, f.name) for f in fields(Strategy)}
    options = state.options.changed()
    for name in names:
        if name in table:
            table[name] = getattr(target.strategy, name)
        else:
            options = {n: v for n, v in options.items() if n != name} | {name: getattr(target.options, name)}
    for name, other in prices.q.followed.items():
        source = (target if name in names else state).strategy
        if getattr(source, name) == getattr(source, other):
            table[name] = table[other]
    inner = table["tp"] * table["cp"] * table["pp"]
    world = target.strategy.world
    if world % inner:
        raise InputError("strategy", None, f"{inner} ranks of tp x cp x pp do not divide {world}")
    table["dp"] = world // inner
    if prices.q.void_zero is not None and "zero" not in names:
        table["zero"] = prices.q.void_zero
    if table["dp"] * table["cp"] == 1 and not StackOptions(**options).state_on_host:
        table |= {"zero": 0, "shard": None}
    if table["shard"] and table["dp"] % table["shard"]:
        table["shard"] = None
    table["sp"] = table["sp"] and table["tp"] > 1
    if table["pp"] == 1:
        table |= {"virtual": 1, "schedule": "1f1b", "layers": "auto"}
    elif "pp" in names and "layers" not in names:
        table["layers"] = "auto"
    clean = StackOptions(**{n: v for n, v in options.items() if v != DEFAULTS[n]})
    return prices.price(Strategy(**table), clean, legal=True)
