"""Our training step on this machine's GPU, next to plain PyTorch: tokens/s, MFU, measured and predicted peak memory.

    python -m benchmarks.gpu.steps ours|plain|compiled|fsdp OUT.json [tiny]

`ours` may be followed by -float8 or -float8-row, and all of these by -compiled. One process, one GPU (or, of the tiny
size, the CPU). A size that would not fit is left out, with the memory that it needs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import plain
from benchmarks.gpu.sizes import SIZES, TINY, Size, products_of
from phalanx.cost.ledger.flops import model_flops
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout
from phalanx.cost.step.expand import expand
from phalanx.runtime.autograd.narrow_product import runs_on
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.layout import Layout
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Products
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.compiled_blocks import compile_blocks
from phalanx.training.training_step import Training

WARM, TIMED = 3, 10
Step = Callable[[], object]


def ours(
    size: Size, batch: Tensor, products: Products = "compute", compiled: bool = False
) -> tuple[Step, Callable[[], object]]:
    """Return our step, and a function that waits for the latest one."""
    strategy = Strategy(micro_batch=size.micro_batch)
    training = Training(size.model, size.of(products), strategy, Comm(ALONE, mesh(strategy)), seed=0)
    if compiled:
        compile_blocks(training.model)
    return lambda: training.issue([batch], 1e-4), training.settle


def measured(size: Size, way: str) -> dict[str, Any]:
    """Take steps of one size and describe them."""
    device = ALONE.device
    strategy = Strategy(micro_batch=size.micro_batch)
    products = products_of(way)
    predicted = expand(Layout(size.model, size.of(products), strategy).rank_view(0)).peak_bytes
    row: dict[str, Any] = {"size": size.name, "parameters": size.model.parameter_count, "way": way}
    row["predicted_peak_bytes"] = predicted
    if device.type == "cuda":
        if products != "compute" and not runs_on(NUMBER_FORMATS[products], device):
            return row | {"left_out": f"this GPU has no products of {NUMBER_FORMATS[products].title}"}
        free = torch.cuda.mem_get_info(device)[0]
        if predicted > free:
            return row | {"left_out": f"needs {predicted / 2**30:.1f} of {free / 2**30:.1f} GiB"}
        torch.cuda.reset_peak_memory_stats(device)
    batch = torch.randint(size.model.vocab, (size.micro_batch, size.seq + 1), device=device)
    if way.startswith("ours"):
        step, wait = ours(size, batch, products, way.endswith("compiled"))
    else:
        step, wait = plain.step(size, batch, compiled=way != "plain", sharded=way == "fsdp")
    seconds = []
    for _ in range(WARM):
        step()
    wait()
    for _ in range(TIMED):
        begin = time.perf_counter()
        step()
        wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    step_s = statistics.median(seconds)
    flops = float(model_flops(shape(size.model), layout(strategy, size.job, size.model.layers)))
    tokens = size.micro_batch * size.seq
    row |= {"step_s": step_s, "tokens_per_s": tokens / step_s, "model_flops_per_s": flops / step_s}
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return row


def main() -> None:
    """Measure every size that fits, and write the rows after each."""
    way, out, *rest = sys.argv[1:]
    rows: list[dict[str, Any]] = []
    for size in (TINY,) if rest else SIZES:
        try:
            rows.append(measured(size, way))
        except torch.OutOfMemoryError as error:
            line = str(error).splitlines()[0]
            rows.append({"size": size.name, "way": way, "left_out": f"out of memory: {line}"})
        write_json(Path(out), rows)
        if "step_s" in rows[-1]:
            print(json.dumps(rows[-1]), flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
