"""The same question under every stack that has a row: what each would run, and how long its step takes.

Rows that differ only in options, such as two releases, share the first pass of a search, which sets no options; so
does one that refuses more, unless it refuses the best. The groups are searched side by side in processes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_all_start_methods, get_context

from phalanx.frameworks.registry import DOCUMENTED
from phalanx.frameworks.stack import Stack
from phalanx.planning.search import space
from phalanx.planning.search.branch_and_bound import Exploration
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.planner import FOR_OPTIONS, best_of, fastest_rows, first_pass
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import best_of_each_family
from phalanx.spec.errors import InputError
from phalanx.spec.number_formats import NUMBER_FORMATS

_WORKERS = 4
"""Maximum processes: more would idle while the longest search runs."""
_HARMLESS = ("signs of life",)
"""Threads that a fork may lose, since a search does not need them."""


@dataclass(frozen=True)
class OfStack:
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


def compare(pricing: Callable[[str], Pricing], gpus: int) -> list[OfStack]:
    """Return every stack's best strategy on `gpus` GPUs, the fastest first. `pricing`: the question under a stack."""
    groups: list[list[str]] = []
    for name, row in DOCUMENTED.items():
        same = next((g for g in groups if _alike(DOCUMENTED[g[0]], row)), None)
        groups.append([name]) if same is None else same.append(name)
    questions = [[replace(pricing(name), stack=name) for name in group] for group in groups]
    answers_by_stack = [answer for answers in _each(questions, gpus) for answer in answers]
    return sorted(answers_by_stack, key=lambda f: (f.seconds, list(DOCUMENTED).index(f.name)))


def _each(questions: list[list[Pricing]], gpus: int) -> Iterator[list[OfStack]]:
    """Search each group's strategies, in any order: in processes where this one has no other threads, which a fork
    would lose."""
    workers = min(_WORKERS, os.cpu_count() or 1)
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and t.name not in _HARMLESS]
    if workers == 1 or others or "fork" not in get_all_start_methods():
        yield from (_of(group, gpus) for group in questions)
        return
    # The longest first, lest one worker be left alone with it at the end.
    order = sorted(range(len(questions)), key=lambda i: _cores(questions[i][0], gpus), reverse=True)
    with ProcessPoolExecutor(workers, get_context("fork"), _take, (questions, gpus)) as pool:
        try:
            yield from pool.map(_taken, order)
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


_GIVEN: list[tuple[list[list[Pricing]], int]] = []
"""In a worker: the questions inherited by fork, since their conditions are functions, which cannot be pickled."""


def _take(questions: list[list[Pricing]], gpus: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    _GIVEN[:] = [(questions, gpus)]


def _taken(index: int) -> list[OfStack]:
    questions, gpus = _GIVEN[0]
    return _of(questions[index], gpus)


def _alike(one: Stack, other: Stack) -> bool:
    """Whether two rows may share the first pass of a search: `other` may differ in options, and refuse more."""
    return (
        one.constants == other.constants
        and one.modules == other.modules
        and all(other.strategy[field].values == entry.values for field, entry in one.strategy.items())
        and {r.when for r in one.rules} <= {r.when for r in other.rules}
    )


def _of(group: list[Pricing], gpus: int) -> list[OfStack]:
    """Search once for a group of compatible rows, and set each one's options."""
    rows = [DOCUMENTED[p.stack] for p in group]
    lacking = [_lacking(row, p) for row, p in zip(rows, group, strict=True)]
    first = next((p for p, reason in zip(group, lacking, strict=True) if not reason), None)
    try:
        explored = None if first is None else first_pass(first, gpus)
    except InputError as error:
        return [OfStack(row.name, reason=reason or error.reason) for row, reason in zip(rows, lacking, strict=True)]
    answers = []
    for row, p, reason in zip(rows, group, lacking, strict=True):
        if reason or explored is None:
            answers.append(OfStack(row.name, reason=reason or "nothing fits, or nothing is within the conditions"))
        else:
            own = explored if p is first or _runs_best(p, explored) else first_pass(p, gpus)
            best = None if own is None else best_of(p, own)
            answers.append(
                OfStack(row.name, reason="nothing that it runs fits")
                if best is None
                else OfStack(row.name, best.priced, best.seconds, best.mfu)
            )
    return answers


def _runs_best(p: Pricing, explored: Exploration) -> bool:
    """Whether a row can run the start of the second pass: the best strategies of another row's first pass, with which
    options are tried."""
    rows = [*fastest_rows(explored, FOR_OPTIONS), *best_of_each_family(explored)]
    strategies = [*(explored.rows.strategy(int(row)) for row in rows), *explored.close]
    return all(p.options.allows(s, s.accumulation(p.job)) for s in strategies)


def _lacking(row: Stack, pricing: Pricing) -> str:
    """Return the first option of a question that a row lacks; "" if it has all. The precision of products counts as
    an option if the row lists its precisions."""
    kind, products = pricing.number_format, row.options.get("products")
    narrow = NUMBER_FORMATS[kind].narrow
    if narrow and pricing.extra.products == "auto" and products is not None and not products.allows(kind):
        return f"has no products={kind}"
    for option, value in pricing.extra.changed().items():
        if option not in row.options or not row.options[option].allows(value):
            return f"has no {option}={value}"
    return ""
