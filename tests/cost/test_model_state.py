"""ZeRO: state is sharded as the stage says, and no checkpoint knows the layout."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.memory.state import model_state
from phalanx.schedule.gradients.buckets import Bucket, slot_sizes, slots
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec, Parameter
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.spec import Strategy

SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}


def test_state_of_the_textbook() -> None:
    """Rajbhandari et al. 2020, figure 1: mixed precision with Adam, K = 12, over 64 ranks; here gradients are kept in
    fp32, which makes 2 + 4 + 12 bytes per parameter with zero=0."""
    model = build(ModelSpec, complete(preset("gpt2")), "model")
    job = Job(64, 1, Precision("bfloat16", accumulate="float32"))
    n = model.parameter_count
    for zero, parameters, gradients, optimizer in (
        (0, 2.0, 4.0, 12.0),
        (1, 2.0, 4.0, 12 / 64),
        (2, 2.0, 4 / 64, 12 / 64),
        (3, 0.0, 4 / 64, 12 / 64),
    ):
        state = model_state(Layout(model, job, Strategy(dp=64, zero=zero)).stage_view())  # type: ignore[arg-type]
        assert state.parameters / n == pytest.approx(parameters, rel=1e-2)
        assert state.gradients / n == pytest.approx(gradients, rel=1e-2)
        assert (state.optimizer + state.master) / n == pytest.approx(optimizer, rel=1e-2)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_neighbours_never_share_memory(sizes: list[int]) -> None:
    found = slots(sizes)
    assert all(a != b for a, b in pairwise(found))
    assert all(slot_sizes(sizes)[slot] >= size for size, slot in zip(sizes, found, strict=True))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 7))
def test_pieces_are_a_partition(sizes: list[int], shards: int) -> None:
    from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket

    bucket = Bucket(0, tuple(Parameter(f"p{i}", (n,), "norm", "embed") for i, n in enumerate(sizes)))
    strategy = Strategy(dp=shards, zero=3)
    found = [piece for i in range(shards) for piece in FlatBucket(bucket, strategy, i).pieces()]
    for p in bucket.parameters:
        mine = [(piece.start, piece.stop) for piece in found if piece.parameter is p]
        assert mine[0][0] == 0
        assert mine[-1][1] == p.numel
        assert all(a[1] == b[0] for a, b in pairwise(mine))


@pytest.mark.parametrize(
    ("strategy", "field"),
    [
        (Strategy(dp=2, zero=1, grad_sync="micro"), "grad_sync"),
        (Strategy(dp=2, zero=3, grad_sync="step"), "grad_sync"),
        (Strategy(dp=2, zero=2, reshard="step"), "reshard"),
    ],
)
def test_what_a_stage_cannot_do_is_refused(strategy: Strategy, field: str) -> None:
    with pytest.raises(InputError, match=f"strategy.{field}"):
        require_runnable(strategy, Job(4, 8))
