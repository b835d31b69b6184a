"""A question with one thing changed: another stack, fewer GPUs, without some of its conditions.

Stacks: the best strategy and its step time on every stack that has a row. Rows that differ only in options, such as
two releases, share the first pass of a search, which sets no options; so does a row that refuses more, unless it
refuses the best. The groups are searched in parallel processes.

Fewer GPUs: they take fewer GPU-hours, since they wait less, but more days.

Conditions: the step time with them over the time without, for all together and for each one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_all_start_methods, get_context
from typing import Any

from phalanx.frameworks.registry import DOCUMENTED, facts
from phalanx.frameworks.stack import OPERATORS, Stack
from phalanx.planning.search import space
from phalanx.planning.search.branch_and_bound import Exploration
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions_without, steps_alone
from phalanx.planning.search.no_answer import lacks_operators
from phalanx.planning.search.planner import FOR_OPTIONS, best_of, best_on, fastest_rows, first_pass
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import best_of_each_family
from phalanx.spec.errors import InputError
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.strategy import where
from phalanx.spec.strategy.spec import Strategy

_WORKERS = 4
"""Maximum processes: more would idle while the longest search runs."""
_HARMLESS = ("signs of life",)
"""Threads that a fork may lose, since a search does not need them."""


@dataclass(frozen=True)
class StackAnswer:
    """A stack's best strategy, its step in seconds and its MFU; or why it has none."""

    name: str
    best: PricedStrategy | None = None
    seconds: float = float("inf")
    mfu: float = 0.0
    reason: str = ""

    @property
    def row(self) -> Stack:
        """The stack's facts."""
        return DOCUMENTED[self.name]


def compare(pricing: Callable[[str], Pricing], gpus: int) -> list[StackAnswer]:
    """Return every stack's best strategy on `gpus` GPUs, the fastest first. `pricing`: the question under a stack."""
    groups: list[list[str]] = []
    model = pricing(next(iter(DOCUMENTED))).model
    operators = {name: count for name, count in facts(model).items() if name in OPERATORS}
    for name, row in DOCUMENTED.items():
        same = next((g for g in groups if _share_first_pass(DOCUMENTED[g[0]], row, operators)), None)
        groups.append([name]) if same is None else same.append(name)
    questions = [[replace(pricing(name), stack=name) for name in group] for group in groups]
    answers_by_stack = [answer for answers in _group_answers(questions, gpus) for answer in answers]
    return sorted(answers_by_stack, key=lambda f: (f.seconds, list(DOCUMENTED).index(f.name)))


def _group_answers(questions: list[list[Pricing]], gpus: int) -> Iterator[list[StackAnswer]]:
    """Yield the answers of each group, in any order; searched in processes, unless this one has other threads, which
    a fork would lose."""
    workers = min(_WORKERS, os.cpu_count() or 1)
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and t.name not in _HARMLESS]
    if workers == 1 or others or "fork" not in get_all_start_methods():
        yield from (_search_group(group, gpus) for group in questions)
        return
    # The longest first, lest one worker be left alone with it at the end.
    order = sorted(range(len(questions)), key=lambda i: _cores(questions[i][0], gpus), reverse=True)
    with ProcessPoolExecutor(workers, get_context("fork"), _inherit, (questions, gpus)) as pool:
        try:
            yield from pool.map(_search_inherited, order)
        except BaseException:  # Ctrl-C above all: stop the searches at once
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.kill()
            raise


def _cores(pricing: Pricing, gpus: int) -> int:
    """Return the number of cores (degrees and micro-batches) from which a search starts."""
    try:
        return len(space.cores(pricing.model, pricing.job, gpus, pricing.options))
    except InputError:
        return 0


_INHERITED: list[tuple[list[list[Pricing]], int]] = []
"""In a worker: the questions inherited by fork, since their conditions are functions, which cannot be pickled."""


def _inherit(questions: list[list[Pricing]], gpus: int) -> None:
    """Keep the questions in a new worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    _INHERITED[:] = [(questions, gpus)]


def _search_inherited(index: int) -> list[StackAnswer]:
    questions, gpus = _INHERITED[0]
    return _search_group(questions[index], gpus)


def _share_first_pass(one: Stack, other: Stack, operators: Mapping[str, Any]) -> bool:
    """Whether two rows may share the first pass of a search: `other` may differ in options, and refuse more.
    `operators`: the number of the model's blocks with each."""

    def refused(row: Stack) -> set[str]:
        """Return the rules that may apply to a model with these operators."""
        kept = ((r, [c for c in each if c.fields <= operators.keys()]) for r, each in row.conditions)
        return {rule.when for rule, of_model in kept if where.holds(of_model, operators)}

    return (
        one.constants == other.constants
        and one.modules == other.modules
        and all(other.strategy[field].values == entry.values for field, entry in one.strategy.items())
        and refused(one) <= refused(other)
    )


