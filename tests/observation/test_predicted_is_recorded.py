"""The recorded step equals the StepProgram: every collective, FLOPs per unit, live bytes; and so does the step on
fake tensors, whose live bytes are the real ones."""

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import rank_cases
from support.proving import prove
from support.rank_pool import Pool
from support.sizes import combined, examples, sampled
from support.strategies import COMPRESSORS, PRECISIONS, QUANTISERS, TRANSPORTS, cases
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.trainer.step import record_step
from phalanx.observation.trainer.verify import verify
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.process.environment import ALONE
from phalanx.runtime.tracing.instrument import Tracker
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.spec import Recompute, Strategy


@pytest.fixture(scope="module", autouse=True)
def _alone() -> None:
    """What other tests have left is not looked at, twice in every step."""
    gc.collect()
    gc.freeze()


@examples(3, 100)
def test_one_process(examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(1, small=False))
    def equal(case) -> None:  # type: ignore[no-untyped-def]
        found = rank_cases.instrumented_step(ALONE, *case)
        assert found["differences"] == []
        assert found["bytes"] == {}
        assert found["predicted_peak"] == pytest.approx(found["measured_peak"], rel=0.01), case
        assert record_step(*case, rank=0).memory.peak == pytest.approx(found["measured_peak"], abs=SLACK_BYTES), case

    equal()


def test_tensors_in_a_compilers_cache_have_no_memory() -> None:
    before = Tracker(Recorder()).live
    with FakeTensorMode():
        cached = torch.empty(1000)
    assert Tracker(Recorder()).live == before
    assert cached.nbytes == 4000


def test_wrappers_of_other_tensors_have_no_memory() -> None:
    """A compiler's cache, or DTensor, leaves some behind."""
    inner = torch.ones(1000)
    before = Tracker(Recorder()).live
    wrapper = torch._to_functional_tensor(inner)
    assert Tracker(Recorder()).live == before
    assert wrapper.shape == inner.shape


@examples(3, 100)
@pytest.mark.parametrize("world", sampled([2, 3, 4], (2,)))
def test_several_ranks(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(world, small=False, compressed=True), TRANSPORTS)
    def equal(case, transport) -> None:  # type: ignore[no-untyped-def]
        every = pool.run(world, rank_cases.instrumented_step, *case, transport)
        for found in every:
            assert found["differences"] == []
            assert found["events"] > 0
            assert found["predicted_peak"] == pytest.approx(found["measured_peak"], abs=found["slack"]), case
        # The other ranks hold other parts, or fewer elements where these do not divide.
        assert record_step(*case, rank=0).memory.peak == pytest.approx(
            every[0]["measured_peak"], abs=found["slack"]
        ), case

    equal()


@examples(2, 50)
def test_one_process_with_experts(examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(1, small=False, experts=True))
    def equal(case) -> None:  # type: ignore[no-untyped-def]
        found = rank_cases.instrumented_step(ALONE, *case, balanced=True)
        assert found["differences"] == []
        assert found["predicted_peak"] == pytest.approx(found["measured_peak"], rel=0.01), case
        assert record_step(*case, rank=0).memory.peak == pytest.approx(found["measured_peak"], abs=SLACK_BYTES), case

    equal()


@examples(2, 50)
@pytest.mark.parametrize("world", sampled([2, 4], (1,)))
def test_several_ranks_with_experts(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(world, small=False, experts=True), TRANSPORTS, st.booleans())
    def equal(case, transport, balanced) -> None:  # type: ignore[no-untyped-def]
        """Where the router says which expert, how much is sent is not known, and all else is."""
        for found in pool.run(world, rank_cases.instrumented_step, *case, transport, balanced):
            assert found["differences"] == []
            if balanced:
                assert found["predicted_peak"] == pytest.approx(found["measured_peak"], rel=0.02), case

    equal()


@pytest.mark.parametrize(
    ("s", "recompute"),
    combined([Strategy(pp=2), Strategy(pp=2, tp=2), Strategy(pp=2, tp=2, sp=True)], ["none", "selective", "full"]),
    ids=str,
)
def test_a_norm_that_attention_and_mlp_share_in_a_pipeline(s: Strategy, recompute: Recompute) -> None:
    """Where the stream is far wider than all heads, the peak of a block's backward pass is as both gradients of the
    norm's result are added up."""
    sizes = {"family": "llama", "vocab": 300, "hidden": 256, "layers": 2, "heads": 2, "head_dim": 16, "ffn": 64}
    model = build(ModelSpec, complete(sizes | {"max_seq": 128, "residual": "parallel_one_norm"}), "model")
    for verified in verify(model, Job(1, 128), replace(s, recompute=recompute)):
        assert verified.differences == ()


@pytest.mark.parametrize("place", range(len(COMPRESSORS)))
def test_every_row_is_predicted(place: int) -> None:
    """Each compressor, precision and optimizer at least once: drawn cases meet rare ones by chance alone."""
    sizes = {"family": "llama", "vocab": 1000, "hidden": 128, "layers": 2, "heads": 2, "ffn": 256, "max_seq": 8}
    model = build(ModelSpec, complete(sizes), "model")
    optimizer = Optimizer("muon" if place == 0 else ("adamw", "sgd")[place % 2])
    job = Job(4, 8, PRECISIONS[place % len(PRECISIONS)], optimizer=optimizer)
    recompute = ("none", "selective", "full", "every:2")[place % 4]
    zero = place % (4 if COMPRESSORS[place] in QUANTISERS else 3)
    over = Strategy(dp=4, zero=zero, shard=2 if zero and place % 2 else None)
    prove(model, job, replace(over, compression=COMPRESSORS[place], recompute=recompute, bucket=0.5))
