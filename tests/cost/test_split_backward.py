"""Backward passes in two parts as they are predicted: memory, FLOPs and messages of every unit's passes against those
of real ones, on ranks whose peers are nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples
from support.strategies import models, shares, splits
from support.unit_bytes import LAYOUTS, compare, predicted

from phalanx.cost.compute import unit_work
from phalanx.cost.compute.unit_work import RankPass
from phalanx.cost.memory import footprint
from phalanx.cost.memory.attention_core import Core
from phalanx.schedule.layers.context import Context
from phalanx.spec.files.job_file import build
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Recompute, Strategy
from phalanx.spec.strategy.split import local_model


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, Job, Strategy, int]:
    seq = 256
    spec = draw(models().map(lambda m: replace(m, hidden=256)))
    fitting = [s for s in LAYOUTS if splits(spec, s.tp) and shares(spec, seq, s)]
    s = replace(
        draw(st.sampled_from(fitting)),
        micro_batch=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(["none", "selective", "full", "every:2"])),
    )
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float64"]))
    job = Job(4, seq, Precision(dtype), documents=draw(st.sampled_from(["packed", "separate"])))
    return spec, job, s, draw(st.integers(0, s.world - 1))


@examples(2, 100)
def test_of_two_parts(examples: int) -> None:
    @given(cases())
    @settings(max_examples=examples)
    def holds(case: tuple[ModelSpec, Job, Strategy, int]) -> None:
        compare(case, split=True)

    holds()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("repeat", ["none", "full"])
@pytest.mark.parametrize("s", [Strategy(), Strategy(tp=2)], ids=str)
def test_of_one_head_with_narrow_values(s: Strategy, repeat: Recompute, split: bool) -> None:
    """Latent attention whose values are narrower than its keys, with one head on each rank."""
    latent = {"kv_rank": 16, "nope_dim": 24, "rope_dim": 8, "v_dim": 16}
    sizes = {"family": "llama", "vocab": 300, "hidden": 64, "layers": 1, "heads": s.tp, "kv_heads": s.tp}
    sizes |= {"head_dim": 32, "ffn": 64, "max_seq": 256, "position": "rotary", "latent": latent}
    spec = build(ModelSpec, complete(sizes), "model")
    compare((spec, Job(4, 256), replace(s, micro_batch=2, recompute=repeat), 0), split)


@given(cases())
def test_what_is_kept_comes_and_goes(case: tuple[ModelSpec, Job, Strategy, int]) -> None:
    """Forward and both parts leave a block as it was, and the work of the parts is that of the whole."""
    spec, job, s, _ = case
    e, t = DTYPE_BYTES[job.precision.compute], s.micro_batch * job.seq // s.cp
    found = predicted(*case, split=True).passes
    masks = footprint.documents(local_model(spec, s), job, t, Context(job.seq, s.ring, s.ulysses))
    for i in range(spec.layers):
        assert sum(found[phase, f"blocks.{i}"].change for phase in "FIW") == -masks.get(i, 0)
    for unit in ("embed", "blocks.0", "head"):
        p = RankPass(t, job.seq, e, s)
        whole = unit_work.backward(spec, unit, p)
        assert whole == unit_work.input_grad(spec, unit, p) + unit_work.weight_grad(spec, unit, p)


@pytest.mark.parametrize("s", LAYOUTS, ids=str)
def test_of_many_micro_batches_at_once(s: Strategy) -> None:
    """The search's columns are their rows."""
    sizes = {"family": "llama", "vocab": 300, "hidden": 64, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8}
    spec = local_model(build(ModelSpec, complete(sizes | {"ffn": 96, "max_seq": 128}), "model"), s)
    job, part = Job(4, 128), Context(128, s.ring, s.ulysses)
    rows = [part.tokens * n for n in (1, 2, 4)]
    for unit in ("embed", "blocks", "head"):

        def of(t: Any, unit: str = unit) -> footprint.Footprint:
            core = Core(spec, job, t, part, None) if part.parallel else None
            return footprint.footprint(spec, unit, t, 128, job, "float64", s.tp, s.sp, "none", core, in_parts=True)

        together = of(np.array(rows)).parts
        assert together is not None
        for i, t in enumerate(rows):
            alone = of(t).parts
            assert alone is not None
            for one, all_ in ((alone.inputs, together.inputs), (alone.weights, together.weights)):
                for field in ("highest", "change", "masked"):
                    assert np.broadcast_to(getattr(all_, field), 3)[i] == getattr(one, field)
