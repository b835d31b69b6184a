"""Traces of runs that never ran, as Kineto writes them: a planned step as kernels on every rank, and planted faults.

The ranks go through the same list of operations. A kernel lengthens a rank's time; a collective begins on each rank
when it arrives and ends on all when the last one has arrived and the bytes have moved; an overlapped one runs on a
stream of its own until it is waited for. What a fault adds to the step is what the simulation says, not its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.answers.diagnose.planned_parts import PlannedAxis, planned_axes, planned_parts
from phalanx.answers.prediction import prediction_of
from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.spec.strategy.mesh import Mesh, mesh

NAMES = {
    "products": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
    "experts": "_ZN_cutlass_GroupedGemm_bf16",
    "attention": "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
    "attention back": "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<128>(Flash_bwd_params)",
    "memory": "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
    "optimizer": "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
}
OPS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce", "send": "SendRecv"}


@dataclass(frozen=True)
class Step:
    """A planned step in the numbers that the simulation needs, seconds and counts."""

    grid: Mesh
    parts: dict[str, float]
    axes: dict[str, PlannedAxis]
    blocks: int
    """Blocks times micro-batches of a rank."""
    kernels: int = 2
    """Kernels of a block's pass."""


@dataclass(frozen=True)
class Fault:
    """What is wrong in a run. Without arguments: nothing."""

    slow: dict[int, float] = field(default_factory=dict)
    """Factor of a rank's kernels."""
    more_blocks: dict[int, float] = field(default_factory=dict)
    """Factor of a stage's blocks."""
    experts: dict[int, float] = field(default_factory=dict)
    """Factor of a rank's experts."""
    kernel: dict[str, float] = field(default_factory=dict)
    """Factor of a part's kernels."""
    names: dict[str, str] = field(default_factory=dict)
    repeats: bool = False
    """Whether every block's forward pass runs again."""
    link: dict[str, float] = field(default_factory=dict)
    """Factor of an axis's transfers."""
    buckets: int = 1
    """Into so many more collectives dp's are cut, each 0.2 ms slower."""
    overlaps: bool = True
    stride: int = 0
    """Distance between the ranks that the groups of tp name; 0: neighbours."""
    gap_s: float = 0.0
    """Between every two kernels."""
    idle: tuple[str, float, int | None] | None = None
    """An annotation, its seconds a step without a kernel, and the rank (None: all)."""


def step_of(query: Query) -> Step:
    """Return the numbers of a planned step."""
    question = read(query)
    prediction = prediction_of(question)
    s = question.strategy
    assert s is not None
    blocks = round(question.pricing.model.layers / s.pp * s.accumulation(question.pricing.job))
    return Step(mesh(s), planned_parts(question, prediction), planned_axes(question, prediction), blocks)


_Op = tuple[str, str, float]
"""kernel, part, s | collective, axis, s | start, axis, s | wait, axis, 0 | gap, name, s"""


def _ops(step: Step, fault: Fault, factor: float) -> Iterator[_Op]:
    """Yield the operations of a rank in a step; `factor`: of its number of blocks."""
    parts, axes = step.parts, step.axes
    n, kernels = round(step.blocks * factor), step.kernels
    each = {part: parts.get(part, 0.0) / step.blocks for part in ("products", "attention", "memory")}
    inner = [axis for axis in ("tp", "cp", "ep") if parts.get(f"over {axis}")]
    exposed, alone = parts.get("over dp", 0.0), axes.get("dp", PlannedAxis()).alone_s * fault.link.get("dp", 1.0)
    count = max(1, round(axes.get("dp", PlannedAxis()).calls)) * fault.buckets if "dp" in axes else 0
    hidden = max(0.0, axes["dp"].alone_s - exposed) if count and fault.overlaps else 0.0
    shown = alone - hidden if fault.overlaps else alone
    shown += 2e-4 * (count - count / fault.buckets)
    launches = parts.get("launches", 0.0) / (2 * n * (2 * kernels + 1))

    def kernel(part: str, seconds: float) -> Iterator[_Op]:
        yield ("gap", "", launches + fault.gap_s)
        yield ("kernel", part, seconds)

    def one_pass(share: float, back: bool) -> Iterator[_Op]:
        for i in range(kernels):
            for part in ("products", "memory"):
                if each[part]:
                    yield from kernel(part, each[part] * share / kernels)
            if i == kernels // 2 and each["attention"]:
                yield from kernel("attention back" if back else "attention", each["attention"] * share)
        for axis in inner:
            yield ("collective", axis, parts[f"over {axis}"] / step.blocks * fault.link.get(axis, 1.0) * share)

    if fault.idle is not None:
        yield ("idle", fault.idle[0], fault.idle[1])
    # What the backward pass is too short for is hidden behind the forward pass, as gathers of parameters are.
    behind_backward = min(hidden, sum(each.values()) * n * 2 / 3)
    for i in range(n):
        if i == 0 and hidden > behind_backward:
            yield ("start", "dp", hidden - behind_backward)
        yield from one_pass(1 / 3, back=False)
    if hidden > behind_backward:
        yield ("wait", "dp", 0.0)
    for i in range(n):
        if i == 0 and hidden:
            yield ("start", "dp", behind_backward)
        if fault.repeats:
            yield from one_pass(1 / 3, back=False)
        yield from one_pass(2 / 3, back=True)
    if hidden:
        yield ("wait", "dp", 0.0)
    if parts.get("pipeline"):
        yield ("collective", "pp", parts["pipeline"])
    for _ in range(count):
        yield ("collective", "dp", shown / count)
    yield from kernel("optimizer", parts.get("optimizer", 0.0))
    yield ("gap", "", parts.get("host", 0.0))


