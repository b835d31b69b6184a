"""What differs between a predicted and a recorded step, and in which words."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from phalanx.cost.step.expand import expand
from phalanx.observation.diff import (
    PASSES,
    SLACK,
    SLACK_BYTES,
    Difference,
    RecordedMemory,
    differences,
    identical,
    largest_deviation,
    memory_differences,
    slack,
    unawaited_collectives,
)
from phalanx.observation.rank_classes import (
    END,
    SECOND_MICRO_BATCH,
    WANTED_STEP,
    MatchedRank,
    classes,
    observe_classes,
    peers_of,
)
from phalanx.observation.request import ObservationRequest
from phalanx.observation.steady_state import SteadyState
from phalanx.observation.unobservable import Unsteady
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.schedule.observation import ObservedEvent, RankObservation
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import MOST_RANKS, Strategy, parse

_SENT = [
    Event("collective", "all_reduce", "B", f"bucket.{n}", "dp", 4, dtype="float32", bytes=8 << n) for n in range(6)
]
_RUN = [Event("compute", "forward", "F", f"blocks.{n}", flops=10 + n) for n in range(3)]


def _replaced(events: list[Event], at: int) -> list[Event]:
    return [*events[:at], replace(events[at], bytes=1), *events[at + 1 :]]


@pytest.mark.parametrize("at", range(6))
def test_one_event_that_differs_is_named_with_those_around_it(at: int) -> None:
    other = replace(_SENT[at], bytes=1)
    alike = "all others are as predicted"
    for recorded, seen, cause in (
        ([*_SENT[:at], *_SENT[at + 1 :]], [*_SENT, None][at + 1], f"one is missing; {alike}"),
        ([*_SENT[:at], other, *_SENT[at:]], other, f"one too many is issued; {alike}"),
        (_replaced(_SENT, at), other, alike),
        (
            [*_replaced(_replaced(_SENT, at), 5), other],
            other,
            f"{6 - at} are predicted from here on, {7 - at} recorded",
        ),
    ):
        (found,) = differences(_SENT, recorded)
        named = "nothing" if seen is None else str(seen)
        assert (found.aspect, found.number, found.cause) == ("collectives over dp", at, cause)
        assert (found.predicted, found.recorded) == (str(_SENT[at]), named)
        text = [[*map(str, side), *["nothing"] * 7] for side in (_SENT, recorded)]
        window = range(max(0, at - 2), min(at + 3, max(6, len(recorded))))
        assert found.around == tuple((i, text[0][i], text[1][i]) for i in window)
        said = f"collectives over dp, event {at}: predicted {_SENT[at]}, recorded {named} ({cause})"
        assert str(found) == said
    (found,) = differences(_SENT[:at], [*_SENT[:at], other])
    assert (found.predicted, found.recorded, found.cause) == (
        "nothing",
        str(other),
        f"one too many is issued; {alike}",
    )


def test_each_aspect_has_its_first_difference_and_order_only_where_all_else_agrees() -> None:
    inner = [replace(e, axis="tp") for e in _SENT[:2]]
    step = [_SENT[0], _RUN[0], inner[0], _RUN[1], inner[1], _SENT[1]]

    def aspects(*places: int) -> list[str]:
        return [d.aspect for d in differences(step, [step[i] for i in places])]

    assert aspects(0, 1, 2, 3, 4, 5) == []
    assert aspects(1, 0, 2, 3, 4, 5) == ["order"]  # a bucket's against a pass
    assert aspects(0, 1, 3, 2, 4, 5) == ["order inside of layers"]
    assert aspects(0, 1, 2, 3, 5, 4) == []  # between which sub-layers a bucket is full is not said
    assert aspects(1, 0, 4, 3, 2, 5) == ["collectives over tp"]
    assert aspects(5, 1, 2, 3, 4, 0) == ["collectives over dp"]
    assert aspects(0, 3, 2, 1, 4, 5) == [PASSES]
    assert aspects(0, 2, 3, 4, 5) == [PASSES, "FLOPs of F blocks.0"]
    more = [replace(e, flops=12) if e is _RUN[1] else e for e in [*_RUN, replace(_RUN[2], unit="head")]]
    assert [str(d) for d in differences(_RUN, more)][1:] == [
        "FLOPs of F blocks.1: predicted 11, recorded 12",
        "FLOPs of F head: predicted none, recorded 12",
    ]


def test_what_depends_on_data_is_compared_only_exactly() -> None:
    bound = replace(_SENT[0], at_most=True)
    routed = replace(_RUN[0], routed=True)
    recorded = [replace(bound, bytes=bound.bytes - 1), replace(routed, flops=99)]
    assert not list(differences([bound, routed], recorded))
    found = [d.aspect for d in differences([bound, routed], recorded, identical)]
    assert found == ["collectives over dp", "FLOPs of F blocks.0"]


def test_collectives_that_nobody_awaits() -> None:
    assert not list(unawaited_collectives([]))
    for names, said in ((["a"], "none for a"), (["a", "b", "c"], "none for a, nor for 2 more")):
        assert list(unawaited_collectives(names)) == [Difference("waits", "for every collective", said)]


def test_live_bytes_are_compared_in_the_order_of_the_step() -> None:
    sizes = {"family": "llama", "layers": 2, "hidden": 64, "ffn": 128, "heads": 2, "vocab": 61, "max_seq": 16}
    model = build(ModelSpec, complete(sizes), "model")
    program = expand(Layout(model, Job(4, 8), Strategy(dp=2)).rank_view(0))
    state, most = program.state.total, slack(program)
    assert most == SLACK_BYTES + program.state.scratch + int(SLACK * program.peak_bytes)
    same = RecordedMemory(state, state + program.first, state + program.before, state, program.peak_bytes)
    assert not list(memory_differences(program, program.events, same))
    assert largest_deviation(program, program.events, same) == 0
    later = replace(same, first=same.first + most)
    assert largest_deviation(program, program.events, later) == most
    for name, aspect in (
        ("state", "live bytes when the step begins"),
        ("first", "live bytes when the first pass begins"),
        ("before", "the most live bytes before the first pass"),
        ("end", "live bytes when the step is over"),
        ("peak", "the most live bytes"),
    ):
        is_ = getattr(same, name)
        assert list(memory_differences(program, program.events, replace(same, **{name: is_ + most + 1}))) == [
            Difference(aspect, f"{is_:,}", f"{is_ + most + 1:,}")
        ]
    passes = [i for i, e in enumerate(program.events) if e.kind == "compute"]
    for place, (stays, when) in itertools.product(range(3), ((False, "in"), (True, "before"))):
        e = program.events[passes[place]]
        longer = replace(e, alloc=e.alloc + 2 * most, free=e.free + 2 * most * (not stays))
        events = [longer if i == passes[place] else e for i, e in enumerate(program.events)]
        (found,) = memory_differences(program, events, same)
        instant = program.instants()[place + stays]
        e, bytes_ = instant.event, instant.live if stays else instant.highest
        assert found.aspect == f"live bytes {when} {e.op} {e.unit} of micro-batch {e.micro_batch}"
        assert (found.number, found.predicted) == (place + stays, f"{bytes_:,}")
        assert found.recorded == f"{bytes_ + 2 * most:,}"
        (shown,) = (predicted for i, predicted, _ in found.around if i == place + stays)
        assert shown.endswith(f": {instant.live:,} B before, {instant.highest:,} B at most")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"world": 0}, f"world = 0: is not a number of ranks, from 1 to {MOST_RANKS:,}"),
        ({"world": MOST_RANKS + 1}, f"world = {MOST_RANKS + 1}: is not a number of ranks"),
        ({"world": True}, "world = True: is not a number of ranks"),
        ({"per_node": 0}, "ranks_per_node = 0: is not a number of ranks"),
        ({"axes": {"dp": 0}}, "mesh['dp'] = 0: is not a number of ranks"),
        ({"axes": {"dp": 2, "tp": 4}}, "mesh = {'dp': 2, 'tp': 4}: has 8 ranks; world is 4"),
        ({"ranks": ()}, "ranks = (): is not a list of ranks; None observes one of each class"),
        ({"ranks": (0, 4)}, "ranks = 4: is not a rank; the world has ranks 0 to 3"),
        ({"ranks": (-1,)}, "ranks = -1: is not a rank"),
        ({"ranks": (True,)}, "ranks = True: is not a rank"),
        ({"step": 0}, "step = 0: is not a step; 2 is the first without lazy initialisation"),
    ],
)
def test_what_cannot_be_observed_is_refused(how: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as refused:
        ObservationRequest(**{"world": 4, **how})  # type: ignore[arg-type]
    assert str(refused.value).startswith(words)
    assert ObservationRequest(MOST_RANKS, 1, {"dp": MOST_RANKS}, (0, MOST_RANKS - 1), step=1).world == MOST_RANKS


def test_a_record_stands_in_until_a_pass_contradicts_it() -> None:
    steady = SteadyState[int](lambda a, b: a == b)
    with pytest.raises(Unsteady, match="no two successive micro-batches do the same"):
        steady.repeat("a")
    for record, alike in ((1, None), (2, None), (2, (2, 2)), (3, None), (3, (3, 3))):
        steady.add("a", record, int.__eq__)
        assert steady.steady("a") == alike
    assert (steady.executed("a"), steady.executed("b")) == (5, 0)
    assert steady.repeat("a") == (3, 3)
    steady.add("a", 3, int.__eq__)
    steady.add("a", 9)  # not held to it
    with pytest.raises(Unsteady):
        steady.add("a", 4, int.__eq__)


_SIZES = {"layers": 4, "hidden": 64, "ffn": 128, "heads": 4, "vocab": 61, "max_seq": 64}
_DENSE = build(ModelSpec, complete({"family": "llama", **_SIZES}), "model")
_ROUTED = build(
    ModelSpec, complete({"family": "mixtral", **_SIZES, "experts": {"count": 4, "top_k": 2, "ffn": 6}}), "model"
)


@pytest.mark.parametrize(
    ("model", "line", "expected"),
    [
        (_DENSE, "dp=4", [(0, 4, "alike")]),
        (_DENSE, "pp=2,dp=2", [(0, 2, "pp 0"), (2, 2, "pp 1")]),
        (_DENSE, "cp=2", [(0, 1, "first in the ring"), (1, 1, "last in the ring")]),
        (
            _DENSE,
            "cp=4,ulysses=1",
            [(0, 1, "first in the ring"), (1, 2, "within the ring"), (3, 1, "last in the ring")],
        ),
        (_DENSE, "dp=96,zero=1,bucket=0.001", [(0, 4, "full shards"), (95, 92, "shards with padding")]),
        (_DENSE, "tp=2,dp=7,zero=3", [(0, 12, "full shards"), (13, 2, "shards with padding")]),
        (
            _DENSE,
            "pp=2,dp=3,zero=1",
            [
                (0, 2, "pp 0, full shards"),
                (2, 1, "pp 0, shards with padding"),
                (3, 2, "pp 1, full shards"),
                (5, 1, "pp 1, shards with padding"),
            ],
        ),
        (_ROUTED, "dp=8,ep=2,zero=1", [(0, 7, "full shards"), (7, 1, "shards with padding")]),
        (
            _ROUTED,
            "dp=14,ep=2,zero=1",
            [
                (0, 12, "full shards, full shards of experts"),
                (12, 1, "full shards, shards of experts with padding"),
                (13, 1, "shards with padding, shards of experts with padding"),
            ],
        ),
    ],
)
def test_ranks_of_a_layout_that_differ_in_stage_ring_or_padding(
    model: ModelSpec, line: str, expected: list[tuple[int, int, str]]
) -> None:
    strategy = build(Strategy, parse(line), "strategy")
    found = classes(Layout(model, Job(2 * strategy.dp, 64), strategy))
    assert [(c.rank, c.count, c.description) for c in found] == expected


class _Pipelines:
    """Ranks of `stages` stages, each with work of its own; the last of each stage holds less if it is `short`."""

    def __init__(self, world: int, stages: int, short: bool) -> None:
        self.world, self.each, self.short = world, world // stages, short
        self.begun: dict[int, int] = {}
        self.likes: dict[int, int | None] = {}

    def start(self, rank: int, until: int = END) -> None:
        self.begun.setdefault(rank, until)

    def observe(self, rank: int) -> RankObservation:
        peers = [p for p in (rank - self.each, rank + self.each) if 0 <= p < self.world]
        sent = [Event("p2p", "send", "F", f"stage.{rank // self.each}", "pp", 2, peer=p) for p in peers]
        peak = 7 - (self.short and rank % self.each == self.each - 1)
        nothing: Any = ((), 0, (), 1, (), {}, (), ())
        return RankObservation(rank, 1, "", 2, tuple(map(ObservedEvent, sent)), {}, {}, peak, "F", "", *nothing)

    def observe_or_match(self, rank: int, like: int | None = None) -> RankObservation | MatchedRank:
        self.likes[rank] = like
        seen = self.observe(rank)
        return seen if self.short else MatchedRank(rank - rank % self.each, peers_of(seen))


@pytest.mark.parametrize(
    ("world", "stages", "short", "expected"),
    [
        (1, 1, False, ["the only rank"]),
        (2, 2, False, ["1 rank; observed: 0", "1 rank; observed: 1"]),
        (8, 1, False, ["all 8 ranks"]),
        (8, 1, True, ["7 ranks; observed: 0", "1 rank; observed: 7"]),
        (12, 12, False, [f"1 rank; observed: {n}" for n in range(12)]),
        (8, 2, False, ["4 ranks; observed: 0, 3", "4 ranks; observed: 4, 7"]),
        (
            8,
            2,
            True,
            ["3 ranks; observed: 0", "3 ranks; observed: 4", "1 rank; observed: 7", "1 rank; observed: 3"],
        ),
        (4, 2, True, [f"1 rank; observed: {n}" for n in (0, 2, 3, 1)]),
        (24, 3, False, ["8 ranks; observed: 0, 7", "8 ranks; observed: 8, 15", "8 ranks; observed: 16, 23"]),
    ],
)
def test_ranks_that_did_the_same_are_a_class(world: int, stages: int, short: bool, expected: list[str]) -> None:
    ranks = _Pipelines(world, stages, short)
    found = observe_classes(ranks, world)
    assert [r.are for r in found] == expected
    assert sum(r.count for r in found) == world
    assert all(r.are.startswith(("all", "the only", f"{r.count} rank")) for r in found)
    last = world - 1
    assert ranks.begun[last] == WANTED_STEP
    if not short and last in ranks.likes:  # others are as far from ranks that were observed in full
        assert ranks.likes.pop(last) is None
        assert ranks.likes == {rank: rank - last % ranks.each for rank in ranks.likes}
        assert {ranks.begun[rank] for rank in ranks.likes} <= {SECOND_MICRO_BATCH}


def test_of_a_long_pipeline_not_all_ranks_are_observed() -> None:
    ranks = _Pipelines(300, 300, True)
    found = observe_classes(ranks, 300)
    assert len(ranks.begun) <= 2 * 128 + 2
    assert [r.rank for r in found] == [*range(128), *range(299, 171, -1)]
    assert [r.count for r in found] == [45, *[1] * 255]  # the others as the first
