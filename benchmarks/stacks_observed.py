"""Observe what torch's own data parallelisms do, option by option, and write docs/stacks_observed.{json,md}.

    python -m benchmarks.stacks_observed

A model of four equal blocks takes a step of two micro-batches on rank 0 of 8, with AdamW. Every figure is counted in
that rank's second step; the lines of torch that decide it are named beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from phalanx.schedule.observation import RankObservation

WORLD, MICRO_BATCHES, BLOCKS, WIDTH = 8, 2, 4, 512
BLOCK = 2 * (WIDTH * WIDTH + WIDTH)
"""Parameters of a block."""
_DOCS = Path(__file__).resolve().parents[1] / "docs"
_FSDP = "torch/distributed/fsdp/_fully_shard/"
_DDP = "torch/nn/parallel/distributed.py"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def _train(model: nn.Module, inside: Callable[[int], Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for m in range(MICRO_BATCHES):
            with inside(m):
                model(torch.randn(16, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _ddp(no_sync: bool = False, **options: Any) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(_Block() for _ in range(BLOCKS))).cuda(), **options)
    _train(model, lambda m: model.no_sync() if no_sync and m < MICRO_BATCHES - 1 else nullcontext())


def _fully_shard(
    mesh: tuple[int, ...] = (WORLD,), synchronised_once: bool = False, mixed: bool = False, **o: Any
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    o["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    if mixed:
        o["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = nn.Sequential(*(_Block() for _ in range(BLOCKS))).cuda()
    for block in model:
        fully_shard(block, **o)
    fully_shard(model, **o)
    assert isinstance(model, FSDPModule)

    def inside(m: int) -> Any:
        if synchronised_once:
            model.set_requires_gradient_sync(m == MICRO_BATCHES - 1)
        return nullcontext()

    _train(model, inside)


@dataclass(frozen=True)
class Case:
    """One option of a stack: how it is called, and the lines of torch that decide what it does."""

    stack: str
    option: str
    program: Callable[..., None]
    arguments: dict[str, Any]
    source: str


CASES = (
    Case("DDP", "default", _ddp, {}, f"{_DDP}:1754"),
    Case("DDP", "no_sync() but for the last micro-batch", _ddp, {"no_sync": True}, f"{_DDP}:1754"),
    Case("DDP", "bucket_cap_mb=4", _ddp, {"bucket_cap_mb": 4}, f"{_DDP}:104"),
    Case("DDP", "gradient_as_bucket_view", _ddp, {"gradient_as_bucket_view": True}, f"{_DDP}:1284"),
    Case("fully_shard", "default", _fully_shard, {}, f"{_FSDP}_fsdp_param_group.py:607"),
    Case(
        "fully_shard",
        "reshard_after_forward=False",
        _fully_shard,
        {"reshard_after_forward": False},
        f"{_FSDP}_fsdp_param_group.py:501",
    ),
    Case(
        "fully_shard",
        "reshard_after_forward=4",
        _fully_shard,
        {"reshard_after_forward": 4},
        f"{_FSDP}_fully_shard.py:180",
    ),
    Case(
        "fully_shard",
        "set_requires_gradient_sync(last)",
        _fully_shard,
        {"synchronised_once": True},
        f"{_FSDP}_fsdp_param_group.py:607",
    ),
    Case("fully_shard", "bf16, reduced in fp32", _fully_shard, {"mixed": True}, f"{_FSDP}_fsdp_collectives.py:560"),
    Case("fully_shard", "mesh of 2 x 4 (HSDP)", _fully_shard, {"mesh": (2, 4)}, f"{_FSDP}_fsdp_param_group.py:709"),
)


def observe(case: Case) -> dict[str, Any]:
    """Return what a case does in a step: operations by phase and micro-batch, their types, and live bytes."""
    result = phalanx.observe(lambda: case.program(**case.arguments), world=WORLD, ranks=[0]).ranks[0]
    return {
        "stack": case.stack,
        "option": case.option,
        "source": case.source,
        "gathers": _counts(result, "all_gather"),
        "reductions": _counts(result, "all_reduce") | _counts(result, "reduce_scatter"),
        "peak_bytes": result.peak,
        "peak_phase": result.peak_phase,
        "held_at_peak": {h.kind: sum(x.bytes for x in result.holders if x.kind == h.kind) for h in result.holders},
    }


def _counts(r: RankObservation, op: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for o in r.communication:
        e = o.event
        if e.op == op:
            at = "" if e.micro_batch is None else f", micro-batch {e.micro_batch}"
            key = f"{op} of {e.dtype} over {e.group_size}, {e.phase}{at}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def page(cases: list[dict[str, Any]]) -> str:
    """Return the page: one table row for every case."""
    lines = [
        "# What the stacks do, as observed",
        "",
        f"Written by `python -m benchmarks.stacks_observed` under torch {torch.__version__}: four blocks of "
        f"{BLOCK:,} parameters, {MICRO_BATCHES} micro-batches a step, AdamW, rank 0 of {WORLD}, the second step. "
        "F: forward, B: backward. The data behind it: [stacks_observed.json](stacks_observed.json).",
        "",
        "| stack | option | gathers in a step | reductions in a step | peak of live bytes | decided at |",
        "|---|---|---|---|---|---|",
    ]
    for c in cases:
        gathers, reductions = (_in_words(c[kind]) for kind in ("gathers", "reductions"))
        lines.append(
            f"| {c['stack']} | {c['option']} | {gathers} | {reductions} | {c['peak_bytes']:,} | `{c['source']}` |"
        )
    return "\n".join(lines) + "\n"


def _in_words(counts: dict[str, int]) -> str:
    """Return the operations of all micro-batches together."""
    totals: dict[str, int] = {}
    for what, n in counts.items():
        kind = what.partition(", micro-batch")[0]
        totals[kind] = totals.get(kind, 0) + n
    return "; ".join(f"{n} x {what}" for what, n in totals.items()) or "none"


def main() -> None:
    """Observe every case and write the page and its data."""
    observations = [observe(case) for case in CASES]
    about = {"torch": torch.__version__, "world": WORLD, "micro_batches": MICRO_BATCHES, "cases": observations}
    (_DOCS / "stacks_observed.json").write_text(json.dumps(about, indent=1) + "\n")
    (_DOCS / "stacks_observed.md").write_text(page(observations))


if __name__ == "__main__":
    main()