def traces(step: Step, fault: Fault = Fault(), steps: int = 2) -> list[dict[str, Any]]:
    """Return the trace of every rank."""
    world = step.grid.world
    ranks = [_Rank(rank, step.grid, fault) for rank in range(world)]
    for number in range(steps):
        begins = [r.now for r in ranks]
        lists = [list(_ops(step, fault, fault.more_blocks.get(step.grid.place(r.rank)["pp"], 1.0))) for r in ranks]
        _run(ranks, lists, step.grid)
        for r, begin in zip(ranks, begins, strict=True):
            r.add("user_annotation", f"ProfilerStep#{number}", begin, r.now, {})
    return [r.trace(world) for r in ranks]


class _Rank:
    def __init__(self, rank: int, grid: Mesh, fault: Fault) -> None:
        self.rank, self.grid, self.fault = rank, grid, fault
        self.now, self.ends = 0.0, 0.0
        self.events: list[dict[str, Any]] = []

    def add(self, category: str, name: str, start: float, stop: float, args: dict[str, Any]) -> None:
        times = {"ts": 1e6 * (1000 + start + 3.7 * self.rank), "dur": 1e6 * (stop - start)}  # clocks disagree
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, **times, "args": args})

    def kernel(self, part: str, seconds: float) -> None:
        f = self.fault
        plain = part.removesuffix(" back")
        seconds *= f.slow.get(self.rank, 1.0) * f.kernel.get(plain, 1.0)
        if plain == "products":
            seconds *= f.experts.get(self.rank, 1.0)
        self.add("kernel", f.names.get(part, NAMES[part]), self.now, self.now + seconds, {"stream": 7})
        self.now += seconds

    def collective(self, axis: str, start: float, stop: float) -> None:
        op = {"dp": "reduce_scatter", "pp": "send"}.get(axis, "all_gather")
        args = {"Collective name": op, "Process Group Name": axis, "dtype": "BFloat16", "stream": 13}
        size = {} if axis == "pp" else {"In msg nelems": 1 << 20, "Group size": len(self.group(axis))}
        self.add(
            "kernel",
            f"ncclDevKernel_{OPS[op]}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            start,
            stop,
            args | size,
        )

    def group(self, axis: str) -> tuple[int, ...]:
        return self.grid.group_of(self.rank, {"dp": self.grid.gradient_axis or "dp_shard"}.get(axis, axis))

    def trace(self, world: int) -> dict[str, Any]:
        rows = []
        for axis in ("tp", "cp", "ep", "dp", "pp"):
            ranks = self.group(axis)
            if axis == "tp" and self.fault.stride:
                ranks = tuple(self.rank + i * self.fault.stride for i in range(len(ranks)))
            rows.append({"pg_name": axis, "pg_desc": f"mesh_{axis}", "pg_size": len(ranks), "ranks": list(ranks)})
        info = {"backend": "nccl", "rank": self.rank, "world_size": world, "pg_config": rows}
        device = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
        return {"schemaVersion": 1, "deviceProperties": device, "distributedInfo": info, "traceEvents": self.events}


