"""Random plans that a stack runs: any model, world, strategy and options."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, get_args, get_type_hints

from phalanx.frameworks.registry import facts
from phalanx.frameworks.stack import Stack
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job, Train
from phalanx.spec.model.presets import PRESETS
from phalanx.spec.strategy.spec import Strategy, divisors
from phalanx.spec.strategy.stack_options import STAGE_OPTIONS, StackOptions

CLUSTERS = ("dgx-h100", "dgx-a100")
_HINTS = get_type_hints(StackOptions)
_model = cache(model_named)


def plan(stack: Stack, rng: random.Random, models: tuple[str, ...] = tuple(PRESETS), options: bool = True) -> Plan:
    """Draw a plan that the stack's row does not refuse."""
    while True:
        name = rng.choice(models)
        model, _ = _model(name)
        world = 2 ** rng.randint(0, 10)
        seq = min(model.max_seq, rng.choice((2048, 4096, 8192)))
        job = Job(rng.choice((1, 2, 4, 12)) * world, seq)
        try:
            s = _strategy(stack, rng, world, model.layers)
            o = _options(stack, rng) if options else StackOptions()
            if s.layers != "auto" and any(name in o.changed() for name in STAGE_OPTIONS):
                continue  # they contradict each other
            check(s, model, job, None)
        except InputError:
            continue
        if stack.refusal(s, o, facts(model, job, s)) is not None:
            continue
        cluster = cluster_named(rng.choice(CLUSTERS))(max(8, world))
        precision = "bf16"
        choices = {"stack": stack.name, "precision": precision, "cluster": {"preset": cluster.name, "nodes": 1}}
        train = Train(name="drawn", warmup=5, min_lr_ratio=0.2) if rng.random() < 0.5 else Train()
        return Plan(model, cluster, job, s, train, choices, {"step_time_s": 1.5, "memory_bytes": 2**36}, o)


def _strategy(stack: Stack, rng: random.Random, world: int, layers: int) -> Strategy:
    left, degrees = world, {}
    for axis in rng.sample(("tp", "pp", "cp"), 3):
        allowed = [d for d in divisors(left) if d <= 16 and stack.strategy[axis].allows(d)]
        degrees[axis] = rng.choice(allowed)
        left //= degrees[axis]
    table: dict[str, Any] = {"dp": left, **degrees}
    table["ulysses"] = rng.choice(divisors(degrees["cp"]))
    block = left * degrees["cp"] * degrees["tp"]
    table["ep"] = rng.choice([d for d in divisors(block) if d <= 64]) if rng.random() < 0.5 else 1
    table["etp"] = rng.choice(divisors(degrees["tp"]))
    for name in (
        "zero",
        "micro_batch",
        "recompute",
        "schedule",
        "virtual",
        "order",
        "bucket",
        "grad_sync",
        "reshard",
    ):
        if rng.random() < 0.6:
            table[name] = rng.choice(_VALUES[name])
    table["sp"] = degrees["tp"] > 1 and rng.random() < 0.7
    if table.get("zero") and rng.random() < 0.3:
        table["shard"] = rng.choice(divisors(left))
    if degrees["pp"] == 1:
        for name in ("virtual", "schedule"):
            table.pop(name, None)
    elif rng.random() < 0.2 and layers >= (chunks := degrees["pp"] * table.get("virtual", 1)):
        blocks = [1] * chunks
        for _ in range(layers - chunks):
            blocks[rng.randrange(chunks)] += 1
        table["layers"] = "/".join(map(str, blocks))
    return Strategy(**table)


_VALUES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "micro_batch": (1, 1, 2, 4),
    "recompute": (
        "none",
        "full",
        "selective",
        "selective:core_attn",
        "selective:mlp",
        "selective:layernorm+mlp",
        "block:2",
        "uniform:2",
        "every:2",
    ),
    "schedule": ("naive", "gpipe", "1f1b", "interleaved", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
    "virtual": (1, 2, 3, 4),
    "order": ("pp/dp/cp/tp", "dp/pp/cp/tp"),
    "bucket": ("auto", 64.0, 100.0),
    "grad_sync": (None, "step", "micro"),
    "reshard": (None, "step", "action"),
}


def _options(stack: Stack, rng: random.Random) -> StackOptions:
    table = {}
    for name, entry in stack.options.items():
        if rng.random() < 0.12:
            table[name] = rng.choice([v for v in _legal(name) if entry.allows(v)])
    return StackOptions(**table)


def _legal(name: str) -> tuple[Any, ...]:
    default = StackOptions.__dataclass_fields__[name].default
    if isinstance(default, bool):
        return (False, True)
    if isinstance(default, str):
        return get_args(_HINTS[name])
    numbers: dict[str, tuple[Any, ...]] = {"optimizer_offload": (0.0, 0.5, 1.0), "document": (0, 512)}
    return numbers.get(name, (0, 1, 2, 8))