def _search_group(group: list[Pricing], gpus: int) -> list[StackAnswer]:
    """Return the answers of a group of compatible rows: one first pass for all, then each one's options."""
    rows = [DOCUMENTED[p.stack] for p in group]
    lacking = [_lacking(row, p) for row, p in zip(rows, group, strict=True)]
    first = next((p for p, reason in zip(group, lacking, strict=True) if not reason), None)
    try:
        explored = None if first is None else first_pass(first, gpus)
    except InputError as error:
        return [
            StackAnswer(row.name, reason=reason or error.reason) for row, reason in zip(rows, lacking, strict=True)
        ]
    answers = []
    for row, p, reason in zip(rows, group, lacking, strict=True):
        if reason or explored is None:
            answers.append(
                StackAnswer(row.name, reason=reason or "nothing fits, or nothing is within the conditions")
            )
        else:
            own = explored if p is first or _runs_best(p, explored) else first_pass(p, gpus)
            best = None if own is None else best_of(p, own)
            answers.append(
                StackAnswer(row.name, reason="nothing that it runs fits")
                if best is None
                else StackAnswer(row.name, best.priced, best.seconds, best.mfu)
            )
    return answers


def _runs_best(p: Pricing, explored: Exploration) -> bool:
    """Whether a row can run the best strategies of another row's first pass, with which the second pass starts."""
    rows = [*fastest_rows(explored, FOR_OPTIONS), *best_of_each_family(explored)]
    strategies = [*(explored.rows.strategy(int(row)) for row in rows), *explored.close]
    return all(p.options.allows(s, s.accumulation(p.job)) for s in strategies)


def _lacking(row: Stack, pricing: Pricing) -> str:
    """Return the first option or operator of a question that a row lacks; "" if it has all. The precision of products
    counts as an option if the row lists its precisions."""
    kind, products = pricing.number_format, row.options.get("products")
    narrow = NUMBER_FORMATS[kind].narrow
    if narrow and pricing.extra.products == "auto" and products is not None and not products.allows(kind):
        return f"has no products={kind}"
    for option, value in pricing.extra.changed().items():
        if option not in row.options or not row.options[option].allows(value):
            return f"has no {option}={value}"
    refusal = lacks_operators(pricing)
    return "" if refusal is None else refusal.reason


@dataclass(frozen=True)
class Offer:
    """The fastest strategy on a number of GPUs."""

    gpus: int
    strategy: Strategy
    seconds: float
    """Seconds of a step."""

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of a step."""
        return self.gpus * self.seconds


def offers(larger: Callable[[int], Pricing], most: int) -> list[Offer]:
    """Return the offers for `most` GPUs, a half, a quarter, ... if anything fits: the fastest first, each cheaper
    than all before it."""
    offered: list[Offer] = []
    n = most
    while n:
        best = best_on(larger(n), n)
        if best is not None:
            offered.append(Offer(n, best.strategy, best.seconds))
        n //= 2
    front: list[Offer] = []
    for offer in sorted(offered, key=lambda o: (o.seconds, o.gpus)):
        if not front or offer.gpu_seconds < front[-1].gpu_seconds:
            front.append(offer)
    return front


_PATIENCE_S = 4.0
"""Seconds after which no further condition is left out separately."""


@dataclass(frozen=True)
class ConditionCost:
    """The cost of some conditions. `share`: the step time with them over the time without, minus 1; None if nothing
    fits without them either, or time ran out."""

    text: str
    share: float | None
    without: Strategy | None = None
    """The best strategy without them."""
    seconds: float | None = None
    """Its step time, seconds."""


def condition_costs(
    larger: Callable[[int], Pricing], gpus: int, seconds: float
) -> tuple[ConditionCost, tuple[ConditionCost, ...]]:
    """Return the cost of all conditions of a question with a best step of `seconds`, and of each on top of the
    others."""
    pricing = larger(gpus)
    texts = list(dict.fromkeys(c.text for c in pricing.wanted))
    start = time.perf_counter()
    whole = _cost(replace(pricing, wanted=()), gpus, ", ".join(texts), seconds)
    each = []
    for text in texts if len(texts) > 1 else ():
        if time.perf_counter() - start > _PATIENCE_S:
            each.append(ConditionCost(text, None))
            continue
        each.append(_cost(replace(pricing, wanted=conditions_without(pricing.wanted, text)), gpus, text, seconds))
    return whole, tuple(each)


def _cost(pricing: Pricing, gpus: int, text: str, seconds: float) -> ConditionCost:
    """Return the cost of the conditions `text`, without which the question is `pricing`."""
    best = best_on(pricing, gpus)
    if best is None:
        return ConditionCost(text, None)
    share = seconds / best.seconds - 1
    alone = "local" in text and not steps_alone(pricing.wanted)  # another training, which may well be faster
    return ConditionCost(text, share if alone else max(share, 0.0), best.strategy, best.seconds)