def _run(ranks: list[_Rank], lists: list[list[_Op]], grid: Mesh) -> None:
    """Go through the ranks' operations; a collective waits until all of its group have come to it."""
    at = [0] * len(ranks)
    while any(i < len(ops) for i, ops in zip(at, lists, strict=True)):
        for r, ops in zip(ranks, lists, strict=True):
            while at[r.rank] < len(ops) and ops[at[r.rank]][0] not in ("collective", "start"):
                kind, what, seconds = ops[at[r.rank]]
                at[r.rank] += 1
                if kind == "kernel":
                    r.kernel(what, seconds)
                elif kind == "wait":
                    r.now = max(r.now, r.ends)
                elif kind == "gap":
                    r.now += seconds
                elif kind == "idle" and r.fault.idle is not None and r.fault.idle[2] in (None, r.rank):
                    r.add("user_annotation", what, r.now, r.now + seconds, {})
                    r.now += seconds
        for r, ops in zip(ranks, lists, strict=True):
            if at[r.rank] == len(ops):
                continue
            kind, axis, seconds = ops[at[r.rank]]
            if kind not in ("collective", "start"):
                continue
            group = r.group(axis)
            here = [ranks[other] for other in group]
            if group[0] != r.rank or any(
                at[o] == len(lists[o]) or lists[o][at[o]][:2] != (kind, axis) for o in group
            ):
                continue
            end = max(o.now for o in here) + seconds
            for o in here:
                o.collective(axis, o.now, end)
                at[o.rank] += 1
                if kind == "start":
                    o.ends = end
                else:
                    o.now = end


def write(folder: Path, step: Step, fault: Fault = Fault()) -> list[str]:
    """Write the traces of a run and return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for rank, trace in enumerate(traces(step, fault)):
        files.append(str(folder / f"rank{rank}.json"))
        Path(files[-1]).write_text(json.dumps(trace))
    return files


Plant = Callable[[Step], Fault]


def faults(step: Step) -> dict[str, Fault]:
    """Return planted faults by the name that a diagnosis gives them."""
    total = sum(step.parts.values())
    last = step.grid.world - 1
    spread = {"names": {"products": "ampere_sgemm_128x64_tn"}, "kernel": {"products": 1.6}}
    plain = {
        "recomputation": Fault(repeats=True),
        "slow data loading": Fault(
            idle=("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0.15 * total, None)
        ),
        "saving of checkpoints": Fault(idle=("save_checkpoint", 0.3 * total, None)),
        "host": Fault(idle=("loss.item()", 0.1 * total, None)),
        "products in fp32": Fault(**spread),
        "slow products": Fault(kernel={"products": 1.2}),
        "slow attention": Fault(kernel={"attention": 3.0}),
        "memory-bound kernels": Fault(kernel={"memory": 2.5}),
        "too many launches": Fault(gap_s=0.15 * total / (2 * step.blocks * step.kernels * 2)),
    }
    if last and step.grid.size("pp") == 1:
        plain["slow rank"] = Fault(slow={last: 1.2})
    if step.axes.get("dp"):
        plain |= {
            "small buckets": Fault(buckets=3 + round(0.1 * total / 2e-4 / max(1, step.axes["dp"].calls))),
            "slow link under dp": Fault(link={"dp": 1 + 0.2 * total / step.axes["dp"].alone_s}),
        }
        if step.axes["dp"].alone_s - step.parts.get("over dp", 0.0) > 0.05 * total:
            plain["no overlap"] = Fault(overlaps=False)
    if step.parts.get("over tp"):
        factor = 1 + 0.3 * total / step.parts["over tp"]
        plain |= {"slow link under tp": Fault(link={"tp": factor})}
        plain |= {"tp across nodes": Fault(link={"tp": factor}, stride=8)}
    if step.grid.size("pp") > 1:
        plain |= {"unbalanced stages": Fault(more_blocks={0: 1.25})}
    if step.grid.ep > 1:
        plain |= {"imbalanced experts": Fault(experts={last: 1.4})}
    return plain


def replaced(step: Step, **parts: float) -> Step:
    """Return a step with other seconds of some parts."""
    return replace(step, parts=step.parts | parts)
