"""The questions of a search: its conditions, from the strategy's line and `where`, and what is tried next where
nothing fits."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from phalanx.answers.question.query import Query
from phalanx.answers.question.question import Question
from phalanx.answers.question.resolution import read
from phalanx.answers.question.strategy_line import fixed_conditions
from phalanx.frameworks.registry import DOCUMENTED, STACKS, row_of
from phalanx.spec.errors import InputError

T = TypeVar("T")


def search_of(query: Query, any_stack: bool = False) -> Question:
    """Resolve a query whose strategy is searched: the fields that its strategy names become conditions. Raises
    InputError."""
    return read(
        replace(query, strategy=None, where=_stated_conditions(query) or None), searched=True, any_stack=any_stack
    )


def searches_of(query: Query, stack: str, layout: object = None) -> Iterator[Question]:
    """Yield the questions of a search, each for jobs that do not fit under those before it. Raises InputError.

    First: degrees that only a program's code can set are 1, unless the query names them or the file's `layout` has
    more. Then, where the stack has the option: with gradients accumulated in shards; if there is a file, with the
    optimizer's state on the host, where a key moves it alone, and the parameters too. Last: with any degrees."""
    stated, row = _stated_conditions(query), row_of(stack) if stack in STACKS else None
    degrees = [n for n in (row.fields_in_code if row else ()) if getattr(layout, n, None) in (None, 1)]
    coded = [f"{n}=1" for n in degrees if not re.search(rf"\b{n}\b", stated)]
    limited, degrees_at_1 = ", ".join(filter(None, (stated, *coded))), ", ".join(coded)
    named, has = f"{stated} {query.options}", row.options if row else {}
    notes = {limited: ""}
    if coded:
        only = f"only a program's code sets more, no configuration of {stack}"
        notes[limited] = f"{degrees_at_1}: {only}; --where names them"
        if "accumulate" in has and "accumulate" not in named:
            shards = f"{degrees_at_1}, accumulate=sharded"
            notes[f"{limited}, accumulate=sharded"] = f"{shards}: whole gradients of several micro-batches do not fit"
    if layout is not None and has.keys() >= _OFFLOADS and not any(name in named for name in _OFFLOADS):
        both = "" if stack in DOCUMENTED else ", zero=3"  # which a documented stack's rules ask for
        alone = ["optimizer_offload=1"] if len({has[name].written for name in _OFFLOADS}) > 1 else []
        for line in (*alone, f"optimizer_offload=1, parameter_offload=1{both}"):
            notes[", ".join(filter(None, (limited, line)))] = f"{line}: nothing fits without"
    notes.setdefault(
        stated, f"no answer with {degrees_at_1}: more is set by a program's code, by no configuration of {stack}"
    )
    for where, note in notes.items():
        question = read(replace(query, strategy=None, where=where or None), searched=layout is None)
        yield replace(question, notes=(*question.notes, note)) if note else question


_OFFLOADS = {"optimizer_offload", "parameter_offload"}
"""Options that leave a device the least state."""


def first_answer(questions: Iterable[Question], answer: Callable[[Question], T], of_first: bool = False) -> T:
    """Return the answer to the first question that has one. Raises the last question's InputError, or with `of_first`
    the first one's."""
    errors = []
    for question in questions:
        try:
            return answer(question)
        except InputError as refused:
            errors.append(refused)
    raise errors[0 if of_first else -1]


def _stated_conditions(query: Query) -> str:
    return ", ".join(filter(None, (fixed_conditions(query.strategy), query.where)))
