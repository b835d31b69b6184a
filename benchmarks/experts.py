"""A benchmark rank: a mixture of experts over ep ranks compared with replicated experts, over Gloo and over shared
memory; and, on the first rank, products of several experts compared with one of as many FLOPs.

Tokens are routed by the model's own, untrained router, and the load is as uneven as it makes it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.interleaved import Step, rounds
from benchmarks.programs import our_step
from phalanx.nn.experts import expert_mlps
from phalanx.runtime.autograd.deferred_weight_grads import GroupedProduct
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

ROUNDS, STEPS = 7, 2
SEQ, BATCH = 256, 2  # tokens, sequences per rank
SIZES = {
    "family": "mixtral",
    "vocab": 4096,
    "hidden": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 512,
    "max_seq": SEQ,
    "experts": {"count": 8, "top_k": 2, "ffn": 512, "normalized": True, "balance_loss": 0.01},
}
EXPERTS, HIDDEN, FFN = 8, 512, 1024
ROWS = (2048, 8192)


def products(rows: int) -> dict[str, list[list[float]]]:
    """Return seconds of the products of 8 experts and of a dense one, [grouped, dense] by round.

    The products are those of results, of input gradients and of weight gradients; loads range from 1 to 2.
    """
    torch.manual_seed(0)
    share = rows // (3 * EXPERTS // 2)
    held = tuple([2 * share, share] * (EXPERTS // 2))
    held = (*held[:-1], rows - sum(held[:-1]))
    x, g = torch.randn(rows, HIDDEN), torch.randn(rows, FFN)
    banks, dense = torch.randn(EXPERTS, FFN, HIDDEN), torch.randn(FFN, HIDDEN)
    into, whole = torch.empty(EXPERTS, FFN, HIDDEN), torch.empty(FFN, HIDDEN)
    y, d_x = torch.empty(rows, FFN), torch.empty(rows, HIDDEN)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "results": (
            lambda: expert_mlps.product(x, banks.mT, held, out=y),
            lambda: torch.mm(x, dense.t(), out=y),
        ),
        "gradients of inputs": (
            lambda: expert_mlps.product(g, banks, held, out=d_x),
            lambda: torch.mm(g, dense, out=d_x),
        ),
        "gradients of weights": (
            lambda: GroupedProduct(g, x, held).write(into, add=False),
            lambda: torch.mm(g.t(), x, out=whole),
        ),
    }
    return {name: [[_best(one), _best(other)] for _ in range(ROUNDS)] for name, (one, other) in pairs.items()}


def _best(work: Callable[[], object]) -> float:
    results = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        results.append(time.perf_counter() - start)
    return min(results)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    spec = build(ModelSpec, complete(SIZES), "model")

    def work() -> None:
        ranks = world.size
        job = Job(ranks * BATCH, SEQ)
        comm = Comm(world, mesh(Strategy(dp=ranks)))
        results: dict[str, object] = {}
        if world.rank == 0:
            results["products"] = {f"{name}, {n} rows": pairs for n in ROWS for name, pairs in products(n).items()}
        comm.barrier()
        runs: dict[str, tuple[Step, int]] = {}
        for transport in ("native", "shm"):
            for name, ep in (("replicated", 1), (f"ep={ranks}", ranks)):
                strategy = Strategy(dp=ranks, ep=ep, micro_batch=BATCH)
                runs[f"{name}, {transport}"] = (our_step(spec, job, world, strategy, transport), ranks)
        tokens: Tensor = torch.randint(
            spec.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(world.rank)
        )
        results["steps"] = rounds(runs, tokens, comm, ROUNDS, STEPS)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
