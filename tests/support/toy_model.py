"""The small model whose layers are split or recomputed in tests, and the order in which its gradients arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.observation.trainer.step import record_step
from phalanx.runtime.data_parallel.engine import DataParallel
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

SIZES: dict[str, Any] = {
    "family": "llama",
    "vocab": 61,
    "hidden": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 40,
    "max_seq": 32,
}


def model(**sizes: Any) -> ModelSpec:
    return build(ModelSpec, complete(SIZES | sizes), "model")


def order_of_gradients(spec: ModelSpec, strategy: Strategy) -> list[str]:
    """Return the order in which the first rank's engine receives the gradients of the blocks' parameters."""
    came: list[str] = []
    hook = DataParallel._hook

    def noting(self: DataParallel, name: str, p: torch.nn.Parameter) -> None:
        came.append(name)
        hook(self, name, p)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataParallel, "_hook", noting)
        record_step(spec, Job(2, 8), strategy, 0)
    assert came
    return [name for name in came if name.startswith("blocks")]
