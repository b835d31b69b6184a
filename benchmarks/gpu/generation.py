"""The speed at which this machine's GPU generates text:  python -m benchmarks.gpu.generation OUT.json [tiny]

Models with random weights, 8 prompts at once: the first step computes all their tokens, each later one a token of
each. One process, one GPU (or, of the tiny size, the CPU). A size whose weights and cache would not fit is left out.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sizes import SIZES, TINY, Size
from phalanx.cost.memory.state import cache_bytes
from phalanx.infer.generate import BatchedGeneration
from phalanx.infer.sampling import Sampling
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.generation import BatchingPolicy, Request, Room
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

PROMPTS = 8
"""Requests that run at once."""


class Repeated:
    """Weights that repeat one random block: quick to make, and no quicker to compute with."""

    def __init__(self) -> None:
        self._block = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02

    def has(self, fqn: str) -> bool:
        """Whether a tensor exists: every parameter does."""
        return True

    def dtype(self, fqn: str) -> torch.dtype:
        """Return the type in which the parameter is stored."""
        return torch.float32

    def slice(self, fqn: str, start: int, stop: int) -> torch.Tensor:
        """Return elements start..stop of the flattened parameter."""
        return self._block.repeat(-(-(stop - start) // len(self._block)))[: stop - start]


def measured(size: Size, prompt: int, new: int) -> dict[str, Any]:
    """Continue prompts of `prompt` tokens by `new` tokens each, and describe how long it took."""
    device, room = ALONE.device, Room(PROMPTS, prompt + new, PROMPTS, prompt)
    need = size.model.parameter_count * 2 + cache_bytes(size.model, room, "bfloat16")
    row: dict[str, Any] = {"size": size.name, "prompts": PROMPTS, "prompt_tokens": prompt}
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if need > free:
            return row | {"left_out": f"needs {need / 2**30:.1f} of {free / 2**30:.1f} GiB"}
    requests = [Request(i, tuple((i + j) % size.model.vocab for j in range(prompt)), new) for i in range(PROMPTS)]
    alone, policy = Strategy(), BatchingPolicy(slots=PROMPTS, chunk=PROMPTS * prompt)
    generation = BatchedGeneration(
        size.model, alone, Comm(ALONE, mesh(alone)), Repeated(), "bfloat16", requests, Sampling(new), policy
    )
    seconds = []
    while not generation.done:
        begin = time.perf_counter()
        generation.step()  # the host reads the sampled tokens, so that it ends when the device has ended
        seconds.append(time.perf_counter() - begin)
    token_s = statistics.median(seconds[1:])
    return row | {
        "weights_bytes": size.model.parameter_count * 2,
        "first_token_s": seconds[0],
        "token_s": token_s,
        "tokens_per_s": PROMPTS / token_s,
    }


def main() -> None:
    """Measure every size that fits, and write the rows after each."""
    out, *rest = sys.argv[1:]
    rows: list[dict[str, Any]] = []
    for size in (TINY,) if rest else SIZES:
        try:
            rows.append(measured(size, 16 if rest else 512, 8 if rest else 128))
        except torch.OutOfMemoryError as error:
            rows.append({"size": size.name, "left_out": f"out of memory: {str(error).splitlines()[0]}"})
        write_json(Path(out), rows)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
