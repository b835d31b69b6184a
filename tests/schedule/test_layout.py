"""A layout and the views of its ranks: together they hold the model, and everything is derived once."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from support.sizes import drawn
from support.strategies import cases

from phalanx.cost.step.predict import predict
from phalanx.schedule import layout as layouts
from phalanx.schedule.event import Event
from phalanx.schedule.gradients.buckets import chunk_buckets
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec, parameters, units
from phalanx.spec.strategy.spec import Strategy

RANKS = st.sampled_from([1, 2, 4, 8])


@drawn(15, 40, RANKS.flatmap(lambda ranks: cases(ranks, experts=ranks % 4 == 0)))
def test_the_views_of_all_stages_hold_the_model(case: tuple[ModelSpec, Job, Strategy]) -> None:
    layout = Layout(*case)
    views = layout.stage_views()
    assert sorted(u for view in views for chunk in view.chunks for u in chunk) == sorted(units(layout.model))
    assert sorted(chunk for view in views for chunk in view.chunk_indices) == list(range(len(layout.rank_of)))
    for view in views:
        assert sorted(view.class_of) == sorted(units(view.stage))
        assert sum(view.passes["F", name] for name in view.unit_classes) == len(view.class_of) * layout.micro_batches
        bucketed = [p.fqn for bucket in view.buckets for p in bucket.parameters]
        assert sorted(bucketed) == sorted(p.fqn for p in parameters(view.local))
        finished = range(len(view.chunks))
        issued = chunk_buckets(view.buckets, view.stage, finished, early=False)
        assert sorted(i for of in issued for i in of) == list(range(len(view.buckets)))
        for units_of, of in zip(view.chunks, issued, strict=True):
            assert {view.buckets[i].parameters[0].unit for i in of} <= {*units_of, "model"}


@drawn(15, 40, RANKS.flatmap(lambda ranks: cases(ranks, experts=ranks % 4 == 0)))
def test_a_rank_sees_what_its_stage_does(case: tuple[ModelSpec, Job, Strategy]) -> None:
    """Ranks of a stage differ in their coordinates, and in nothing that was derived from the strategy."""
    layout = Layout(*case)
    s, seen = layout.strategy, set()
    for rank in range(s.world):
        view = layout.rank_view(rank)
        stage = layout.stage_view(layout.mesh.place(rank)["pp"])
        assert (stage.representative == rank) is (stage.place not in seen)  # the first rank at its place
        seen.add(stage.place)
        assert view.tokens * s.cp * s.dp * layout.micro_batches == layout.job.global_batch * layout.job.seq
        assert (view.stage, view.local, view.buckets) == (stage.stage, stage.local, stage.buckets)
        assert (view.actions, view.passes) == (stage.actions, stage.passes)
        assert view.split.index == layout.mesh.place(rank)["tp"]
        assert view.context.index == layout.mesh.place(rank)["cp"]


def test_a_price_derives_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: Counter[str] = Counter()

    def counted(room: Any, name: str) -> None:
        function = getattr(room, name)

        def count(*args: Any) -> Any:
            entries[name] += 1
            return function(*args)

        monkeypatch.setattr(room, name, count)

    for name in ("mesh", "buckets", "unit_classes"):
        counted(layouts, name)
    for name in ("schedule", "chunks"):
        counted(layouts.stages, name)
    sizes = {"family": "llama", "vocab": 64, "hidden": 32, "layers": 4, "heads": 4, "ffn": 64, "max_seq": 32}
    model = ModelSpec(**complete(sizes))
    job = Job(8, 32, Precision("bfloat16"))
    predict(model, clusters.preset("dgx-h100", 1), job, Strategy(dp=2, tp=2, pp=2, zero=1))
    assert entries == {"mesh": 1, "schedule": 1, "chunks": 1, "buckets": 2, "unit_classes": 2}


def test_an_event_of_another_unit_is_a_replacement() -> None:
    values: dict[str, Any] = {f.name: f"{f.name}!" for f in fields(Event)}
    event = Event(**values)
    assert event.at("blocks.1", 3) == replace(event, unit="blocks.1", micro_batch=3)
