"""Observe what libraries of parallel training do, option by option, and write docs/stacks_observed.{json,md}.

    python -m benchmarks.stacks_observed [DDP fully_shard DTensor pipelining torchtitan accelerate DeepSpeed]

A model of four equal blocks takes a step of two micro-batches on rank 0 of 8, with AdamW (stacks_programs.py). Every
figure is counted in that rank's second step. The line of the library that decides it is named beside it, and must
read as it did when the fact was written. Libraries that are not installed keep their rows.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import phalanx
from benchmarks.stacks_programs import (
    BLOCK,
    MICRO_BATCHES,
    WORLD,
    accelerated,
    ddp,
    pipelined,
    sharded,
    sped,
    tensor_parallel,
    titan,
)
from phalanx.schedule.observation import RankObservation

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_FSDP = "torch/distributed/fsdp/_fully_shard/"
_DDP = "torch/nn/parallel/distributed.py"
_STYLE = "torch/distributed/tensor/parallel/style.py"
_STAGE = "torch/distributed/pipelining/stage.py"


@dataclass(frozen=True)
class Case:
    """One option of a stack: its program, what it does, and the line of the library that decides it with its text."""

    stack: str
    option: str
    program: Callable[[], None]
    fact: str
    source: str
    text: str

    @property
    def library(self) -> str:
        return self.source.partition("/")[0]


CASES = (
    Case(
        "DDP",
        "default",
        ddp,
        "reduces in every micro-batch, in the parameters' type",
        f"{_DDP}:1754",
        "self.require_backward_grad_sync",
    ),
    Case(
        "DDP",
        "no_sync() but for the last micro-batch",
        partial(ddp, no_sync=True),
        "reduces once",
        f"{_DDP}:1754",
        "self.require_backward_grad_sync",
    ),
    Case(
        "DDP",
        "bucket_cap_mb=4",
        partial(ddp, bucket_cap_mb=4),
        "a bucket closes with the parameter that fills it",
        f"{_DDP}:104",
        "bucket_bytes_cap = int(",
    ),
    Case(
        "DDP",
        "gradient_as_bucket_view",
        partial(ddp, gradient_as_bucket_view=True),
        "gradients are views of the buckets: one copy less",
        f"{_DDP}:1284",
        "self.gradient_as_bucket_view",
    ),
    Case(
        "fully_shard",
        "default",
        sharded,
        "gathers forward and backward, reduces in every micro-batch",
        f"{_FSDP}_fsdp_param_group.py:607",
        "if not self.reduce_grads:",
    ),
    Case(
        "fully_shard",
        "reshard_after_forward=False",
        partial(sharded, reshard_after_forward=False),
        "keeps what forward gathered until its backward",
        f"{_FSDP}_fsdp_param_group.py:501",
        "if not self._reshard_after_forward:",
    ),
    Case(
        "fully_shard",
        "reshard_after_forward=4",
        partial(sharded, reshard_after_forward=4),
        "gathers again over 4 ranks alone",
        f"{_FSDP}_fully_shard.py:180",
        "reshard_after_forward (Optional[Union[bool, int]])",
    ),
    Case(
        "fully_shard",
        "set_requires_gradient_sync(last)",
        partial(sharded, synchronised_once=True),
        "reduces once; gradients wait whole",
        f"{_FSDP}_fsdp_param_group.py:607",
        "if not self.reduce_grads:",
    ),
    Case(
        "fully_shard",
        "bf16, reduced in fp32",
        partial(sharded, mixed=True),
        "gathers in bf16, reduces in fp32",
        f"{_FSDP}_fsdp_collectives.py:560",
        "reduce_dtype = reduce_dtype or grad_dtype",
    ),
    Case(
        "fully_shard",
        "mesh of 2 x 4 (HSDP)",
        partial(sharded, mesh=(2, 4)),
        "sums replicas in every micro-batch too",
        f"{_FSDP}_fsdp_param_group.py:709",
        "self.all_reduce_grads,",
    ),
    Case(
        "DTensor",
        "ColwiseParallel, RowwiseParallel",
        tensor_parallel,
        "sums the result of a row-wise product forward, the gradient of the input of a column-wise one backward",
        f"{_STYLE}:298",
        "outputs = outputs.redistribute(placements=output_layouts",
    ),
    Case(
        "DTensor",
        "the same, activations split over tokens",
        partial(tensor_parallel, sequence=True),
        "gathers inputs and scatters results, backward their gradients the other way; no input is gathered again",
        f"{_STYLE}:116",
        "input_tensor = input_tensor.redistribute(",
    ),
    Case(
        "DTensor",
        "tp=4 under fully_shard over 2",
        partial(tensor_parallel, dp=2),
        "fully_shard gathers and reduces what a tp rank holds",
        f"{_FSDP}_fsdp_param.py:353",
        "if self.is_dtensor:",
    ),
    *(
        Case(
            "pipelining",
            f"{name}, fully_shard over 4, 4 micro-batches",
            partial(pipelined, name),
            "a backward pass leaves its parameters gathered, a forward pass does not; reduces once, after the last",
            f"{_STAGE}:846",
            "self.submod.set_reshard_after_backward(False)",
        )
        for name in ("GPipe", "1F1B", "Interleaved1F1B")
    ),
    Case(
        "pipelining",
        "1F1B, DDP over 4, 4 micro-batches",
        partial(pipelined, "1F1B", ddp=True),
        "reduces in the backward pass of the last micro-batch",
        f"{_STAGE}:840",
        "with self.submod.no_sync():",
    ),
    Case(
        "torchtitan",
        "llama3_debugmodel (6 blocks, selective recomputation)",
        titan,
        "gathers in bf16, the last of nine units forward alone; reduces in fp32 in every micro-batch; clips",
        "torchtitan/distributed/fsdp.py:206",
        'reshard_after_forward=reshard_after_forward_policy == "always"',
    ),
    Case(
        "torchtitan",
        "2 steps of accumulation",
        partial(titan, "--training.global_batch_size", "128"),
        "gathers and reduces in every micro-batch: nothing turns the reduction off",
        "torchtitan/trainer.py:828",
        "loss.backward()",
    ),
    Case(
        "torchtitan",
        "fsdp_reshard_after_forward never",
        partial(titan, "--parallelism.fsdp_reshard_after_forward", "never"),
        "gathers forward alone, but for one of nine units",
        "torchtitan/distributed/fsdp.py:70",
        "return False",
    ),
    Case(
        "torchtitan",
        "data_parallel_replicate_degree 2",
        partial(titan, "--parallelism.data_parallel_replicate_degree", "2"),
        "sums replicas in fp32",
        f"{_FSDP}_fsdp_param_group.py:709",
        "self.all_reduce_grads,",
    ),
    Case(
        "torchtitan",
        "tensor_parallel_degree 2",
        partial(titan, "--parallelism.tensor_parallel_degree", "2"),
        "activations are split over tokens between blocks; the loss sums over tp in fp32",
        f"{_STYLE}:116",
        "input_tensor = input_tensor.redistribute(",
    ),
    Case(
        "accelerate",
        "FSDP2, bf16",
        partial(accelerated, True),
        "reduces once a step in bf16; until then gradients wait whole; gathers in every micro-batch",
        "accelerate/accelerator.py:1167",
        "model.set_requires_gradient_sync(False)",
    ),
    Case(
        "accelerate",
        "DDP, bf16",
        partial(accelerated, False),
        "reduces once a step in fp32: parameters stay fp32 under autocast",
        "accelerate/accelerator.py:1176",
        'getattr(model, "no_sync", context)',
    ),
    *(
        Case("DeepSpeed", f"ZeRO {zero}, bf16", partial(sped, zero), fact, source, text)
        for zero, fact, source, text in (
            (
                0,
                "reduces once a step, in bf16, all in one buffer",
                "deepspeed/runtime/engine.py:3816",
                "dist.all_reduce(",
            ),
            (
                1,
                "reduces once a step: an all-reduce; buckets of 500M elements live whole",
                "deepspeed/runtime/zero/stage_1_and_2.py:2384",
                "dist.all_reduce(",
            ),
            (
                2,
                "reduces in every micro-batch: an all-reduce; buckets of 500M elements",
                "deepspeed/runtime/zero/stage_1_and_2.py:2384",
                "dist.all_reduce(",
            ),
            (
                3,
                "reduces in every micro-batch: a reduce-scatter; gathers forward, keeps 1G elements",
                "deepspeed/runtime/zero/stage3.py:1931",
                "reduce_scatter_coalesced(",
            ),
        )
    ),
)
_COLUMNS = (
    "what it does",
    "gathers in a step",
    "reductions in a step",
    "also sent",
    "peak of live bytes",
    "decided at",
)
_NEEDS = {"DeepSpeed": "deepspeed", "accelerate": "accelerate", "torchtitan": "torchtitan"}


def observe(case: Case) -> dict[str, Any]:
    """Return what a case does in a step: operations by phase and micro-batch, their types, and live bytes.

    Raises ValueError where the library's line reads otherwise than when the fact was written.
    """
    _check(case)
    result = phalanx.observe(lambda: case.program(), world=WORLD, ranks=[0]).ranks[0]
    held: dict[str, int] = {}
    for h in result.holders:
        held[h.kind] = held.get(h.kind, 0) + h.bytes
    return {
        "stack": case.stack,
        "option": case.option,
        "version": version(_NEEDS.get(case.stack, "torch")),
        "fact": case.fact,
        "source": case.source,
        "gathers": _counts(result, "all_gather"),
        "reductions": _counts(result, "all_reduce") | _counts(result, "reduce_scatter") | _counts(result, "reduce"),
        "other": _counts(result, "send") | _counts(result, "all_to_all") | _counts(result, "broadcast"),
        "peak_bytes": result.peak,
        "peak_phase": result.peak_phase,
        "held_at_peak": held,
    }


def _check(case: Case) -> None:
    spec = find_spec(case.library)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{case.library} is not installed")
    path, _, number = case.source.rpartition(":")
    folder = Path(next(iter(spec.submodule_search_locations))).parent
    line = (folder / path).read_text().splitlines()[int(number) - 1]
    if case.text not in line:
        raise ValueError(f"{case.source} is {line.strip()!r}, and has no {case.text!r}")


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
    """Return the page: a table for every stack, one row for every case."""
    lines = [
        "# What the stacks do, as observed",
        "",
        f"Written by `python -m benchmarks.stacks_observed`: four blocks of {BLOCK:,} parameters, {MICRO_BATCHES} "
        f"micro-batches a step, AdamW, rank 0 of {WORLD}, the second step; torchtitan trains its own debug model. F: "
        "forward, B: backward, I and W: gradients of inputs and of weights, opt: after the last backward pass. The "
        "live bytes at the peak are named by what held most. The data behind it, by micro-batch: "
        "[stacks_observed.json](stacks_observed.json).",
    ]
    for stack in dict.fromkeys(c["stack"] for c in cases):
        rows = [c for c in cases if c["stack"] == stack]
        library = f"{stack} {rows[0]['version']}" if stack in _NEEDS else f"{stack}, torch {rows[0]['version']}"
        lines += [
            "",
            f"## {library}",
            "",
            f"| option | {' | '.join(_COLUMNS)} |",
            "|---|---|---|---|---|---|---|",
        ]
        for c in rows:
            gathers, reductions, other = (_in_words(c[kind]) for kind in ("gathers", "reductions", "other"))
            kind, most = max(c["held_at_peak"].items(), key=lambda item: item[1])
            peak = f"{c['peak_bytes']:,} in {c['peak_phase']}, {most:,} of it {kind}"
            lines.append(
                f"| {c['option']} | {c['fact']} | {gathers} | {reductions} | {other} | {peak} | `{c['source']}` |"
            )
    return "\n".join(lines) + "\n"


def _in_words(counts: dict[str, int]) -> str:
    """Return the operations of all micro-batches together."""
    totals: dict[str, int] = {}
    for what, n in counts.items():
        kind = re.sub(", micro-batch .*", "", what)
        totals[kind] = totals.get(kind, 0) + n
    return "; ".join(f"{n} x {what}" for what, n in totals.items()) or "none"


def main() -> None:
    """Observe the cases of the stacks that are named, or of all, and write the page and its data after each."""
    file = _DOCS / "stacks_observed.json"
    rows = {(c["stack"], c["option"]): c for c in json.loads(file.read_text())["cases"]}
    for case in CASES:
        if (sys.argv[1:] and case.stack not in sys.argv[1:]) or find_spec(_NEEDS.get(case.stack, "torch")) is None:
            continue
        rows[case.stack, case.option] = observe(case)
        cases = [rows[c.stack, c.option] for c in CASES if (c.stack, c.option) in rows]
        about = {"world": WORLD, "micro_batches": MICRO_BATCHES, "cases": cases}
        file.write_text(json.dumps(about, indent=1) + "\n")
        (_DOCS / "stacks_observed.md").write_text(page(cases))


if __name__ == "__main__":
    main()
