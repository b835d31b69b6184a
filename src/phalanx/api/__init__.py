"""Phalanx from Python: what the commands do, as functions with typed results.

    from phalanx import api

    best = api.plan(model="llama3-70b", cluster="dgx-h100", gpus=64, batch=512, seq=8192)
    best.strategy, best.best.seconds, best.best.mfu      # 'dp=2,zero=1,tp=4,...', 58.1, 0.549
    best.plot()                                          # the report, in a notebook
    best.to_pandas()                                     # the ranked strategies

Arguments mean what the command line's options of the same name mean, and are read by the same function. What is wrong
with them raises InputError, a ValueError whose text is the line that the command prints. A result is a frozen
dataclass; `to_pandas()` needs pandas, `plot()` gives a page that a notebook shows and `save(file)` writes.

The functions are here and not in `phalanx` itself, where `plan` and `verify` are rooms of the package.
"""

from __future__ import annotations

from phalanx.api.collectives import CollectiveProof, prove, table_of_collectives
from phalanx.api.questions import compare, explain, memory, plan, predict, roofline, scaling, traffic
from phalanx.api.results import Comparison, Explanation, Page, PlanResult, Prediction, Table, Verification
from phalanx.api.verification import verify
from phalanx.spec.errors import InputError

__all__ = [
    "CollectiveProof",
    "Comparison",
    "Explanation",
    "InputError",
    "Page",
    "PlanResult",
    "Prediction",
    "Table",
    "Verification",
    "compare",
    "explain",
    "memory",
    "plan",
    "predict",
    "prove",
    "roofline",
    "scaling",
    "table_of_collectives",
    "traffic",
    "verify",
]
