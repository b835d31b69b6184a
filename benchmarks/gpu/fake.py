"""The step of families x strategies on a fake GPU:  python -m benchmarks.gpu.fake OUT.json

All in bf16, and some in 8 bits: on one rank, with a scale for each row, under sequence parallelism, with a split
backward pass, with experts, and with 8-bit gathers of ZeRO 3 and sp.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.observation.trainer.verify import verify
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec

_SIZES = {"vocab": 512, "hidden": 64, "layers": 4, "heads": 4, "ffn": 128, "max_seq": 64}
_EXPERTS = {"count": 4, "top_k": 2, "ffn": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **_SIZES},
    "gpt2": {"family": "gpt2", **_SIZES},
    "mixtral": {"family": "llama", **_SIZES, "experts": _EXPERTS},
}
STRATEGIES = (
    "dp=1",
    "dp=1,recompute=full",
    "dp=8",
    "dp=8,zero=1",
    "dp=8,zero=2",
    "dp=8,zero=3",
    "dp=8,zero=3,shard=2",
    "dp=2,compression=int8",
    "dp=2,compression=powersgd:4",
    "tp=4",
    "tp=4,sp=1",
    "cp=4",
    "cp=4,ulysses=4",
    "pp=4",
    "pp=2,dp=2,zero=3,schedule=zb-v",
    "pp=2,virtual=2,schedule=interleaved,tp=2,dp=2,zero=1",
)
OF_EXPERTS = ("dp=4,ep=4", "dp=4,ep=2,zero=3", "dp=2,tp=2,ep=2,etp=2")
PRECISIONS = {
    "bf16": Precision("bfloat16"),
    "fp8": Precision("bfloat16", products="float8"),
    "fp8 by row": Precision("bfloat16", products="float8-row"),
    "fp8, gathers too": Precision("bfloat16", products="float8", gather="float8"),
}
IN_8_BITS = (
    ("llama", "dp=1", "fp8"),
    ("gpt2", "dp=1,recompute=full", "fp8 by row"),
    ("mixtral", "dp=4,ep=2,zero=3", "fp8 by row"),
    ("llama", "dp=8,zero=3", "fp8, gathers too"),
    ("gpt2", "tp=4,sp=1", "fp8, gathers too"),
    ("mixtral", "dp=4,ep=2,zero=3", "fp8, gathers too"),
    ("llama", "tp=2,sp=1,pp=2,schedule=zb-h1", "fp8, gathers too"),
)
"""(Family, strategy, precision) in addition to those in bf16."""


def _cases() -> Iterator[tuple[str, str, str]]:
    for family, fields in FAMILIES.items():
        for line in STRATEGIES + OF_EXPERTS * ("experts" in fields):
            yield family, line, "bf16"
    yield from IN_8_BITS


def rows() -> Iterator[dict[str, Any]]:
    """Verify every case in turn, and describe the result."""
    for family, line, numbers in _cases():
        strategy = make_strategy(line)
        assert strategy is not None
        model = build(ModelSpec, complete(FAMILIES[family]), "model")
        checked = verify(model, Job(strategy.dp * 4, 64, PRECISIONS[numbers]), strategy, on_gpu=True)
        recorded = [v.recorded for v in checked if v.recorded is not None]
        failed = [v.failed or str(v.differences[0]) for v in checked if not v.proved]
        waits = max((sum(r.waits.values()) for r in recorded), default=0)
        yield {"family": family, "strategy": line, "precision": numbers, "waits": waits, "failed": failed}


if __name__ == "__main__":
    result = []
    for row in rows():
        result.append(row)
        write_json(Path(sys.argv[1]), result)  # what is done by the time limit is reported
