"""All stacks by name, all frameworks by folder, and the facts of a model and a job that their rules read."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.frameworks.facts import load
from phalanx.frameworks.stack import OPERATORS, Stack
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import Job
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Conv, Index, Scan
from phalanx.spec.model.spec import ModelSpec, expert_layers
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

STACKS, FRAMEWORKS = load(Path(__file__).parent)
"""Stacks by name, documented ones and releases known by their published runs alone; frameworks by folder."""
DOCUMENTED: dict[str, Stack] = {name: stack for name, stack in STACKS.items() if stack.documented}
"""The stacks whose source says what they run and refuse."""


def stack_named(name: str) -> Stack:
    """Return a documented stack. Raises InputError for an unknown name."""
    if name not in DOCUMENTED:
        raise InputError("--stack", name, "is not a stack that Phalanx knows", nearest(name, DOCUMENTED))
    return DOCUMENTED[name]


def priced_stack(name: str) -> Stack:
    """Return a stack, documented or not. Raises InputError for an unknown name."""
    if name not in STACKS:
        raise InputError("--stack", name, "is not a software stack that Phalanx knows", nearest(name, STACKS))
    return STACKS[name]


def row_of(name: str) -> Stack:
    """Return the documented stack that says what a stack can do: itself, or the first of its framework."""
    if name in DOCUMENTED:
        return DOCUMENTED[name]
    documented = FRAMEWORKS[STACKS[name].framework].stacks
    return DOCUMENTED[documented[0]] if documented else STACKS[name]


def facts(model: ModelSpec, job: Job | None = None, s: Strategy | None = None) -> dict[str, Any]:
    """Return what rules may read of a model, a job and, for the micro-batches, a strategy."""
    x = model.experts
    result: dict[str, Any] = {
        "blocks": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "experts": x.count if x else 0,
        "top_k": x.top_k if x else 0,
        "tied": int(model.tied),
        "dense_blocks": model.layers - len(expert_layers(model)),
        **_operators(model),
    }
    if job is not None:
        result |= {"seq": job.seq, "batch": job.global_batch}
        if s is not None:
            result["micro_batches"] = s.accumulation(job)
    return result


@lru_cache(maxsize=64)
def _operators(model: ModelSpec) -> dict[str, int]:
    """Return the number of blocks that have each of OPERATORS, and the heads and groups of recurrences, by the names
    of stack.MODEL_FACTS."""
    counts = dict.fromkeys((*OPERATORS, "scans"), 0)
    heads = {"delta_heads": 1, "ssd_heads": 1, "ssd_groups": 1}
    for block, n in architecture(model).kinds.items():
        scans, attends = block.all(Scan), block.all(Attend)
        has = {scan.kind for scan in scans} | ({"scans"} if scans else set())
        has |= {"index"} if block.first(Index) is not None else set()
        has |= {"compressed"} if any(attend.compressed for attend in attends) else set()
        has |= {"streams"} if block.streams > 1 else set()
        for s in block.sublayers:
            has |= {"short_conv"} if s.first(Conv) is not None and s.first(Scan) is None else set()
        for name in has:
            counts[name] += n
        for scan in scans:
            if scan.kind == "delta":
                heads["delta_heads"] = scan.groups.count
            if scan.kind == "ssd":
                heads |= {"ssd_heads": scan.y.dim.count, "ssd_groups": scan.groups.count}
    return counts | heads


def require_runnable(
    stack: Stack, s: Strategy, options: StackOptions | None = None, about: dict[str, Any] | None = None
) -> None:
    """Require that a stack runs a strategy with these options. Raises InputError with the reason and the source."""
    refusal = stack.refusal(s, options, about)
    if refusal is not None:
        raise refusal.error(stack.name)
