"""The recorded step equals the StepProgram: every collective, FLOPs per unit, live bytes."""

import gc

import pytest
import ranks
from drawn import TRANSPORTS, cases
from hypothesis import given, settings
from pool import Pool

from phalanx.runtime.world import ALONE


@settings(max_examples=40)
@given(case=cases(1, small=False))
def test_one_process(case) -> None:  # type: ignore[no-untyped-def]
    found = ranks.instrumented_step(ALONE, *case)
    assert found["differences"] == []
    assert found["bytes"] == {}
    # Every tensor is followed, those of other tests too: none may be left.
    assert found["predicted_peak"] == pytest.approx(found["measured_peak"], rel=0.02), case
    gc.collect()


@pytest.mark.parametrize("world", [2, 3])
def test_several_ranks(pool: Pool, world: int) -> None:
    @settings(max_examples=12)
    @given(cases(world, small=False, compressed=True), TRANSPORTS)
    def equal(case, transport) -> None:  # type: ignore[no-untyped-def]
        for found in pool.run(world, ranks.instrumented_step, *case, transport):
            assert found["differences"] == []
            assert found["events"] > 0
            # Gloo's own reduce-scatter works on a copy of its input: memory of torch's, which no plan counts.
            copies = found["bytes"].get("dp_shard", 0) if transport == "native" else 0
            measured, predicted = found["measured_peak"], found["predicted_peak"]
            assert predicted * 0.98 <= measured <= predicted * 1.02 + copies, case

    equal()
