"""Several loads of one question: the answer of lines that run a benchmark more than once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.answers.answer import DRAWN, Answer
from phalanx.serving.answer import as_request
from phalanx.serving.cost.checkpoint import checkpoint_assumption
from phalanx.serving.likely import LikelyRange, likely, slowed
from phalanx.serving.lines.reading import STOPS, LinesRead
from phalanx.serving.question import ask
from phalanx.serving.search.answering import answer
from phalanx.serving.search.question import load_words
from phalanx.serving.search.search import Search
from phalanx.serving.starting import not_starting
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class LoadAnswer:
    """What a deployment does under a load; times in seconds."""

    load: str
    """How requests come."""
    input: int
    """Mean tokens of a prompt."""
    output: int
    """Mean generated tokens."""
    deployment: str = ""
    tokens_per_s: float | None = None
    requests_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None
    latency_p50_s: float | None = None
    likely: tuple[LikelyRange, ...] = ()
    """Likely ranges of these figures."""
    refused: str = ""
    """Why there is no answer; empty: there is one."""


@dataclass(frozen=True)
class ServingSweep(Answer):
    """The answers of several loads."""

    model: str
    cluster: str
    engine: str
    gpus: int
    title: str
    """Engine and GPUs, in words."""
    loads: tuple[LoadAnswer, ...]
    caveats: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), repr=False, metadata=DRAWN)

    @property
    def passed(self) -> bool:
        """Whether the server of the command lines starts."""
        return not any(caveat.startswith(STOPS) for caveat in self.caveats)


def serve_loads(lines: LinesRead) -> ServingSweep:
    """Answer each load of lines. Raises InputError for a model, cluster or layout that cannot be asked for."""
    caveats: dict[str, None] = {}
    notes = dict.fromkeys(lines.notes)
    answers = [_answer(fields, lines, caveats, notes) for fields in lines.sweep]
    answers += [_answer(fields, lines, caveats, notes) for fields in _between(lines, answers)]
    query = ask(as_request(lines.fields))
    q = query.question
    every = (*caveats, *(caveat for caveat in lines.caveats if caveat not in caveats))
    return ServingSweep(
        query.model_name,
        query.cluster_name,
        q.engine.name,
        q.gpus,
        f"{q.engine.title} on {q.gpus} x {q.cluster.device.name}",
        tuple(answers),
        every,
        tuple(notes),
    )


def _between(lines: LinesRead, answers: list[LoadAnswer]) -> Iterator[dict[str, Any]]:
    """Yield the fields of the rates that a sweep tries from those at which its first two loads are answered."""
    first, second = (each.requests_per_s for each in answers[:2]) if lines.rates else (None, None)
    if first is None or second is None:
        return
    fields = {name: value for name, value in lines.fields.items() if name not in ("concurrency", "requests")}
    for rate in np.linspace(first, second, lines.rates + 1)[1:]:
        yield fields | {"rate": float(rate)}


def _answer(
    fields: Mapping[str, Any], lines: LinesRead, caveats: dict[str, None], notes: dict[str, None]
) -> LoadAnswer:
    """Answer a load; adds its caveats and notes. Raises InputError for what is not of this load alone."""
    query = ask(as_request(fields))
    search = Search(query.question, query.layout)
    try:
        searched = answer(search)
    except InputError as error:
        q = query.question
        return LoadAnswer(load_words(q, q.concurrency), q.input, q.output, refused=error.reason)
    q, best = searched.question, searched.best
    workers, o = best.groups[-1], best.outcome
    assert o is not None
    taken = checkpoint_assumption(q.model, query.model_name, best.weights)
    stopped = not_starting(lines, search.copy_of(best.weights, workers.layout))
    caveats |= dict.fromkeys((*stopped, *query.caveats, *([taken] if taken else ())))
    notes |= dict.fromkeys(query.notes)
    return LoadAnswer(
        load_words(q, best.users),
        q.input,
        q.output,
        best.title,
        o.tokens_per_s,
        o.requests_per_s,
        o.ttft.p50,
        o.ttft.p99,
        o.tpot.p50,
        o.tpot.p99,
        o.latency.p50,
        likely(q, best, slowed(q, best, search.copy_of))[0],
    )
