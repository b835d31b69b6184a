"""When our own engine reduces and gathers is what the ledger says of columns of strategies under our policy."""

from __future__ import annotations

from itertools import product

import numpy as np

from phalanx.cost.analytic.profile import profile
from phalanx.cost.hardware.columns import gather
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import layout
from phalanx.schedule.gradients.sharding import Sharding, sharding_of
from phalanx.spec.job import Job
from phalanx.spec.strategy.spec import Strategy

_MICRO_BATCHES = 4
_FIELDS = ("shards", "replicas", "state", "parameters", "by_unit", "reduces_each", "replicates_each", "gathers_each")


def test_a_strategy_shards_as_its_column_under_our_policy() -> None:
    strategies = [
        Strategy(dp=dp, cp=cp, pp=pp, zero=zero, shard=shard)  # type: ignore[arg-type]
        for dp, cp, pp, zero in product((1, 4), (1, 2), (1, 2), range(4))
        for shard in ((None, 2) if zero and dp > 1 else (None,))
    ]
    columns = gather([layout(s, Job(_MICRO_BATCHES * s.dp, 64), 4) for s in strategies])
    how = sharding(columns, profile("phalanx").policy)
    for i, s in enumerate(strategies):
        one = sharding_of(s)
        for name in (*_FIELDS, "regathers"):
            assert float(np.broadcast_to(getattr(how, name), len(strategies))[i]) == float(getattr(one, name)), (
                s,
                name,
            )


def test_counts_of_a_step() -> None:
    m = 5
    assert sharding_of(Strategy(dp=2)).reductions(m) == 1
    assert sharding_of(Strategy(dp=2, zero=2)).reductions(m) == m
    assert sharding_of(Strategy(dp=2, zero=2, grad_sync="step")).reductions(m) == 1
    assert sharding_of(Strategy(dp=2, zero=3)).gathers(m) == 2 * m
    assert sharding_of(Strategy(dp=2, zero=3, reshard="step")).gathers(m) == 1
    assert sharding_of(Strategy(dp=2, pp=2, zero=3)).keeps_gathered
    updates = [sharding_of(Strategy(dp=2, zero=zero)).updates_gather for zero in range(4)]  # type: ignore[arg-type]
    assert updates == [False, True, True, False]


def test_nothing_is_sharded_over_one_rank() -> None:
    assert sharding_of(Strategy(zero=3)) == Sharding(1, 1, *[False] * 7)
