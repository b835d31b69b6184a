"""Sequence parallelism: which tokens each rank has, what it sends, and which bugs parity does not let through.

Parity, predicted = recorded and checkpoints of random strategies, sp among them, are in the tests of those names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import ranks
import torch
from pool import Pool
from test_tensor_parallel import model

from phalanx.cost.program import expand
from phalanx.runtime.sequence_parallel import Rows
from phalanx.schedule.tensor_parallel import chunks
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.strategy import Strategy, check
from phalanx.verify.parity import BOUNDS


@pytest.mark.parametrize(
    ("tp", "micro_batch", "seq", "sizes"),
    [
        (2, 1, 8, {}),
        (4, 3, 4, {"tied": True, "kv_heads": 1}),  # three tokens a rank: one chunk
        (4, 2, 8, {"family": "gpt2", "vocab": 5}),  # the last rank has no token of the vocabulary
        (3, 3, 8, {"family": "qwen3", "heads": 12, "kv_heads": 3}),
        (2, 2, 8, {"family": "palm", "kv_heads": 1}),
        (4, 1, 8, {"family": "gpt_neox"}),
        (2, 2, 8, {"family": "gpt2", "residual": "parallel", "tied": False}),
    ],
)
def test_the_axis_alone_equals_one_process(pool: Pool, tp: int, micro_batch: int, seq: int, sizes: Any) -> None:
    spec = model(**{"heads": 12, "kv_heads": 2, "ffn": 48} | sizes)
    strategy = Strategy(tp=tp, sp=True, micro_batch=micro_batch)
    for found in pool.run(tp, ranks.examine, spec, Job(2 * micro_batch, seq), strategy, "float64", 4)[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found
